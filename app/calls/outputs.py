"""The tensors of a reply."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from app.threads import in_thread_if
from convgrad._dtypes import dtype
from engine.planning import tensor_bytes
from kernels import storage_dtype

if TYPE_CHECKING:
    from app.pool.buffers import Memory
    from schemas.ops import TensorSpec

__all__ = ["Output"]

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
