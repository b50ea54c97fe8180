"""Accepted work: run it, which yields events, then encode its result.

The events of each output are `Begin`, then any number of `Progress` and `TileReady`, then `End`.
"""

from __future__ import annotations

import asyncio
import hashlib
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from app.pool.buffers import Memory
from app.telemetry.context import RequestContext
from app.threads import in_thread_if
from convgrad._dtypes import dtype
from engine.options import Encoding
from engine.planning import tensor_bytes
from kernels import storage_dtype
from schemas.ops import TensorSpec

__all__ = [
    "Answered",
    "Begin",
    "End",
    "Event",
    "Output",
    "Progress",
    "Result",
    "Streams",
    "TileReady",
    "Work",
    "finish",
]

# The nodes of a graph that take about a millisecond to encode.
_NODES = 100
# Most bytes of a box that are copied at a time.
_COPIED = 256 << 10
# Below this size hashing takes less time than handing the work to a thread.
_HASH_INLINE = 1 << 20
# Numbers that are copied for hashing at a time.
_HASHED = 1 << 15


@dataclass(frozen=True, eq=False, slots=True)
class Output:
    """A tensor under its name in the reply; `strides` are set unless its elements are in C order."""

    name: str
    spec: TensorSpec
    memory: Memory
    strides: tuple[int, ...] | None = None
    tiles: int = 0
    """Number of boxes that become final one by one, while a call computes it."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return tensor_bytes(self.spec)

    @property
    def data(self) -> memoryview:
        """The bytes. A view may outlive the call, in a socket: the memory is not reused while it exists."""
        return self.memory.view[: self.nbytes]

    @property
    def array(self) -> npt.NDArray[Any]:
        """The elements in storage dtype: f16 and bf16 as the uint16 with the same bits."""
        return np.frombuffer(self.data, storage_dtype(self.spec.dtype)).reshape(self.spec.shape)

    def describe(self) -> dict[str, Any]:
        """Return dtype, shape and strides as JSON."""
        return self.spec.as_json() | ({} if self.strides is None else {"strides": list(self.strides)})

    async def sha256(self, *, listed: bool = False) -> str:
        """Hash the complete output, in a thread if it is large; if `listed` the bits that lists of numbers give.

        Those have one NaN, without a sign.
        """
        return await in_thread_if(self.nbytes > _HASH_INLINE, self._hash, listed)

    def _hash(self, listed: bool) -> str:
        if not listed:
            return hashlib.sha256(self.data).hexdigest()
        found, values = hashlib.sha256(), np.frombuffer(self.data, dtype(self.spec.dtype).numpy)
        for start in range(0, len(values), _HASHED):
            some = values[start : start + _HASHED]
            found.update(np.where(np.isnan(some), some.dtype.type("nan"), some).tobytes())
        return found.hexdigest()


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

    @property
    def is_long(self) -> bool:
        """Whether encoding the document, of many nodes, takes more than about a millisecond."""
        return len(self.document.get("nodes", ())) > _NODES


class Work(ABC):
    """An accepted request, ready to run. Use with ``async with``: leaving the block stops it and frees its memory."""

    context: RequestContext
    """That of the request."""
    streams: Streams
    """What a stream of messages has before the result, which after tiles has checksums instead of data."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, _: object, error: BaseException | None, __: object) -> None:  # noqa: B027
        """Nothing to free by default."""

    @abstractmethod
    def events(self, *, each: bool = True) -> AsyncGenerator[Event, None]:
        """Run to the end; yield what happens. Without `each` there need be no events for single units."""

    @abstractmethod
    def result(self) -> Result:
        """Return the result of finished work; valid inside the block."""

    def cancel(self) -> None:  # noqa: B027 - finished work has nothing to stop
        """Stop at the caller's request: `events` raises `Cancelled`."""


class Answered(Work):
    """Work that is already done, such as a validation, or is done elsewhere, whether or not anybody waits for it."""

    streams = "nothing"

    def __init__(self, context: RequestContext, result: Result | asyncio.Future[dict[str, Any]]) -> None:
        self.context = context
        self._result = result

    async def events(self, *, each: bool = True) -> AsyncGenerator[Event, None]:  # noqa: ARG002
        """Wait for the document of the result; raises what making it raised."""
        if isinstance(self._result, asyncio.Future):
            await asyncio.shield(self._result)
        return
        yield

    def result(self) -> Result:
        """Return the result."""
        return self._result if isinstance(self._result, Result) else Result(self._result.result())


async def finish(work: Work) -> None:
    """Run the work to its end for a reply that has whole outputs; raises what its `events` raise."""
    async for _ in work.events(each=False):
        pass
