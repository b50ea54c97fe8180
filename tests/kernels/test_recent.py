"""What is remembered of problems."""

from __future__ import annotations

from kernels.problem import ConvProblem
from kernels.recent import recent


def problem(n: int) -> ConvProblem:
    """A problem of n images of one pixel."""
    return ConvProblem(
        op="ConvolutionBackwardWeights",
        dtype="f32",
        data_format="NCX",
        weights_format="OIX",
        n=n,
        src_channels=1,
        dst_channels=1,
        groups=1,
        src_spatial=(1,),
        dst_spatial=(1,),
        kernel=(1,),
        strides=(1,),
        dilations=(1,),
        pads_begin=(0,),
        groups_axis="I",
        bias=False,
    )


def test_many_small_problems_and_few_large_ones() -> None:
    """A small problem is laid out once, while large ones, whose tables are large, push each other out."""
    made: list[int] = []
    remembered = recent(lambda given: made.append(given.n))
    for n in [*range(1, 101)] * 2:
        remembered(problem(n))
    assert len(made) == 100
    for n in [1 << 23, 1 << 24, 1 << 25] * 2:
        remembered(problem(n))
    assert len(made) == 106
    remembered(problem(1 << 25))
    remembered(problem(1))
    assert len(made) == 106
