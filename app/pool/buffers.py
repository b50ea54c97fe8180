"""Shared memory for tensors: anonymous files in size classes, reused, passed to workers as file descriptors.

A block has no name, so `kill -9` leaves nothing to clean up: it is freed when the last process closes it. Blocks are
reused because a fresh page costs several times what writing to it costs.

A block returns to the pool when the last reference to its *lease* is gone. Every view of the memory keeps the lease
alive, and so do those that the engine keeps for units on workers. So a block can't be reused while a
worker may still write to it or a transport may still send from it, even after `release`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import logging
import mmap
import os
import tempfile
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from convgrad._errors import Overloaded, RateLimited, TooLarge

__all__ = ["Memory", "Segment", "SegmentPool", "SegmentStats", "anonymous_file", "size_class"]

_log = logging.getLogger(__name__)

_SMALLEST = 64 << 10
_PAGE = mmap.PAGESIZE
_QUICK = 1 << 20  # fresh blocks up to this size are created on the event loop: a third of a millisecond

_Bytes = npt.NDArray[np.uint8]


def size_class(nbytes: int) -> int:
    """Round up to one of eight sizes between powers of two, at least 64 KiB; at most an eighth is wasted."""
    if nbytes <= _SMALLEST:
        return _SMALLEST
    below = 1 << ((nbytes - 1).bit_length() - 1)
    step = max(below >> 3, _PAGE)
    return -(-nbytes // step) * step


def anonymous_file() -> int:
    """Open an anonymous file in memory, or an unlinked temporary file where memfd_create does not work."""
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
        message = f"memfd_create failed ({reason}), and so did a temporary file ({error}): set TMPDIR to another folder"
        raise OSError(error.errno, message) from error
    os.unlink(path)  # noqa: PTH108 - descriptor in hand, a Path adds nothing
    _warn_once(f"memfd_create failed ({reason}): tensors are kept in unlinked files in {tempfile.gettempdir()}")
    return descriptor


@cache
def _warn_once(message: str) -> None:
    _log.warning("%s", message)


class _Block:
    """A mapped anonymous file, leased many times."""

    def __init__(self, number: int, size: int) -> None:
        self.id = number
        self.size = self.block_size = size
        self.fd = anonymous_file()
        self.lease: weakref.ref[_Bytes] | None = None
        self.idle_since = 0.0
        self.owner = ""
        try:
            # Allocate the pages now: a full disk or memory is an error here instead of a SIGBUS at a later write.
            os.posix_fallocate(self.fd, 0, size)
            self.memory = mmap.mmap(self.fd, size)
        except OSError:
            os.close(self.fd)
            raise

    def touch(self) -> None:
        """Fault in every page, without the GIL, so that the first writer need not."""
        np.frombuffer(self.memory, np.uint8)[::_PAGE] = 0

    def destroy(self) -> None:
        """Free the pages, even those that a worker still has mapped, and the descriptor."""
        # A lease that is being deleted in another thread may still export the mapping, which unmaps after that.
        with contextlib.suppress(BufferError):
            self.memory.close()
        os.ftruncate(self.fd, 0)
        os.close(self.fd)


class Memory:
    """Bytes of this process that kernels read or write in it."""

    __slots__ = ("_lease", "size")

    def __init__(self, data: bytes | bytearray | memoryview | _Bytes) -> None:
        self.size = len(data)
        self._lease: Any = data

    @property
    def view(self) -> memoryview:
        """The bytes. The memory is not reused while a view exists."""
        if self._lease is None:
            raise ValueError("the memory was released")
        # Not a slice of the array: NumPy would base it on the whole mapping, and the lease would end too early.
        return memoryview(self._lease)

    def release(self) -> None:
        """End this lease; calling it again does nothing."""
        self._lease = None


class Segment(Memory):
    """A lease of `size` writeable bytes of shared memory; workers map it by `id`, `fd` and `block_size`."""

    __slots__ = ("block_size", "fd", "id")

    id: int
    fd: int
    block_size: int

    def __init__(self, block: _Block | Segment, size: int, lease: _Bytes) -> None:
        super().__init__(lease)
        self.id = block.id
        self.fd = block.fd
        self.block_size = block.block_size
        self.size = size

    def share(self) -> Segment:
        """Return another lease of the same memory, which is reused when both have ended."""
        assert self._lease is not None
        return Segment(self, self.size, self._lease)


@dataclass(slots=True)
class SegmentStats:
    """Counts of a pool, and its bytes in whole blocks: those that are leased, all, and the most so far."""

    used: int = 0
    total: int = 0
    peak: int = 0
    idle_blocks: int = 0
    created: int = 0
    reused: int = 0
    refused: int = 0


class SegmentPool:
    """Lend shared memory, at most `limit_bytes` in all, idle blocks included.

    Thread-safe. `on_retire` is called with the id of every block that is freed, in the thread that frees it.
    """

    def __init__(self, limit_bytes: int, *, on_retire: Callable[[int], object] | None = None) -> None:
        self.limit = limit_bytes
        self.on_retire = on_retire
        self._lock = threading.Lock()
        self._idle: list[_Block] = []  # longest idle first
        self._leased: dict[int, _Block] = {}
        # A lease ends where its last reference goes, perhaps in the garbage collector while the lock is held:
        # its callback only appends here, and the next caller returns the block.
        self._returned: deque[int] = deque()
        self._held = Counter[str]()  # bytes by owner
        self._stats = SegmentStats()  # without what `stats` counts itself
        self._numbers = itertools.count(1)
        self._closed = False

    def acquire(self, nbytes: int, owner: str = "") -> Segment:
        """Lease `nbytes` with undefined content. Creating a large block takes a while: see `acquire_async`.

        A named `owner` may hold at most as much as it leaves free, so that another one finds room. Raises `TooLarge`
        when the limit can never allow it, `Overloaded` when memory is full, and `RateLimited` when the owner has its
        share.
        """
        size = self._size_for(nbytes)
        return self._reuse(size, nbytes, owner) or self._fresh(size, nbytes, owner)

    async def acquire_async(self, nbytes: int, owner: str = "") -> Segment:
        """Lease `nbytes` like `acquire`; large blocks are created in a thread."""
        size = self._size_for(nbytes)
        if (segment := self._reuse(size, nbytes, owner)) is not None:
            return segment
        if size <= _QUICK:
            return self._fresh(size, nbytes, owner)
        # If the caller is cancelled meanwhile, the lease ends with the last reference to the segment.
        return await asyncio.to_thread(self._fresh, size, nbytes, owner, touch=True)

    def count(self, nbytes: int) -> None:
        """Count memory that is not shared, such as a JSON body, as leased; a negative number ends that.

        Raises `TooLarge` and `Overloaded` as `acquire` does.
        """
        if nbytes > self.limit:
            raise self._too_large("the request", nbytes)
        if nbytes > 0:
            self._reserve(nbytes, "")
        else:
            self._give_back(-nbytes, "")

    def trim(self, idle_s: float = 0.0) -> int:
        """Free the blocks that have been idle for `idle_s` seconds; return the number of bytes freed."""
        with self._lock:
            self._collect()
            horizon = time.monotonic() - idle_s
            victims = [block for block in self._idle if block.idle_since <= horizon]
            self._forget(victims)
        return self._destroy(victims)

    def close(self) -> None:
        """Free the idle blocks; leased ones are freed by the first `trim` or `stats` after their lease ends."""
        self._closed = True
        self.trim()

    def stats(self) -> SegmentStats:
        """Return the current counts and sizes."""
        with self._lock:
            self._collect()
            stats = replace(self._stats, used=self._held.total(), idle_blocks=len(self._idle))
        if self._closed and stats.idle_blocks:
            self.trim()
            return self.stats()
        return stats

    def _size_for(self, nbytes: int) -> int:
        size = size_class(nbytes)
        if size > self.limit:
            size = -(-nbytes // _PAGE) * _PAGE
        if size > self.limit:
            raise self._too_large("a tensor", nbytes)
        return size

    def _too_large(self, what: str, nbytes: int) -> TooLarge:
        message = f"{what} needs {nbytes} bytes, but the service has {self.limit} for all calls"
        return TooLarge(message, data={"reason": "memory", "bytes": nbytes, "limit": self.limit})

    def _reuse(self, size: int, nbytes: int, owner: str) -> Segment | None:
        with self._lock:
            self._collect()
            self._check_share(size, owner)
            block = self._take_idle(size)
            if block is None:
                return None
            self._stats.reused += 1
            self._hold(block.size, owner)
            return self._lease(block, nbytes, owner)

    def _check_share(self, size: int, owner: str) -> None:
        if not owner:
            return
        mine, free = self._held[owner], self.limit - self._held.total()
        if mine and mine + size > free:
            self._stats.refused += 1
            raise RateLimited(
                f"the calls of this key or address use {mine} bytes of memory; only {free} are free",
                retry_after=1.0,
                data={"reason": "memory_share", "value": mine + size, "limit": free},
            )

    def _lease(self, block: _Block, nbytes: int, owner: str) -> Segment:
        lease = np.frombuffer(block.memory, np.uint8)[:nbytes]
        number, returned = block.id, self._returned
        block.lease = weakref.ref(lease, lambda _: returned.append(number))
        self._leased[block.id] = block
        block.owner = owner
        return Segment(block, nbytes, lease)

    def _collect(self) -> None:
        if not self._returned:
            return
        now = time.monotonic()
        while self._returned:
            block = self._leased.pop(self._returned.popleft())
            self._hold(-block.size, block.owner)
            block.idle_since = now
            self._idle.append(block)

    def _hold(self, size: int, owner: str) -> None:
        self._held[owner] += size
        if not self._held[owner]:
            del self._held[owner]

    def _take_idle(self, size: int) -> _Block | None:
        # A block up to half as large again is better than fresh pages; the last used one is warmest.
        best = None
        for at in range(len(self._idle) - 1, -1, -1):
            found = self._idle[at].size
            if size <= found <= size + size // 2 and (best is None or found < self._idle[best].size):
                best = at
                if found == size:
                    break
        return None if best is None else self._idle.pop(best)

    def _fresh(self, size: int, nbytes: int, owner: str, *, touch: bool = False) -> Segment:
        self._reserve(size, owner)
        try:
            block = _Block(next(self._numbers), size)
        except OSError as error:
            self.trim()  # idle blocks hold descriptors and memory, which the next caller may need
            self._give_back(size, owner)
            raise self._refusal(size, f"shared memory can't be allocated: {error.strerror}") from error
        if touch:
            block.touch()
        with self._lock:
            self._stats.created += 1
            return self._lease(block, nbytes, owner)

    def _reserve(self, size: int, owner: str) -> None:
        """Count memory that is not allocated yet; idle blocks go for it."""
        with self._lock:
            self._collect()
            self._check_share(size, owner)  # another thread may have created one since `_reuse`
            victims = self._victims(self._stats.total + size - self.limit)
            if victims is None:
                raise self._refusal(size, "the memory for tensors is in use")
            self._forget(victims)
            self._stats.total += size
            self._stats.peak = max(self._stats.peak, self._stats.total)
            self._hold(size, owner)
        self._destroy(victims)

    def _give_back(self, size: int, owner: str) -> None:
        with self._lock:
            self._stats.total -= size
            self._hold(-size, owner)

    def _victims(self, excess: int) -> list[_Block] | None:
        victims = []
        for block in self._idle:
            if excess <= 0:
                break
            victims.append(block)
            excess -= block.size
        return victims if excess <= 0 else None

    def _refusal(self, size: int, reason: str) -> Overloaded:
        self._stats.refused += 1
        return Overloaded(reason, retry_after=1.0, data={"reason": "memory", "bytes": size, "limit": self.limit})

    def _forget(self, victims: Iterable[_Block]) -> None:
        for block in victims:
            self._idle.remove(block)
            self._stats.total -= block.size

    def _destroy(self, victims: Iterable[_Block]) -> int:
        # Outside the lock: unmapping a gigabyte takes a while.
        freed = 0
        for block in victims:
            block.destroy()
            freed += block.size
            if self.on_retire is not None:
                self.on_retire(block.id)
        return freed
