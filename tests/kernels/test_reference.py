"""The reference kernel (`options.reference`) against the oracle: two float64 sums, written independently."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kernels import plan
from tests import naive
from tests.kernels.harness import assert_same_bits, check, compute, problem_of
from tests.problems import OPS, Case, random_case


@pytest.mark.parametrize("dtype", [None, "f64"])
def test_random_problems(dtype: str | None) -> None:
    """The reference matches the oracle's bits on integers: of f64 those that need more digits than f32 has."""
    rng, seen = np.random.default_rng(21), set()
    for _ in range(240):
        case = random_case(rng, macs=40_000)
        case = case if dtype is None else replace(case, dtype=dtype)
        assert dtype is None or plan(problem_of(case)).kernel == "reference_f64", "no other kernel takes f64"
        check(case, reference=True)
        seen.add(case.op)
    assert seen == set(OPS)


def test_axes_of_one_position() -> None:
    """Kernels of one with strides, on axes of one or two positions: what is one axis to the loops must be one."""
    rng = np.random.default_rng(27)
    for _ in range(150):
        rank = int(rng.integers(1, 4))
        strides, sizes = (tuple(rng.integers(1, 3, rank).tolist()) for _ in range(2))
        reach = [stride * (size - 1) for stride, size in zip(strides, sizes, strict=True)]
        pads = tuple(int(rng.integers(min(most, 1) + 1)) for most in reach)
        dst = tuple(most + 1 - pad for most, pad in zip(reach, pads, strict=True))
        case = Case(
            op="ConvTranspose" + str(rng.choice(["", "BackwardWeights", "BackwardData"])),
            dtype=str(rng.choice(["f32", "f64"])), n=2, src_channels=6, dst_channels=8, groups=int(rng.choice([1, 2])),
            src_spatial=sizes, dst_spatial=dst, kernel=(1,) * rank, strides=strides, pads_end=pads,
            data_format=str(rng.choice(["NCX", "NXC"])), seed=int(rng.integers(1 << 16)),
        )  # fmt: skip
        check(case, reference=True)
        if not case.data_gradient:
            check(case.mirrored(), reference=True)


def test_real_data_is_rounded_once() -> None:
    """The reference, a float64 sum in another order, differs by at most one unit in the last place."""
    rng = np.random.default_rng(22)
    for _ in range(60):
        case = random_case(rng, macs=40_000)
        inputs = case.floats()
        assert plan(problem_of(case), reference=True).kernel == "reference_f64"
        got, expected = compute(case, inputs, reference=True), case.expected(inputs)
        if case.dtype == "f32":
            np.testing.assert_array_max_ulp(got, expected, maxulp=1)
        else:
            assert_same_bits(got, expected, case)


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("sign", [-1, 1])
def test_no_double_rounding(dtype: str, sign: int) -> None:
    """A sum that misses a tie of the dtype by less than f32 can represent is rounded to its own side."""
    tie = {"f16": 2.0**-11, "bf16": 2.0**-8}[dtype]
    case = Case(dtype=dtype, src_spatial=(3,), dst_spatial=(3,), kernel=(1,))
    inputs = {
        "src": case.rounded(np.array([[[1.0, tie * 2.0**4, sign * 2.0**-14]]])),
        "diff_dst": case.rounded(np.array([[[1.0, 2.0**-4, 2.0**-14]]])),
    }
    assert case.exact(inputs).item() == 1 + tie + sign * 2.0**-28
    assert float(compute(case, inputs, reference=True).item()) == (1 + 2 * tie if sign > 0 else 1)


@pytest.mark.parametrize("dtype", naive.DTYPES)
def test_special_values(dtype: str) -> None:
    """The reference spreads Inf and NaN as the oracle does."""
    rng = np.random.default_rng(23)
    for _ in range(80):
        case = random_case(rng, macs=20_000)
        case = replace(case, dtype="f64") if dtype == "f64" else case
        inputs = case.inputs()
        for tensor in inputs.values():
            if tensor.size:
                tensor.reshape(-1)[int(rng.integers(tensor.size))] = rng.choice([np.inf, -np.inf, np.nan])
        assert_same_bits(compute(case, inputs, reference=True), case.expected(inputs), case)
