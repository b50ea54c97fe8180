"""Shrinking finds a small case that still shows the fault, and shows it seldom, since a crash or a hang takes long."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import pytest

from convgrad._check.cases import Case
from convgrad._check.problems import Problem, Takes
from convgrad._check.shrink import shrunk

LARGE = Problem(
    op="ConvolutionBackwardWeights", dtype="bf16", n=5, groups=3, src_channels=27, dst_channels=24, wide=(9, 34, 17),
    kernel=(3, 5, 2), strides=(2, 1, 3), dilations=(1, 3, 2), pads_begin=(1, 0, 2), pads_end=(0, 3, 2),
    data_format="NXC", weights_format="XIO",
)  # fmt: skip

FAULTS: dict[str, tuple[Callable[[Problem], bool], int]] = {
    "anything": (lambda _: True, 1),
    "groups": (lambda problem: problem.groups > 1, 2),
    "a stride of 3": (lambda problem: 3 in problem.strides, 1),
    "padding of a strided axis": (
        lambda problem: any(s > 1 and p > 0 for s, p in zip(problem.strides, problem.pads_begin, strict=True)), 1,
    ),
    "a dilated kernel": (
        lambda problem: any(d > 1 and k > 1 for d, k in zip(problem.dilations, problem.kernel, strict=True)), 3,
    ),
    "the last row of 4n + 1": (
        lambda problem: any(w in (5, 9, 17) and k > 2 for w, k in zip(problem.wide, problem.kernel, strict=True)), 5,
    ),
    "many channels of several images": (lambda problem: problem.src_channels > 8 and problem.n > 1, 18),
}  # fmt: skip
"""For each fault, whether a problem shows it, and the elements of the smallest `src`."""


@pytest.mark.parametrize("fault", FAULTS)
def test_few_smaller_problems_show_the_fault(fault: str) -> None:
    """The smallest case is as small as can be, in f32, and took few tries that showed the fault."""
    shows, elements = FAULTS[fault]
    shown = []

    def still(case: Case) -> bool:
        if shows(case.problem):
            shown.append(case)
        return shows(case.problem)

    smallest, tries = shrunk(Case(LARGE, "special", 1), still, Takes(), 60.0)
    assert prod(smallest.problem.input_shapes["src"]) == elements
    assert (smallest.problem.dtype, smallest.problem.data_format, smallest.kind) == ("f32", "NCX", "impulse")
    assert len(shown) <= min(10, tries)
