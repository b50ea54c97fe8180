"""Where the bytes of a tensor land: pooled segments, written once, given back whatever happens.

`Holding` owns every segment that one request has taken. A call takes its tensors over with `hand_over`; what
is left when the holding is closed goes back to the pool, on refusals and disconnects too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

from app.pool.buffers import Segment, SegmentPool
from convgrad._errors import ParseError
from convgrad._npy import HEADER_LIMIT, NpyHeader, parse_header

__all__ = ["Holding", "NpyLanding", "RawLanding", "TensorFault"]

# The pool makes fresh memory up to this size in a fraction of a millisecond.
_AT_ONCE = 1 << 20

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


class Holding:
    """Own the segments of one request until a call takes them over; close it on every way out."""

    def __init__(self, pool: SegmentPool) -> None:
        self._pool = pool
        self._held: dict[int, Segment] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def acquire(self, nbytes: int) -> Segment:
        """Take a small segment at once; raises `Overloaded` or `TooLarge` as the pool does."""
        return self._hold(self._pool.acquire(max(nbytes, 1)))

    async def acquire_async(self, nbytes: int) -> Segment:
        """Take a segment of any size without holding up the event loop while fresh memory is made."""
        return self._hold(await self._pool.acquire_async(max(nbytes, 1)))

    def release(self, segment: Segment) -> None:
        """Give one segment back before its time."""
        if self._held.pop(id(segment), None) is not None:
            self._pool.release(segment)

    def hand_over(self, segment: Segment) -> Segment:
        """Let a call own the segment from now on: the call releases it."""
        del self._held[id(segment)]
        return segment

    def close(self) -> None:
        """Give back what nobody took over."""
        while self._held:
            self._pool.release(self._held.popitem()[1])

    def _hold(self, segment: Segment) -> Segment:
        self._held[id(segment)] = segment
        return segment


class RawLanding:
    """Land raw element bytes from byte 0 of a segment.

    `expected` is the exact size, where dtype and shape came first. Without it the bytes go to pieces of
    growing size, which `app.intake.tensors` joins; `bound` is the most that the body can still bring, where
    that is known.

    `write` never waits. A large segment is taken by `supply`, which has to be awaited between writes: until
    then the bytes stay in the slices that they came in. With `patient` that goes for small ones too.
    """

    def __init__(
        self, holding: Holding, *, expected: int | None, bound: int | None, patient: bool = False
    ) -> None:
        if expected is not None and bound is not None and expected > bound:
            raise TensorFault(
                f"dtype and shape need {expected} bytes, and at most {bound} can still come", "size"
            )
        self.nbytes = 0
        self.pieces: list[tuple[Segment, int]] = []
        self._holding = holding
        self._expected = expected
        self._bound = bound
        self._at_once = 0 if patient else _AT_ONCE
        self._waiting: list[bytes | memoryview] = []

    @property
    def waiting(self) -> bool:
        """Whether bytes wait for memory."""
        return bool(self._waiting)

    def write(self, data: bytes | memoryview) -> None:
        """Take the next bytes; raises `TensorFault` when they are more than expected."""
        if not data:
            return
        self.nbytes += len(data)
        if self._expected is not None and self.nbytes > self._expected:
            raise TensorFault(f"dtype and shape need {self._expected} bytes and more came", "size")
        if self._waiting:
            self._waiting.append(data)
        else:
            self._put(memoryview(data))

    def close(self) -> None:
        """Check that all expected bytes have come."""
        if self._expected is not None and self.nbytes != self._expected:
            raise TensorFault(f"dtype and shape need {self._expected} bytes and {self.nbytes} came", "size")

    async def supply(self) -> None:
        """Take the memory that the bytes so far wait for; raises `Overloaded` or `TooLarge`."""
        while self._waiting:
            self.pieces.append((await self._holding.acquire_async(self._next_size()), 0))
            waiting, self._waiting = self._waiting, []
            for data in waiting:
                if self._waiting:
                    self._waiting.append(data)
                else:
                    self._put(memoryview(data))

    def discard(self) -> None:
        """Give the memory back."""
        for segment, _ in self.pieces:
            self._holding.release(segment)
        self.pieces.clear()
        self._waiting.clear()

    def _put(self, view: memoryview) -> None:
        while view:
            segment, used = self.pieces[-1] if self.pieces else (None, 0)
            if segment is None or used == segment.size:
                size = self._next_size()
                if size > self._at_once:
                    self._waiting.append(view)
                    return
                self.pieces.append((self._holding.acquire(size), 0))
                continue
            count = min(segment.size - used, len(view))
            segment.view[used : used + count] = view[:count]
            self.pieces[-1] = (segment, used + count)
            view = view[count:]

    def _next_size(self) -> int:
        if self._expected is not None:
            return self._expected
        size = min(_FIRST_PIECE << len(self.pieces), _LARGEST_PIECE)
        left = size if self._bound is None else self._bound - sum(used for _, used in self.pieces)
        return max(1, min(size, left))


class NpyLanding:
    """Land a `.npy` file: its header is read from the first bytes, its data goes to byte 0 of a segment.

    `on_header` is called before any memory is taken; it refuses the tensor by raising.
    """

    def __init__(
        self,
        holding: Holding,
        *,
        bound: int | None,
        on_header: Callable[[NpyHeader], None] | None = None,
        patient: bool = False,
    ) -> None:
        self._holding = holding
        self._patient = patient
        self._bound = bound
        self._on_header = on_header
        self._head = bytearray()
        self._data: RawLanding | None = None
        self.header: NpyHeader | None = None

    @property
    def pieces(self) -> list[tuple[Segment, int]]:
        """The segment of the data with the bytes that have landed in it."""
        return [] if self._data is None else self._data.pieces

    @property
    def nbytes(self) -> int:
        """Bytes of data that have come, the header not among them."""
        return 0 if self._data is None else self._data.nbytes

    @property
    def waiting(self) -> bool:
        """Whether bytes wait for memory."""
        return self._data is not None and self._data.waiting

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
        self._data = RawLanding(self._holding, expected=header.nbytes, bound=bound, patient=self._patient)
        self._head = bytearray()
