"""Receive the bytes of a tensor into the segments of a `Lease`, written once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np

from app.intake.lease import Lease
from app.pool.buffers import Segment
from convgrad._dtypes import DType
from convgrad._errors import InvalidParams, ParseError
from convgrad._npy import HEADER_LIMIT, NpyHeader, parse_header

__all__ = ["NpySink", "RawSink", "TensorFault"]

# A tensor up to this size gets a segment only when it is needed: it is the smallest segment of the pool.
_SMALL = 64 << 10

# The first and the largest piece of a tensor of undeclared size; each piece is twice as large as the one before.
_FIRST_PIECE = 1 << 20
_LARGEST_PIECE = 1 << 26

# The most that a header can need: magic, version, length field, text.
_HEAD = HEADER_LIMIT + 12


class TensorFault(Exception):  # noqa: N818 - becomes an error where the tensor's name is known
    """A fault in the bytes of one tensor, without the tensor's place in the call."""

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.message = message
        self.kind = kind


class RawSink:
    """Receive raw element bytes into segments; `collect` returns them as one.

    `expected` is the exact size, when dtype and shape came first, and `bound` the most bytes that can still arrive, if
    the body has a length. Without either, the bytes go to pieces of growing size: a body may declare any tensor.

    `write` never waits: memory is allocated by `supply`, which has to be awaited between writes and after `close`.
    Unless they have an `own` segment, small tensors get none until they are collected (`Lease.keep`), so that many of
    them take no more than the size of their body.
    """

    def __init__(
        self, lease: Lease, *, expected: int | None = None, bound: int | None = None, own: bool = False
    ) -> None:
        self.nbytes = 0
        self._lease = lease
        self._own = own
        self._bound = bound
        self._expected = expected
        self._pieces: list[Segment] = []
        self._used = 0  # bytes of the last piece; the others are full
        self._small = bytearray()
        self._shared: tuple[Segment, int] | None = None  # where a small tensor was moved once it was complete
        self._complete = self._counted = False
        self._waiting: list[bytes | memoryview] = []

    def expect(self, nbytes: int, bound: int | None) -> None:
        """Set the exact size; raises `TensorFault` if it exceeds the bytes that can still arrive."""
        if bound is not None and nbytes > bound:
            raise TensorFault(f"dtype and shape need {nbytes} bytes, but at most {bound} can still arrive", "size")
        self._expected = nbytes

    def write(self, data: bytes | memoryview) -> None:
        """Receive the next bytes; raises `TensorFault` when they are more than expected."""
        self.nbytes += len(data)
        if self._expected is not None and self.nbytes > self._expected:
            raise TensorFault(f"dtype and shape need {self._expected} bytes, but more arrived", "size")
        rest = data if self._waiting or not self._pieces else self._put(data)
        if rest:
            self._waiting.append(rest)

    @property
    def missing(self) -> int:
        """How many of the expected bytes have not arrived."""
        assert self._expected is not None
        return self._expected - self.nbytes

    @property
    def in_place(self) -> bool:
        """Whether all bytes received are in their final segment, with room for the rest."""
        return self._expected is not None and bool(self._pieces) and not self._waiting

    @property
    def segment(self) -> Segment:
        """The segment with the bytes; only once they are `in_place`."""
        return self._pieces[0]

    def room(self) -> memoryview:
        """Return the memory for the bytes that are still to come; empty while there is none."""
        return self.segment.view[self.nbytes : self._expected] if self.in_place else memoryview(b"")

    def placed(self, count: int) -> None:
        """Count bytes that were written to `room` directly."""
        self.nbytes += count
        self._used += count

    def close(self) -> None:
        """Raise `TensorFault` unless all expected bytes have arrived."""
        if self._expected is not None and self.nbytes != self._expected:
            raise TensorFault(f"dtype and shape need {self._expected} bytes, but {self.nbytes} arrived", "size")
        self.complete()

    def complete(self) -> None:
        """End the tensor: no more bytes will be written."""
        self._complete = True

    async def supply(self) -> None:
        """Allocate the memory that the bytes so far need; raises `Overloaded` or `TooLarge`."""
        if self._own and self._expected is not None and not self._pieces:
            self._pieces.append(await self._lease.acquire_async(self._expected))
        if not self._waiting and (self._pieces or not self._complete):
            return
        waiting, self._waiting = self._waiting, []
        if not self._own and (self.nbytes if self._expected is None else self._expected) <= _SMALL:
            await self._keep(waiting)
            return
        if self._small:
            waiting.insert(0, bytes(self._small))
            self._small = bytearray()
        for data in waiting:
            rest = self._put(data) if self._pieces else memoryview(data)
            while rest:
                await self._add_piece()
                rest = self._put(rest)

    async def _keep(self, waiting: list[bytes | memoryview]) -> None:
        """Add to a small tensor on the heap; once it is complete, it may be moved to a segment beside others."""
        for data in waiting:
            self._small += data
        if self._complete and not self._counted:
            self._counted = True
            if (shared := await self._lease.keep(self._small)) is not None:
                self._shared, self._small = shared, bytearray()

    async def collect(self) -> Segment:
        """Collect all bytes in one segment; each piece is returned to the pool once it is copied."""
        self.complete()
        await self.supply()
        if len(self._pieces) != 1:
            whole, start = await self._lease.acquire_async(self.nbytes), 0
            if not self._pieces:
                whole.view[: self.nbytes] = self._small_bytes()
            pieces, self._pieces = self._pieces, [whole]
            self._small, self._shared = bytearray(), None
            for piece in pieces:
                size = min(piece.size, self.nbytes - start)
                await asyncio.to_thread(_copy, whole, start, piece, size)
                self._lease.release(piece)
                start += size
        return self._pieces[0]

    def content(self) -> bytes:
        """Return a copy of all bytes; for small tensors."""
        pieces = b"".join([bytes(piece.view) for piece in self._pieces])
        return b"".join((pieces[: self.nbytes], self._small_bytes(), *self._waiting))

    def discard(self) -> None:
        """Return the memory to the pool."""
        for piece in self._pieces:
            self._lease.release(piece)
        self._pieces.clear()
        self._waiting.clear()
        self._small, self._shared = bytearray(), None

    def _small_bytes(self) -> bytearray | memoryview:
        if self._shared is None:
            return self._small
        segment, start = self._shared
        return segment.view[start : start + self.nbytes]

    def _put(self, data: bytes | memoryview) -> memoryview:
        """Write what fits the last piece; return the rest."""
        piece, start, view = self._pieces[-1], self._used, memoryview(data)
        count = min(piece.size - start, len(view))
        piece.view[start : start + count] = view[:count]
        self._used += count
        return view[count:]

    async def _add_piece(self) -> None:
        size, bound = self._expected, self._bound
        if size is None or bound is None:
            most, taken = size if bound is None else bound, sum(piece.size for piece in self._pieces)
            size = min(_FIRST_PIECE << len(self._pieces), _LARGEST_PIECE)
            size = size if most is None else max(1, min(size, most - taken))
        self._pieces.append(await self._lease.acquire_async(size))
        self._used = 0


def _copy(target: Segment, start: int, source: Segment, size: int) -> None:
    # The caller may be cancelled before the copy ends: the views keep both segments from being reused.
    np.copyto(np.frombuffer(target.view, np.uint8)[start : start + size], np.frombuffer(source.view, np.uint8)[:size])


class NpySink(RawSink):
    """Receive a `.npy` file: its header is parsed, its data goes to byte 0 of a segment.

    `on_header` is called before any memory is allocated; it rejects the tensor by raising.
    """

    def __init__(
        self,
        lease: Lease,
        *,
        bound: int | None,
        own: bool = False,
        on_header: Callable[[NpyHeader], None] | None = None,
    ) -> None:
        super().__init__(lease, bound=bound, own=own)
        self._on_header = on_header
        self._head = bytearray()
        self.header: NpyHeader | None = None

    def write(self, data: bytes | memoryview) -> None:
        """Receive the next bytes of the file."""
        if self.header is not None:
            super().write(data)
            return
        before = len(self._head)
        self._head += data[:_HEAD]
        try:
            self.header = parse_header(self._head)
        except ParseError as error:
            raise TensorFault(error.message, "npy") from None
        if self.header is None:
            return
        if self._on_header is not None:
            self._on_header(self.header)
        self.expect(self.header.nbytes, None if self._bound is None else self._bound - self.header.offset)
        self._head = bytearray()
        super().write(memoryview(data)[self.header.offset - before :])

    def dtype(self, declared: str | None) -> DType:
        """Return the dtype by the header; raises `TensorFault` unless it is the `declared` one."""
        assert self.header is not None
        try:
            return self.header.dtype(declared)
        except InvalidParams as error:
            raise TensorFault(error.errors[0]["msg"], error.errors[0]["type"]) from None

    def close(self) -> None:
        """Raise `TensorFault` unless the header and all of its data have arrived."""
        if self.header is None:
            raise TensorFault("the .npy data ends inside its header", "npy")
        super().close()
