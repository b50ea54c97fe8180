"""Where the bytes of a tensor land: pooled segments, written once, given back whatever happens.

`Lease` owns every segment that one request has taken. A call takes its tensors over with `hand_over`; what
is left when the lease is closed goes back to the pool, on refusals and disconnects too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Protocol, Self

import numpy as np

from app.pool.buffers import Segment, SegmentPool
from app.telemetry.context import current_context
from convgrad._errors import ParseError
from convgrad._npy import HEADER_LIMIT, NpyHeader, parse_header

__all__ = ["DirectBody", "Lease", "NpySink", "RawSink", "TensorFault"]

# What stays on the heap until it is needed: the pool lends no less than this.
_SMALL = 64 << 10

# The first piece of a tensor whose size nobody declared, and the largest one; each is twice as long as the
# one before.
_FIRST_PIECE = 1 << 20
_LARGEST_PIECE = 1 << 26

# The most that a header can need: magic, version, length field, text.
_HEAD = HEADER_LIMIT + 12


class TensorFault(Exception):  # noqa: N818 - not an error yet: whoever knows the place makes one of it
    """Say what is wrong with the bytes of one tensor, and nothing about where it stands in the call."""

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.message = message
        self.kind = kind


class DirectBody(Protocol):
    """Read the rest of a body where it belongs."""

    def place(self, targets: Iterable[memoryview]) -> None:
        """Fill these with the next bytes, from now on."""

    def forget(self) -> None:
        """Fill none of them any more."""


class Lease:
    """Own the segments of one request until a call takes them over; close it on every way out."""

    def __init__(self, pool: SegmentPool, direct_body: DirectBody | None = None) -> None:
        self._pool = pool
        self._direct_body = direct_body
        self._held: dict[int, Segment] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def acquire_async(self, nbytes: int) -> Segment:
        """Take a segment, not holding up the event loop meanwhile; raises as `SegmentPool.acquire` does."""
        segment = await self._pool.acquire_async(max(nbytes, 1), current_context().owner)
        self._held[id(segment)] = segment
        return segment

    def release(self, segment: Segment) -> None:
        """Give one segment back before its time."""
        if self._held.pop(id(segment), None) is not None:
            self._pool.release(segment)

    def hand_over(self, segment: Segment) -> Segment:
        """Let a call own the segment from now on: the call releases it."""
        del self._held[id(segment)]
        return segment

    def place(self, targets: Iterable[memoryview]) -> None:
        """Have the next bytes of the body put there where that is possible: such come as `memoryview`."""
        if self._direct_body is not None:
            self._direct_body.place(targets)

    def close(self) -> None:
        """Give back what nobody took over."""
        if self._direct_body is not None:
            self._direct_body.forget()
        while self._held:
            self._pool.release(self._held.popitem()[1])


class RawSink:
    """Land raw element bytes in segments; `collect` gives them as one.

    `expected` is the exact size, where dtype and shape came first. Without it the bytes go to pieces of
    growing size; `bound` is the most that the body can still bring, where that is known.

    `write` never waits: memory is taken by `supply`, which has to be awaited between writes. Small tensors
    stay on the heap until they are collected, so that a body of many takes no more than its own size.
    """

    def __init__(self, lease: Lease, *, expected: int | None, bound: int | None) -> None:
        if expected is not None and bound is not None and expected > bound:
            raise TensorFault(f"dtype and shape need {expected} bytes, and at most {bound} can still come", "size")
        self.nbytes = 0
        self._lease = lease
        self._expected = expected
        self._bound = bound
        self._pieces: list[tuple[Segment, int]] = []
        self._small = bytearray()
        self._waiting: list[bytes | memoryview] = []

    @property
    def small(self) -> bool:
        """Whether the tensor needs no segment yet."""
        return (self.nbytes if self._expected is None else self._expected) <= _SMALL

    def write(self, data: bytes | memoryview) -> None:
        """Take the next bytes; raises `TensorFault` when they are more than expected."""
        self.nbytes += len(data)
        if self._expected is not None and self.nbytes > self._expected:
            raise TensorFault(f"dtype and shape need {self._expected} bytes and more came", "size")
        rest = data if self._waiting or not self._pieces else self._put(memoryview(data))
        if rest:
            self._waiting.append(rest)

    @property
    def settled(self) -> bool:
        """Whether all bytes that have come are where they stay, with room behind them for the rest."""
        return self._expected is not None and bool(self._pieces) and not self._waiting

    @property
    def segment(self) -> Segment:
        """Where the bytes are; only once they are `settled`."""
        return self._pieces[0][0]

    def room(self) -> memoryview:
        """Give the place of the bytes that are still to come, as far as it is known."""
        return self.segment.view[self.nbytes : self._expected] if self.settled else memoryview(b"")

    def placed(self, count: int) -> None:
        """Count bytes that were written to their place."""
        self.nbytes += count
        segment, used = self._pieces[-1]
        self._pieces[-1] = (segment, used + count)

    def close(self) -> None:
        """Check that all expected bytes have come."""
        if self._expected is not None and self.nbytes != self._expected:
            raise TensorFault(f"dtype and shape need {self._expected} bytes and {self.nbytes} came", "size")

    async def supply(self) -> None:
        """Take the memory that the bytes so far wait for; raises `Overloaded` or `TooLarge`."""
        waiting, self._waiting = self._waiting, []
        if self.small:
            for data in waiting:
                self._small += data
            return
        if self._small:
            waiting.insert(0, bytes(self._small))
            self._small = bytearray()
        for data in waiting:
            rest: bytes | memoryview = self._put(memoryview(data)) if self._pieces else data
            while rest:
                self._pieces.append((await self._lease.acquire_async(self._next_size()), 0))
                rest = self._put(memoryview(rest))

    async def collect(self) -> Segment:
        """Bring all bytes into one segment; a piece goes back to the pool once it is copied."""
        await self.supply()
        if len(self._pieces) != 1:
            whole, at = await self._lease.acquire_async(self.nbytes), 0
            whole.view[: len(self._small)] = self._small
            pieces, self._pieces, self._small = self._pieces, [(whole, self.nbytes)], bytearray()
            for segment, used in pieces:
                await asyncio.to_thread(_copy, whole, at, segment, used)
                self._lease.release(segment)
                at += used
        return self._pieces[0][0]

    def content(self) -> bytes:
        """Copy out all bytes, for tensors of a few."""
        pieces = b"".join(bytes(segment.view[:used]) for segment, used in self._pieces)
        return b"".join((pieces, self._small, *self._waiting))

    def discard(self) -> None:
        """Give the memory back."""
        for segment, _ in self._pieces:
            self._lease.release(segment)
        self._pieces.clear()
        self._waiting.clear()
        self._small = bytearray()

    def _put(self, view: memoryview) -> memoryview:
        """Write what the last piece has room for; return the rest."""
        segment, used = self._pieces[-1]
        count = min(segment.size - used, len(view))
        segment.view[used : used + count] = view[:count]
        self._pieces[-1] = (segment, used + count)
        return view[count:]

    def _next_size(self) -> int:
        if self._expected is not None:
            return self._expected
        size = min(_FIRST_PIECE << len(self._pieces), _LARGEST_PIECE)
        left = size if self._bound is None else self._bound - sum(used for _, used in self._pieces)
        return max(1, min(size, left))


def _copy(target: Segment, at: int, source: Segment, used: int) -> None:
    # A cancelled caller may leave before the copy ends: its views keep both memories from being lent again.
    np.copyto(np.frombuffer(target.view, np.uint8)[at : at + used], np.frombuffer(source.view, np.uint8)[:used])


class NpySink:
    """Land a `.npy` file: its header is read from the first bytes, its data goes to byte 0 of a segment.

    `on_header` is called before any memory is taken; it refuses the tensor by raising.
    """

    def __init__(
        self, lease: Lease, *, bound: int | None, on_header: Callable[[NpyHeader], None] | None = None
    ) -> None:
        self._lease = lease
        self._bound = bound
        self._on_header = on_header
        self._head = bytearray()
        self._data: RawSink | None = None
        self.header: NpyHeader | None = None

    @property
    def data(self) -> RawSink:
        """Where the data lands; only once the header has come."""
        assert self._data is not None
        return self._data

    @property
    def small(self) -> bool:
        """Whether the tensor needs no segment yet."""
        return self._data is None or self._data.small

    async def supply(self) -> None:
        """Take the memory that the bytes so far wait for; raises `Overloaded` or `TooLarge`."""
        if self._data is not None:
            await self._data.supply()

    def write(self, data: bytes | memoryview) -> None:
        """Put the next bytes of the file in their place."""
        if self._data is not None:
            self._data.write(data)
            return
        before = len(self._head)
        self._head += data[:_HEAD]
        try:
            header = parse_header(self._head)
        except ParseError as error:
            raise TensorFault(error.message, "npy") from None
        if header is None:
            return
        self._open(header)
        assert self._data is not None
        self._data.write(memoryview(data)[header.offset - before :])

    def room(self) -> memoryview:
        """Give the place of the bytes that are still to come, as far as it is known."""
        return memoryview(b"") if self._data is None else self._data.room()

    def placed(self, count: int) -> None:
        """Count bytes that were written to their place."""
        self.data.placed(count)

    def close(self) -> None:
        """Check that the header came, and all data that it promises."""
        if self._data is None:
            raise TensorFault("the .npy data ends inside its header", "npy")
        self._data.close()

    def discard(self) -> None:
        """Give the memory back."""
        if self._data is not None:
            self._data.discard()
        self._head = bytearray()

    def _open(self, header: NpyHeader) -> None:
        self.header = header
        if self._on_header is not None:
            self._on_header(header)
        bound = None if self._bound is None else self._bound - header.offset
        self._data = RawSink(self._lease, expected=header.nbytes, bound=bound)
        self._head = bytearray()
