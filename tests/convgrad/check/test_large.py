"""Large problems are judged by projections in the kernel's process: right results pass, wrong ones fail."""

from __future__ import annotations

import numpy as np
import pytest

from convgrad._check.cases import draw as draw_case
from convgrad._check.large import LARGE, large_problems
from convgrad._check.problems import OPS, Problem, Takes
from convgrad._check.process import KernelProcess
from convgrad._check.projected import Projected, draw, project
from convgrad._check.report import counts, text
from convgrad._check.run import chosen
from convgrad._dtypes import dtype as dtype_of
from tests.convgrad.check import replays
from tests.convgrad.check.checking import KERNELS, assert_valid, checked_on_large

CONVOLUTIONS = tuple(op for op in OPS if not op.startswith("BiasAdd"))


def judged(problem: Problem, seed: int, fault: str) -> Projected:
    """Draw the data of a problem, compute its result, spoil it, and project both."""
    rng, like = np.random.default_rng(seed), np.empty(1, dtype_of(problem.dtype).numpy)
    inputs = {name: draw(rng, shape, like) for name, shape in problem.input_shapes.items()}
    result = replays.right(problem.op, problem.dtype, inputs, problem.attributes(), problem.output_shape)
    flat = result.reshape(-1)
    if fault == "element":
        at = seed % flat.size
        flat[at] += 2 if abs(float(flat[at])) < 100 else 64
    elif fault == "nan":
        flat[-1] = np.nan
    elif fault == "exchanged":
        result = np.flip(result, seed % result.ndim)
    return project(problem, inputs, result, rng)


@pytest.mark.parametrize("op", CONVOLUTIONS)
def test_projections_find_what_is_wrong(op: str) -> None:
    """Right results of all geometries, formats and dtypes pass; one wrong element, a NaN, or a mirrored axis fails."""
    takes = Takes(ops=(op,), dtypes=("f32", "bf16", "f16"), empty=False)
    for number in range(10):
        problem = draw_case(5, number, takes, macs=5000).problem
        assert not judged(problem, number, "").wrong.any(), problem
        assert judged(problem, number, "element").wrong.any(), problem
        assert judged(problem, number, "nan").wrong.any(), problem
    problem = Problem(op=op, n=5, src_channels=6, dst_channels=4, wide=(5, 7), kernel=(2, 3))
    for axis in range(4):
        assert judged(problem, axis, "exchanged").wrong.any()


def test_rounded_results_pass() -> None:
    """Sums of bf16 and f16 that must be rounded pass; a channel of zeros does not."""
    for dtype in ("bf16", "f16"):
        problem = Problem(op="ConvolutionBackwardWeights", dtype=dtype, n=40, src_channels=30, dst_channels=20,
                          wide=(40, 40), kernel=(1, 1))  # fmt: skip
        rng, like = np.random.default_rng(1), np.empty(1, dtype_of(dtype).numpy)
        src = draw(rng, problem.input_shapes["src"], like)
        src[1:] = src[:1]  # larger sums
        inputs = {"src": src, "diff_dst": np.resize(src[:1, :20], problem.input_shapes["diff_dst"])}
        result = replays.right(problem.op, dtype, inputs, problem.attributes(), problem.output_shape)
        assert np.abs(result.astype(float)).max() > 2**12
        assert not project(problem, inputs, result, rng).wrong.any()
        result[3] = 0
        assert project(problem, inputs, result, rng).wrong.any()


def test_a_kernel_is_checked_on_large_problems() -> None:
    """65,536 images are found to be one too many for 16 bits; the report has the problem and a command."""
    names, takes = ["65536 images"], {"ops": ["ConvolutionBackwardWeights"], "dtypes": ["f32"]}
    assert counts(checked_on_large(f"{replays.__file__}:right", *names, **takes))["passed"] == 1
    data = checked_on_large(f"{replays.__file__}:pytorch_96225", *names, **takes)
    (fault,) = data["faults"]
    assert fault["kind"] == "wrong"
    assert "projections differ" in text(data, {})
    assert "'--only', '65536 images', '--seed', '7'" in fault["reproducer"]


@pytest.mark.parametrize(
    ("kernel", "status"), [("raises", "raised"), ("segfault", "crashed"), ("another_shape", "shape")]
)
def test_a_kernel_that_fails(kernel: str, status: str) -> None:
    """Exceptions, crashes and results of another shape are faults, and the process goes on."""
    problem = Problem(op="ConvolutionBackwardWeights", groups=2, src_channels=6, dst_channels=4, wide=(9,), kernel=(3,),
                      dilations=(3,))  # fmt: skip
    with KernelProcess(f"{KERNELS}:{kernel}", takes={}, limit=20) as process:
        assert process.project(problem, 1)["status"] == status


def test_a_problem_larger_than_memory_is_not_tried() -> None:
    """A problem whose tensors do not fit counts as not taken, and the report says how much it needs."""
    problem = Problem(op="ConvolutionBackwardWeights", n=1 << 40, wide=(9,), kernel=(3,))
    with KernelProcess(f"{KERNELS}:right", takes={}, limit=20) as process:
        answer = process.project(problem, 1)
    assert answer["status"] == "unsupported"
    assert "the tensors need 7.04e+04 GB" in answer["text"]


def test_large_problems_are_valid_calls() -> None:
    """Each large problem is a call of all operations; some have 2**31 elements, or 4 GB."""
    problems = large_problems(Takes(dtypes=("f32", "f16")), LARGE)
    assert {problem.op for _, problem in problems} == {*CONVOLUTIONS}
    assert {name for name, _ in problems} == {*LARGE}
    for _, problem in problems:
        assert_valid(problem)
    assert chosen(["large"], []).large == [*LARGE]
    assert chosen(["pytorch#163539"], []).large == ["pytorch#163539"]
    with pytest.raises(ValueError, match="not some of each"):
        chosen(["large", "issues"], [])


@pytest.mark.release
def test_a_gigabyte() -> None:
    """A tensor of a gigabyte is drawn, multiplied and projected in less than two."""
    data = checked_on_large(f"{replays.__file__}:pointwise", "1 GB")
    assert counts(data) == {"passed": 2, "failed": 0, "unsupported": 0}
