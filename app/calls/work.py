"""Accepted work: run it, which yields events, then encode its result.

The events of each output are `Begin`, then any number of `Progress` and `TileReady`, then `End`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import numpy as np
import numpy.typing as npt

from app.calls.outputs import Output
from app.telemetry.context import RequestContext
from engine.options import Encoding

__all__ = ["Answered", "Begin", "End", "Event", "Progress", "Result", "Streams", "TileReady", "Work", "finish"]


# Most bytes of a box that are copied at a time.
_COPIED = 256 << 10


@dataclass(frozen=True, slots=True)
class Begin:
    """An output's tiles follow; names are in the dialect of the operation's name."""

    output: Output


@dataclass(frozen=True, slots=True)
class Progress:
    """`done` of `total` units of work are done."""

    done: int
    total: int


@dataclass(frozen=True, slots=True, eq=False)
class TileReady:
    """A box of an output is final; `array` views it, in storage dtype. `seq` counts the boxes of the output."""

    output: Output
    seq: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    array: npt.NDArray[Any]

    def pieces(self) -> Iterator[memoryview]:
        """Yield the box's bytes in C order: views where it is contiguous in the output, else small copies."""
        return _pieces(self.array)


@dataclass(frozen=True, slots=True)
class End:
    """The whole output is final; `stats` are those of this output, or of the call if it is the last."""

    output: Output
    stats: dict[str, Any]
    last: bool


def _pieces(box: npt.NDArray[Any]) -> Iterator[memoryview]:
    if box.flags.c_contiguous:
        yield box.reshape(-1).view(np.uint8).data
    elif step := _COPIED // box[:1].nbytes:
        for start in range(0, len(box), step):
            yield np.ascontiguousarray(box[start : start + step]).reshape(-1).view(np.uint8).data
    else:
        for part in box:
            yield from _pieces(part)


Event = Begin | Progress | TileReady | End

Streams = Literal["nothing", "progress", "tiles"]


@dataclass(frozen=True, slots=True)
class Result:
    """A JSON object whose `member` gets the tensors, if there are any."""

    document: Mapping[str, Any]
    outputs: Sequence[Output] = ()
    encoding: Encoding = "base64"
    member: str = "outputs"


class Work(ABC):
    """An accepted request, ready to run. Use with ``async with``: leaving the block stops it and frees its memory."""

    context: RequestContext
    """That of the request."""
    streams: ClassVar[Streams]
    """What a stream of messages has before the result, which after tiles has checksums instead of data."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, _: object, error: BaseException | None, __: object) -> None:  # noqa: B027
        """Nothing to free by default."""

    async def events(self, *, each: bool = True) -> AsyncGenerator[Event, None]:  # noqa: ARG002
        """Run to the end; yield what happens. Without `each` there need be no events for single units."""
        return
        yield

    @abstractmethod
    def result(self) -> Result:
        """Return the result of finished work; valid inside the block."""

    def cancel(self) -> None:  # noqa: B027 - finished work has nothing to stop
        """Stop at the caller's request: `events` raises `Cancelled`."""


class Answered(Work):
    """Work that is already done, such as a validation."""

    streams = "nothing"

    def __init__(self, context: RequestContext, result: Result) -> None:
        self.context = context
        self._result = result

    def result(self) -> Result:
        """Return the result."""
        return self._result


async def finish(work: Work) -> None:
    """Run the work to its end for a reply that has whole outputs; raises what its `events` raise."""
    async for _ in work.events(each=False):
        pass
