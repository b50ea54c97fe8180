"""The floating-point formats that tensors are stored in: a row for each, from which everything else follows.

f16 is IEEE 754 binary16 and bf16 the upper half of binary32. NumPy has no bfloat16, so both are stored as their bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

__all__ = ["DTYPES", "KINDS", "DType", "DTypeName"]

DTypeName = Literal["f32", "f16", "bf16", "f64"]


@dataclass(frozen=True)
class DType:
    """A binary format of `size` bytes whose significand has `digits` bits, the implicit one included.

    `largest` is the exponent of the smallest power of two that is too large.
    """

    name: DTypeName
    storage: np.dtype[Any]
    digits: int
    largest: int

    @property
    def size(self) -> int:
        """Bytes of a value."""
        return self.storage.itemsize

    @property
    def least(self) -> int:
        """Exponent of the smallest power of two that has the full number of digits."""
        return 2 - self.largest

    @property
    def smallest(self) -> int:
        """Exponent of the smallest subnormal number."""
        return self.least + 1 - self.digits

    @property
    def infinity(self) -> int:
        """The bits of infinity, those of the exponent: all are set in Inf and NaN alone."""
        return ((1 << (8 * self.size - self.digits)) - 1) << (self.digits - 1)


DTYPES: dict[str, DType] = {
    dtype.name: dtype
    for dtype in (
        DType("f32", np.dtype(np.float32), 24, 128),
        DType("f16", np.dtype(np.uint16), 11, 16),
        DType("bf16", np.dtype(np.uint16), 8, 128),
        DType("f64", np.dtype(np.float64), 53, 1024),
    )
}

KINDS = {name: number for number, name in enumerate(DTYPES)}
"""The number of each dtype in compiled functions. Only the loops of the reference take f64."""
