"""Shared memory for tensors: anonymous files in size classes, reused, handed to workers as file descriptors.

A block has no name anywhere, so nothing is left to sweep after `kill -9`: the last process that closes it
frees it. Reuse matters more than anything else here: a fresh page costs several times what writing to it
costs.

A block goes back to the pool when the last reference to its *lease* is gone. Every view of the memory keeps
the lease alive, and so does every `hold` that the supervisor keeps for a unit on a worker. So a block can't
be reused while a worker may still write to it or a transport may still send from it, whoever called `release`
and when.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import mmap
import os
import tempfile
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from convgrad._errors import Overloaded, RateLimited, TooLarge

__all__ = ["Segment", "SegmentPool", "SegmentStats", "anonymous_file", "size_class"]

_log = logging.getLogger(__name__)

_SMALLEST = 64 << 10
_PAGE = mmap.PAGESIZE
_QUICK = 1 << 20  # fresh blocks up to this size are made on the event loop: a third of a millisecond

Lease = npt.NDArray[np.uint8]


def size_class(nbytes: int) -> int:
    """Round up to one of eight sizes between powers of two, at least 64 KiB: at most an eighth is wasted."""
    if nbytes <= _SMALLEST:
        return _SMALLEST
    below = 1 << ((nbytes - 1).bit_length() - 1)
    step = max(below >> 3, _PAGE)
    return -(-nbytes // step) * step


def anonymous_file() -> int:
    """Open a nameless file in memory, or an unlinked temporary one where the system allows no such thing."""
    try:
        return os.memfd_create("convgrad", os.MFD_CLOEXEC)
    except (AttributeError, OSError) as error:
        if getattr(error, "errno", None) in {errno.EMFILE, errno.ENFILE, errno.ENOMEM}:
            raise
        return _temporary_file(error)


def _temporary_file(reason: Exception) -> int:
    try:
        descriptor, path = tempfile.mkstemp(prefix="convgrad-")
    except OSError as error:
        message = f"memfd_create failed ({reason}), and so did a temporary file ({error}): let TMPDIR name a folder"
        raise OSError(error.errno, message) from error
    os.unlink(path)  # noqa: PTH108 - descriptor in hand, a Path adds nothing
    _warn_once(f"memfd_create failed ({reason}): tensors lie in unlinked files in {tempfile.gettempdir()}")
    return descriptor


@cache
def _warn_once(message: str) -> None:
    _log.warning("%s", message)


class _Block:
    """A mapped anonymous file; lives through many leases."""

    def __init__(self, number: int, size: int) -> None:
        self.id = number
        self.size = size
        self.fd = anonymous_file()
        self.lease: weakref.ref[Lease] | None = None
        self.idle_since = 0.0
        self.owner = ""
        try:
            # Pages are taken now: a full disk or a full memory is an error here, not a SIGBUS at some later
            # write.
            os.posix_fallocate(self.fd, 0, size)
            self.memory = mmap.mmap(self.fd, size)
        except OSError:
            os.close(self.fd)
            raise

    def touch(self) -> None:
        """Map every page, without the GIL, so that the first writer does not pay for it."""
        np.frombuffer(self.memory, np.uint8)[::_PAGE] = 0

    def destroy(self) -> None:
        """Free the pages, also those that a worker still has mapped, and the descriptor."""
        # A lease that is just dying in another thread may still export the mapping: it unmaps when it is
        # gone.
        with contextlib.suppress(BufferError):
            self.memory.close()
        os.ftruncate(self.fd, 0)
        os.close(self.fd)


class Segment:
    """A lease of `size` bytes of shared memory; `id`, `fd` and `block_size` tell workers what to map."""

    __slots__ = ("_lease", "block_size", "fd", "id", "size")

    def __init__(self, block: _Block, size: int, lease: Lease) -> None:
        self.id = block.id
        self.fd = block.fd
        self.block_size = block.size
        self.size = size
        self._lease: Lease | None = lease

    @property
    def view(self) -> memoryview:
        """The bytes, writeable. Each view keeps the memory from being reused for as long as it exists."""
        if self._lease is None:
            raise ValueError(f"segment {self.id} was released")
        # Not a slice of the array: NumPy would base it on the whole mapping and the lease would end too
        # early.
        return memoryview(self._lease)  # type: ignore[arg-type] # not a Buffer before 3.12

    @property
    def released(self) -> bool:
        """Whether the segment was given back."""
        return self._lease is None

    def hold(self) -> object:
        """Return an opaque object that keeps the memory from being reused for as long as it exists."""
        return self.view

    def release(self) -> None:
        """Give up this lease; a second time does nothing."""
        self._lease = None


@dataclass(frozen=True, slots=True)
class SegmentStats:
    """Count what the pool has and did; `used` and `total` are bytes of whole blocks."""

    limit: int
    total: int
    used: int
    peak: int
    blocks: int
    idle_blocks: int
    created: int
    reused: int
    retired: int
    refused: int


class SegmentPool:
    """Lend shared memory up to `limit_bytes` in all, idle blocks included.

    Safe to use from several threads. `on_retire` hears the id of every block that ceases to exist, in the
    thread that retired it.
    """

    def __init__(self, limit_bytes: int, *, on_retire: Callable[[int], object] | None = None) -> None:
        self.limit = limit_bytes
        self.on_retire = on_retire
        self._lock = threading.Lock()
        self._idle: list[_Block] = []  # longest idle first
        self._leased: dict[int, _Block] = {}
        # Leases die wherever the last reference goes, also inside the garbage collector while the lock is
        # taken: their callbacks only append here, and the next caller sorts it out.
        self._returned: deque[int] = deque()
        self._held = Counter[str]()  # bytes by owner
        self._total = 0
        self._peak = 0
        self._next_id = 1
        self._created = self._reused = self._retired = self._refused = 0
        self._closed = False

    def acquire(self, nbytes: int, owner: str = "") -> Segment:
        """Lease `nbytes`, the content undefined. Fresh large blocks block for a while: see `acquire_async`.

        An `owner` with a name gets what the others leave free and never more, so that there is room for the next.
        Raises TooLarge when the limit can never allow it, Overloaded when it does not now, and RateLimited when
        the owner has its share.
        """
        size = self._size_for(nbytes)
        if (segment := self._reuse(size, nbytes, owner)) is not None:
            return segment
        block = self._create(size)
        with self._lock:
            return self._lease(block, nbytes, owner)

    async def acquire_async(self, nbytes: int, owner: str = "") -> Segment:
        """Lease `nbytes` like `acquire`; a large fresh block is made and its pages are mapped in a thread."""
        size = self._size_for(nbytes)
        if (segment := self._reuse(size, nbytes, owner)) is not None:
            return segment
        if size > _QUICK:
            # Into the idle list first: a caller that is cancelled meanwhile leaves a block to reuse, not a
            # leak.
            await asyncio.to_thread(self._grow, size)
        return self.acquire(nbytes, owner)

    def release(self, segment: Segment) -> None:
        """Give a segment back; a second time does nothing."""
        segment.release()

    def trim(self, idle_s: float = 0.0) -> int:
        """Free the blocks that were idle for `idle_s` seconds or longer; give the number of bytes."""
        with self._lock:
            self._collect()
            horizon = time.monotonic() - idle_s
            victims = [block for block in self._idle if block.idle_since <= horizon]
            self._forget(victims)
        return self._destroy(victims)

    def close(self) -> None:
        """Free what is idle; what is leased follows at the first `trim` or `stats` after its lease ended."""
        self._closed = True
        self.trim()

    def stats(self) -> SegmentStats:
        """Count what there is."""
        with self._lock:
            self._collect()
            stats = SegmentStats(
                limit=self.limit,
                total=self._total,
                used=sum(block.size for block in self._leased.values()),
                peak=self._peak,
                blocks=len(self._idle) + len(self._leased),
                idle_blocks=len(self._idle),
                created=self._created,
                reused=self._reused,
                retired=self._retired,
                refused=self._refused,
            )
        if self._closed and stats.idle_blocks:
            self.trim()
            return self.stats()
        return stats

    def _size_for(self, nbytes: int) -> int:
        size = size_class(nbytes)
        if size > self.limit:
            size = -(-nbytes // _PAGE) * _PAGE
        if size > self.limit:
            raise TooLarge(
                f"{nbytes} bytes of tensor memory were asked for, the service has {self.limit} for all calls",
                data={"reason": "memory", "bytes": nbytes, "limit": self.limit},
            )
        return size

    def _reuse(self, size: int, nbytes: int, owner: str) -> Segment | None:
        with self._lock:
            self._collect()
            if owner:
                self._check_share(size, owner)
            block = self._take_idle(size)
            if block is None:
                return None
            self._reused += 1
            return self._lease(block, nbytes, owner)

    def _check_share(self, size: int, owner: str) -> None:
        mine, free = self._held[owner], self.limit - self._held.total()
        if mine and mine + size > free:
            self._refused += 1
            raise RateLimited(
                f"the calls of this key or address hold {mine} bytes of memory, and {free} are left for all",
                retry_after=1.0,
                data={"reason": "memory_share", "value": mine + size, "limit": free},
            )

    def _lease(self, block: _Block, nbytes: int, owner: str) -> Segment:
        lease = np.frombuffer(block.memory, np.uint8)[:nbytes]
        number, returned = block.id, self._returned
        block.lease = weakref.ref(lease, lambda _: returned.append(number))
        self._leased[block.id] = block
        block.owner = owner
        self._held[owner] += block.size
        return Segment(block, nbytes, lease)

    def _collect(self) -> None:
        if not self._returned:
            return
        now = time.monotonic()
        while self._returned:
            block = self._leased.pop(self._returned.popleft())
            self._held[block.owner] -= block.size
            if not self._held[block.owner]:
                del self._held[block.owner]
            block.idle_since = now
            self._idle.append(block)

    def _take_idle(self, size: int) -> _Block | None:
        # A block up to a half larger is still better than fresh pages. Of equal ones the last used is
        # warmest.
        best = None
        for block in reversed(self._idle):
            if size <= block.size <= size + size // 2 and (best is None or block.size < best.size):
                best = block
                if block.size == size:
                    break
        if best is not None:
            self._idle.remove(best)
        return best

    def _grow(self, size: int) -> None:
        block = self._create(size)
        block.touch()
        block.idle_since = time.monotonic()
        with self._lock:
            self._idle.append(block)

    def _create(self, size: int) -> _Block:
        with self._lock:
            victims = self._victims(self._total + size - self.limit)
            if victims is None:
                raise self._refusal(size, "the memory for tensors is in use")
            self._forget(victims)
            self._total += size
            number, self._next_id = self._next_id, self._next_id + 1
        self._destroy(victims)
        try:
            block = _Block(number, size)
        except OSError as error:
            self.trim()  # what lies idle holds descriptors and memory, which the next caller may need
            with self._lock:
                self._total -= size
                raise self._refusal(size, f"no shared memory: {error.strerror}") from error
        with self._lock:
            self._created += 1
            self._peak = max(self._peak, self._total)
        return block

    def _victims(self, excess: int) -> list[_Block] | None:
        victims = []
        for block in self._idle:
            if excess <= 0:
                break
            victims.append(block)
            excess -= block.size
        return victims if excess <= 0 else None

    def _refusal(self, size: int, reason: str) -> Overloaded:
        self._refused += 1
        return Overloaded(reason, retry_after=1.0, data={"reason": "memory", "bytes": size, "limit": self.limit})

    def _forget(self, victims: Iterable[_Block]) -> None:
        for block in victims:
            self._idle.remove(block)
            self._total -= block.size
            self._retired += 1

    def _destroy(self, victims: Iterable[_Block]) -> int:
        # Outside the lock: unmapping a gigabyte takes a while.
        freed = 0
        for block in victims:
            block.destroy()
            freed += block.size
            if self.on_retire is not None:
                self.on_retire(block.id)
        return freed
