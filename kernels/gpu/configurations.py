"""Block sizes for each generation of GPUs: the bits of a result depend on the problem and on these rows alone.

They are stored, never found by timing. Those of 9.0 are the fastest of some that were timed on an H200 with kernels
that read through pointers as these do (Triton 3.6); those of 8.0 and 10.0 are the same where the shared memory holds
them, and were never timed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import ceil, prod

__all__ = [
    "GENERATIONS", "Blocks", "Generation", "blocks_of_boxes", "blocks_of_dst", "blocks_of_weights", "box_of",
    "chunk_of", "chunks_of", "generation",
]  # fmt: skip


@dataclass(frozen=True)
class Generation:
    """GPUs of a compute capability: the multiprocessors that chunks are for, and the shared memory of a block."""

    capability: int
    processors: int
    shared: int


GENERATIONS = (Generation(80, 108, 101376), Generation(90, 132, 232448), Generation(100, 148, 232448))


@dataclass(frozen=True)
class Blocks:
    """A configuration of a kernel: rows, columns and depth of a block, warps, and stages of its loop."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


def generation(capability: int) -> Generation:
    """Return the generation for a compute capability, such as 90 for 9.0.

    All but 9 and 10 have the matrix units of 8.0, and 8.6, 8.9 and 12.0 less shared memory, which its blocks fit.
    """
    return next((each for each in GENERATIONS if each.capability // 10 == capability // 10), GENERATIONS[0])


def blocks_of_dst(of: Generation, parts: int, src: int, dst: int) -> Blocks:
    """Return the blocks of `multiply_dst` for channels of a group; rows are positions, columns channels of dst."""
    mma = of.capability < 90  # operands are in registers: fewer fit
    if parts == 3:
        if dst <= 16:
            return Blocks(128, 16, 32, 4, 3)
        if src < 16:
            return Blocks(64, 64, 16 if mma else 32, 8, 3)
        return Blocks(128, 64, 32, 8, 2 if mma else 3)
    if dst <= 16:
        return Blocks(128, 16, 64, 4, 4)
    if src < 16:
        return Blocks(64, 64, 32, 8, 4)
    if dst <= 64:
        return Blocks(128, 64, 64, 8 if mma else 4, 3)
    if mma:
        return Blocks(128, 128, 32, 8, 4)
    return Blocks(128, 128 if dst < 256 else 256, 64, 8, 3)


def blocks_of_boxes(of: Generation, parts: int, dst: int) -> Blocks:
    """Return the blocks of `multiply_boxes`, as `blocks_of_dst` does: of 9.0 the fastest of some on an H200."""
    if parts == 3:
        return Blocks(128, 64, 32, 4, 3)
    if dst <= 64:
        return Blocks(128, 64, 64, 4, 3)
    if of.capability > 90:
        return Blocks(128, 128, 64, 8, 3)
    return Blocks(128, 256, 64, 8, 4) if dst >= 256 else Blocks(128, 128, 64, 4, 3)


def box_of(rows: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the box of `rows` positions, a power of two of each size, that wastes least; of those the widest."""
    powers = [1 << power for power in range(rows.bit_length())]
    boxes = (box for box in product(powers, repeat=len(sizes)) if prod(box) == rows)
    return min(boxes, key=lambda box: (prod(ceil(a / b) * b for a, b in zip(sizes, box, strict=True)), box))


def blocks_of_weights(of: Generation, parts: int, narrow: int, wide: int) -> Blocks:
    """Return the blocks of `multiply_weights`; rows are narrow channels, columns wide ones, the depth is pixels."""
    rows = 16 if narrow <= 16 else 64
    if parts == 3:
        return Blocks(rows, 64, 32, 4, 3)
    if wide <= 16:
        return Blocks(rows, 128, 64, 8, 3)
    return Blocks(rows, 64, 64, 4, 3) if narrow <= 64 or wide <= 64 else Blocks(128, 128, 64, 8, 3)


def chunks_of(of: Generation, pixels: int, programs: int, depth: int) -> int:
    """Return in how many chunks a sum over pixels is cut, so that about two programs run on each multiprocessor."""
    most = max(1, pixels // (16 * depth))
    return min(most, 2 * of.processors // programs or 1, 1 << 10) if pixels else 1


def chunk_of(pixels: int, chunks: int, depth: int) -> int:
    """Return the pixels of a chunk, a multiple of the depth of a block."""
    return max(depth, ceil(ceil(pixels / chunks) / depth) * depth)
