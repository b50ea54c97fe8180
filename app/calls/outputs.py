"""One output of a running call: its memory, its job, and the finished tensor."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from app.pool.engine import Job
from app.threads import in_thread_if
from convgrad._dtypes import dtype
from engine.planning import Computation, tensor_bytes
from kernels import Unit, storage_dtype

if TYPE_CHECKING:
    from app.pool.buffers import Memory
    from schemas.ops import TensorSpec

__all__ = ["CallOutput", "HeldTensor"]

# Below this size hashing takes less time than handing the work to a thread.
_HASH_INLINE = 1 << 20
# Numbers that are copied for hashing at a time.
_HASHED = 1 << 15

Units = AsyncGenerator[Unit, None]


@dataclass(eq=False, slots=True)
class CallOutput:
    """An output while its call is open; `name` is in the dialect of the operation's name."""

    name: str
    computation: Computation
    job: Job = field(init=False)
    """What computes it, once it has memory."""
    units: Units | None = None
    """Its units as the engine completes them, once it runs."""
    first: asyncio.Task[Unit | None] | None = None
    """The wait for the first of them."""

    @property
    def spec(self) -> TensorSpec:
        """Canonical name, dtype and shape."""
        return self.computation.output

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.computation.nbytes

    @property
    def data(self) -> memoryview:
        """The bytes. A view may outlive the call, in a socket: the memory is not reused while it exists."""
        return self.job.output.view[: self.nbytes]

    @property
    def array(self) -> npt.NDArray[Any]:
        """The elements in storage dtype: f16 and bf16 as the uint16 with the same bits."""
        return np.frombuffer(self.data, storage_dtype(self.spec.dtype)).reshape(self.spec.shape)

    def describe(self) -> dict[str, Any]:
        """Return dtype and shape as JSON."""
        return self.spec.as_json()

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

    def start(self, units: Units) -> None:
        """Run the job in a task of its own."""
        self.units = units
        self.first = asyncio.ensure_future(anext(units, None))

    async def close(self) -> None:
        """Stop the job, if it runs, and wait until no worker can write to its memory."""
        first, self.first = self.first, None
        units, self.units = self.units, None
        if first is not None:
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
        if units is not None:
            await units.aclose()


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """A tensor in a reply, held in a segment; `strides` are set unless its elements are in C order."""

    name: str
    spec: TensorSpec
    segment: Memory
    strides: tuple[int, ...] | None = None

    @property
    def data(self) -> memoryview:
        """The bytes."""
        return self.segment.view[: tensor_bytes(self.spec)]

    def describe(self) -> dict[str, Any]:
        """Return dtype, shape and strides as JSON."""
        return self.spec.as_json() | ({} if self.strides is None else {"strides": list(self.strides)})
