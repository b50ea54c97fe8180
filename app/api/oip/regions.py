"""Shared-memory regions that clients on this host have registered, read and written without mapping them.

A client may truncate its memory at any time, which would kill a process that has it mapped (SIGBUS), while `preadv` and
`pwritev` only return less. So bytes are copied between the region and the service's own segments, outside the event
loop and without the GIL. Workers never see a client's memory, which may change during the call: a unit that runs twice
has to read the same data.
"""

from __future__ import annotations

import os
import re
import stat
import weakref
from dataclasses import dataclass
from pathlib import Path

from app.api.oip.request import MemoryRange
from app.intake.elements import Elements
from app.threads import in_thread_if
from convgrad._errors import CallerError, InvalidParams, InvalidRequest
from schemas.broken_rules import safe_key

__all__ = ["Region", "RegionElements", "Regions"]

_FOLDER = Path("/dev/shm")  # noqa: S108 - where Linux has POSIX shared memory
_NAME = re.compile(r"[A-Za-z0-9_.:@+=-]{1,128}")
_KEY = re.compile(r"/?([A-Za-z0-9_][A-Za-z0-9_.-]{0,253})")
# POSIX semaphores live in the same folder.
_FOREIGN = "sem."
_MOST_REGIONS = 256
_INT64_MAX = 2**63 - 1
# Copying this much takes some tenths of a millisecond, as long as switching to a thread and back.
_INLINE = 2 << 20


@dataclass(frozen=True, eq=False)
class Region:
    """A registered part of a shared-memory object; its descriptor is closed with the last reference."""

    name: str
    key: str
    offset: int
    byte_size: int
    descriptor: int

    def __post_init__(self) -> None:
        weakref.finalize(self, os.close, self.descriptor)

    def describe(self) -> dict[str, str | int]:
        """Describe the region as the protocol's status does."""
        return {"name": self.name, "key": self.key, "offset": self.offset, "byte_size": self.byte_size}

    def read(self, offset: int, into: memoryview) -> None:
        """Fill `into` from an offset of the region; raises `InvalidRequest` when its memory was truncated."""
        done = 0
        while done < len(into):
            count = os.preadv(self.descriptor, [into[done:]], self.offset + offset + done)
            if not count:
                raise self._truncated()
            done += count

    async def write(self, offset: int, data: memoryview) -> None:
        """Write `data` to an offset of the region; raises `InvalidRequest` when that fails."""
        await in_thread_if(len(data) > _INLINE, self._write, offset, data)

    def _write(self, offset: int, data: memoryview) -> None:
        done = 0
        try:
            # Writing past the end would extend the client's memory.
            if os.fstat(self.descriptor).st_size < self.offset + offset + len(data):
                raise self._truncated()
            while done < len(data):
                done += os.pwritev(self.descriptor, [data[done:]], self.offset + offset + done)
        except OSError as error:
            raise InvalidRequest(f"the region {self.name} can't be written: {error.strerror}") from None

    def _truncated(self) -> InvalidRequest:
        return InvalidRequest(f"the memory of the region {self.name} is shorter than it was when registered")


@dataclass(frozen=True, slots=True)
class RegionElements(Elements):
    """The elements of a tensor at a place in a region, which are copied from there."""

    region: Region
    place: MemoryRange

    def content(self) -> bytearray:
        """Return all bytes."""
        content = bytearray(self.place.byte_size)
        self.fill(memoryview(content))
        return content

    def fill(self, target: memoryview) -> None:
        """Write all bytes into memory of their size."""
        self.region.read(self.place.offset, target)


class Regions(dict[str, Region]):
    """The registered regions of one owner by name.

    A region must be a shared-memory object of the user who runs the service. Running calls keep using a region that is
    removed.
    """

    def register(self, name: str, key: object, offset: object, byte_size: object) -> None:
        """Open the object `key` and register `byte_size` bytes of it from `offset` under a new name.

        Raises `InvalidRequest` for a malformed name or key, a name in use, and an object that does not exist, belongs
        to another user, or is too short.
        """
        if not _NAME.fullmatch(name):
            raise InvalidRequest("a region's name must have 1 to 128 letters, digits or characters of _.:@+=-")
        if name in self:
            raise InvalidRequest(f"shared memory region {name} is already registered: unregister it first")
        if len(self) >= _MOST_REGIONS:
            raise InvalidRequest(f"{_MOST_REGIONS} shared memory regions are already registered: unregister some")
        match = _KEY.fullmatch(key) if isinstance(key, str) else None
        if match is None or match[1].startswith(_FOREIGN):
            raise InvalidRequest("key must be the name of a POSIX shared memory object, without a folder")
        start, size = _number("offset", offset, 0), _number("byte_size", byte_size, 1)
        descriptor = _open(match[1])
        try:
            _check_object(descriptor, match[0], start + size)
        except CallerError:
            os.close(descriptor)
            raise
        self[name] = Region(name, match[0], start, size, descriptor)

    def find(self, place: MemoryRange) -> Region:
        """Return the region of a place; raises `InvalidParams` if it does not exist or does not contain the place."""
        region = self.get(place.region)
        if region is None:
            raise InvalidParams(f"there is no shared memory region {safe_key(place.region)}", errors=[])
        if place.offset + place.byte_size > region.byte_size:
            raise InvalidParams(
                f"offset {place.offset} and size {place.byte_size} exceed the {region.byte_size} bytes of the shared "
                f"memory region {region.name}",
                errors=[],
            )
        return region


def _number(what: str, value: object, least: int) -> int:
    if type(value) is not int or not least <= value <= _INT64_MAX:
        raise InvalidRequest(f"{what} must be an integer of at least {least}")
    return value


def _open(key: str) -> int:
    try:
        # No links; the check that follows excludes pipes and devices.
        return os.open(_FOLDER / key, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise InvalidRequest(f"the shared memory object can't be opened: {error.strerror}") from None


def _check_object(descriptor: int, key: str, end: int) -> None:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        raise InvalidRequest(f"{key} is not shared memory of the user who runs this service")
    if status.st_size < end:
        raise InvalidRequest(f"{key} has {status.st_size} bytes, but offset and byte_size need {end}")
