"""A kernel that adds what the kernels of products read of a tensor in three parts."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gpu.products import _parts

__all__ = ["add_parts"]


@triton.jit  # type: ignore[untyped-decorator] # Triton is not installed where types are checked
def add_parts(parts: tl.tensor, part: tl.tensor, found: tl.tensor, BLOCK: tl.constexpr) -> None:  # noqa: N803
    """Write the sums of the first values of each part."""
    i = tl.arange(0, BLOCK)
    high, middle, low = _parts(parts + i, part, i < BLOCK, 3)
    tl.store(found + i, high.to(tl.float32) + middle.to(tl.float32) + low.to(tl.float32))
