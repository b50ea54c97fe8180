"""Which other arithmetic the errors of a failed result look like: what its kernel would have to declare to pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from kernels.dtypes import DTYPES
from kernels.plan import Stop
from kernels.problem import ConvProblem
from verify.arithmetic import Arithmetic
from verify.compared import Block, Compared
from verify.rules import judge

__all__ = ["suspected"]

_TYPICAL = 1 / 32
"""The errors of the middle element must be at least so large, in units of those that the arithmetic makes."""

_LEAST, _ELEMENTS = 64, 4096
"""Fewest elements that tell anything, and most that are looked at."""

_SEGMENTS = (2, 4, 8, 16, 32, 64)


def suspected(compared: Compared, around: tuple[int, ...], stop: Stop, *, only_algorithms: bool) -> Arithmetic | None:
    """Return the most precise arithmetic by which a failed result would pass; None if its errors are like none.

    Looks at some elements, one of them at `around`; of integers, whose sums are exact, `only_algorithms` tell anything.
    """
    some = compared.near(around, _ELEMENTS)
    for said in _others(compared.problem, compared.arithmetic):
        if only_algorithms and said.algorithm == compared.arithmetic.algorithm:
            continue
        sizes: list[np.ndarray[tuple[int, ...], np.dtype[np.float64]]] = []

        def see(block: Block, sizes: list[np.ndarray[tuple[int, ...], np.dtype[np.float64]]] = sizes) -> None:
            known = np.isfinite(block.exact) & (block.spread > 0)
            expected = np.hypot(block.sigma, block.step / np.sqrt(12))
            sizes.append((block.error / expected)[known].reshape(-1))

        other = replace(some, arithmetic=said)
        with np.errstate(all="ignore"):
            _, tally = judge(other, np.zeros(some.exact.shape, np.float32), see, stop, closely=False)
        all_sizes = np.concatenate(sizes)
        if tally.passed and tally.judged and all_sizes.size >= _LEAST and np.median(all_sizes) >= _TYPICAL:
            return said
    return None


def _others(problem: ConvProblem, said: Arithmetic) -> Iterator[Arithmetic]:
    """Yield the arithmetics that kernels have, the most precise first."""
    dtype, dense = problem.dtype, max((*problem.strides, *problem.dilations), default=1) == 1
    if dtype == "f64":
        yield replace(said, sum="f32", segment_sum="f32")
        return
    if dense and problem.rank > 1 and set(problem.kernel[-2:]) == {3}:
        for tile in (2, 4, 6):
            yield replace(said, algorithm=f"winograd F({tile}, 3)")
    if said.readings and said.sum == "f32":
        yield replace(said, sum="f32 truncated")
    for name in ("bf16x6", "3xtf32", "bf16x3"):
        if dtype == "f32":
            yield replace(said, products=name)
    for kind in ("f16", "bf16"):
        if DTYPES[kind].digits > DTYPES[dtype].digits:
            continue
        for parts in _SEGMENTS:
            yield replace(said, segments=parts, segment_sum=kind)
        yield replace(said, sum=kind)
