"""The rules: honest sums pass, losses of precision are found and named, and the report says where a result is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from math import sqrt
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from convgrad._report import Report
from kernels.reference import REFERENCE
from tests import naive
from tests.kernels.harness import problem_of
from tests.problems import Case, Tensor
from tests.verify.judged import verify
from verify.fast import plan_fast_verification
from verify.model import ulp
from verify.sums import unit_sums
from verify.unit import plan_verification

LONG = Case(
    n=4, src_channels=12, dst_channels=12, src_spatial=(24, 24), dst_spatial=(24, 24), kernel=(1, 1), seed=3
)  # fmt: skip
LAYER = Case(
    n=3, src_channels=6, dst_channels=8, src_spatial=(12, 10), dst_spatial=(12, 10), kernel=(3, 3), pads_begin=(1, 1),
    pads_end=(1, 1),
)  # fmt: skip


def broken(report: dict[str, Any]) -> list[str]:
    """Return the rules that a result breaks."""
    return [rule["rule"] for rule in report["rules"] if not rule["passed"]]


def cut(tensor: Tensor, bits: int) -> Tensor:
    """Drop low bits of f32, to nearest."""
    wide = tensor.view(np.uint32) + np.uint32(1 << (bits - 1))
    return (wide & ~np.uint32((1 << bits) - 1)).view(np.float32)


@pytest.mark.parametrize(("bits", "name"), [(13, "TF32"), (16, "bf16"), (8, "two bf16 each")])
@pytest.mark.parametrize("positive", [False, True])
def test_narrow_inputs_are_named(bits: int, name: str, positive: bool) -> None:
    """Inputs, or one, cut to fewer bits fail, also where an honest sum's errors hide it, and the cause is named."""
    inputs = {key: np.abs(tensor) if positive else tensor for key, tensor in LONG.floats().items()}
    report = verify(LONG, inputs, LONG.expected({key: cut(tensor, bits) for key, tensor in inputs.items()}))
    assert not report["passed"]
    cause = report["causes"][0]
    assert cause["cause"].startswith(f"the inputs were read as {name}")
    assert cause["correlation"] > 0.9
    assert 0.9 < cause["size"] < 1.1
    if bits == 13:
        one = verify(LONG, inputs, LONG.expected({**inputs, "diff_dst": cut(inputs["diff_dst"], bits)}))
        assert one["causes"][0]["cause"] == "the second input, diff_dst, was read as TF32"


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_results_rounded_toward_zero_are_named(dtype: str) -> None:
    """Results that were cut fail, also in f32, where an honest sum may be as far off, but not to one side."""
    case = replace(LAYER, dtype=dtype)
    inputs, exact = case.floats(), case.exact(case.floats())
    near = case.rounded(exact)
    assert verify(case, inputs, near)["passed"]
    larger = np.abs(near.astype(np.float64)) > np.abs(exact)
    report = verify(case, inputs, np.where(larger, np.nextafter(near, near.dtype.type(0)), near).astype(near.dtype))
    assert not report["passed"]
    assert report["causes"][0]["cause"] == "the results were rounded toward zero"


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_images_added_in_the_narrow_dtype(dtype: str) -> None:
    """Sums of images that were rounded one by one fail the mean square, and are named."""
    case = replace(LONG, dtype=dtype, n=16)
    inputs = case.floats()
    total = np.zeros(case.output_shape)
    for image in range(case.n):
        one = {name: values[image : image + 1] for name, values in inputs.items()}
        total = case.rounded(total + replace(case, n=1).exact(one)).astype(np.float64)
    report = verify(case, inputs, case.rounded(total))
    assert "mean_square" in broken(report)
    assert report["causes"][0]["cause"] == f"the images' sums were added in {dtype}, one after the other"


def test_wrong_integers_fail() -> None:
    """One product of integers that is missing in one element fails the exact rule, though it is small."""
    inputs = LONG.inputs()
    result = LONG.expected(inputs)
    result[3, 4, 0, 0] = np.nextafter(result[3, 4, 0, 0], np.float32(np.inf))
    report = verify(LONG, inputs, result)
    assert broken(report) == ["exact"]
    assert report["worst"]["index"] == [3, 4, 0, 0]
    assert report["detection"] == {"every_element": 0.0, "one_element": 0.0, "products": 2304, "product_bits": None}


def test_a_sum_of_equal_numbers_is_excused() -> None:
    """Summing 0.1 again and again rounds in one direction: a naive sum passes that is far off by the model alone."""
    case = replace(LONG, n=1, src_channels=2, dst_channels=2, src_spatial=(200, 200), dst_spatial=(200, 200))
    inputs = {name: np.full(shape, 0.1, np.float32) for name, shape in case.input_shapes.items()}
    total = np.add.accumulate(np.full(200 * 200, np.float32(0.1) * np.float32(0.1)), dtype=np.float32)[-1]
    result = np.full(case.output_shape, total)
    assert verify(case, inputs, result)["max_relative_error"] > 1e-4
    for plan in (plan_verification(problem_of(case)), plan_fast_verification(problem_of(case), seed=1)):
        assert verify(case, inputs, result, plan)["passed"]
        assert not verify(case, inputs, result * np.float32(0.99), plan)["passed"]


def test_a_sequential_sum_of_a_trend_passes() -> None:
    """Partial sums that rise and fall again are larger than those of a random order; an honest sum of them passes."""
    case = replace(LONG, n=1, src_channels=1, dst_channels=1, src_spatial=(300, 300), dst_spatial=(300, 300))
    ramp = np.linspace(-1, 1, 90000, dtype=np.float32).reshape(1, 1, 300, 300)
    inputs = {"src": ramp, "diff_dst": np.full_like(ramp, 0.7)}
    products = (ramp * np.float32(0.7)).reshape(-1)
    result = np.add.accumulate(products, dtype=np.float32)[-1].reshape(1, 1, 1, 1)
    assert verify(case, inputs, result)["passed"]


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (np.s_[6:, :, :, :], "all 108 wrong elements have dst channel >= 6, and they are 0"),
        (np.s_[:, 2, :, :], "all 72 wrong elements have src channel = 2, and they are 0"),
        (np.s_[:, :, 2, :], "all 144 wrong elements have tap y = 2, and they are 0"),
        (np.s_[1::2, :, :, :], "all 216 wrong elements have dst channel = 1 modulo 2, and they are 0"),
        (np.s_[2:4, :, 0, :], "all 36 wrong elements have dst channel from 2 to 3 and tap y = 0, and they are 0"),
    ],
)  # fmt: skip
def test_where_a_result_is_wrong(wrong: tuple[slice, ...], text: str) -> None:
    """Wrong elements are described by the channels and taps that hold them, and by what they have in common."""
    inputs = LAYER.floats()
    result = LAYER.expected(inputs)
    result[wrong] = 0
    assert verify(LAYER, inputs, result)["where"]["text"] == text


def test_unwritten_and_repeated_elements() -> None:
    """NaN and the values of other channels are recognised."""
    inputs = LAYER.floats()
    result = LAYER.expected(inputs)
    result[4:] = np.nan
    assert verify(LAYER, inputs, result)["where"]["text"].endswith("dst channel >= 4, and they are NaN")
    result[4:] = result[:4]
    assert verify(LAYER, inputs, result)["where"]["text"].endswith("they are what is right at dst channel - 4")


@pytest.mark.parametrize(
    ("special", "change", "alike"),
    [
        ((np.nan, 0), lambda right: np.where(np.isnan(right), 0, right), "0 where NaN is right"),
        ((np.inf, 0), lambda right: np.clip(right, -3e38, 3e38), "finite where Inf is right"),
        ((1, -1), lambda right: np.where(right == 0, np.float32(-0.0), right), "0 of the wrong sign"),
        ((2.0**-130, 0), lambda right: np.where(right < 2.0**-126, 0, right), "0 where subnormal numbers are right"),
        ((2897, 0), lambda right: right - (right > 2**23) * (right % 2), "right but for the last bit, which is 0"),
    ],
)  # fmt: skip
def test_special_values_and_bits_that_are_lost(
    special: tuple[float, float], change: Callable[[Tensor], Tensor], alike: str
) -> None:
    """The report says that NaN, Inf, signs of zero, subnormal numbers or last bits were lost."""
    pixel = (1, 1)
    case = replace(LAYER, n=2, kernel=pixel, src_spatial=pixel, dst_spatial=pixel, pads_begin=(0, 0), pads_end=(0, 0))
    inputs = {"src": np.ones((2, 6, 1, 1), np.float32), "diff_dst": np.ones((2, 8, 1, 1), np.float32)}
    inputs["src"][:, ::2, 0, 0] = [2897, 2899, 2901]  # odd products of 24 bits
    inputs["diff_dst"][:, 3, 0, 0] = special
    right = case.expected(inputs)
    assert verify(case, inputs, right)["passed"]
    where = verify(case, inputs, np.ascontiguousarray(change(right), np.float32))["where"]
    assert where["alike"] == alike, where["text"]


@pytest.mark.parametrize("magnitudes", [(0, 0), (-20, 20), (-300, -290), (150, 160)])
def test_sums_in_f64_are_exact(magnitudes: tuple[int, int]) -> None:
    """The reference of f64 results is right to a millionth of what their last digit is worth."""
    case = Case(n=2, src_channels=2, dst_channels=2, src_spatial=(9,), dst_spatial=(9,), kernel=(1,), dtype="f64")
    rng = np.random.default_rng(5)
    src, diff_dst = (rng.standard_normal(shape) for shape in case.input_shapes.values())
    src *= 10.0 ** rng.integers(magnitudes[0], magnitudes[1] + 1, src.shape)
    problem = problem_of(case)
    found = unit_sums(problem, REFERENCE.units(problem, 1)[0][0], [src, diff_dst], lambda: False)
    assert found is not None
    assert found.low is not None
    for o, i in np.ndindex(2, 2):
        pairs = zip(src[:, i].ravel().tolist(), diff_dst[:, o].ravel().tolist(), strict=True)
        exact = sum(Fraction(a) * Fraction(b) for a, b in pairs)
        got = Fraction(found.high[o, i, 0].item()) + Fraction(found.low[o, i, 0].item())
        assert abs(got - exact) <= Fraction(2.0**-73) * Fraction(found.spread[o, i, 0].item())


def test_the_report_says_how_much_it_could_see() -> None:
    """Less than the stated share of the products may be missing unseen: twice as many are found."""
    case = replace(LONG, n=1, src_spatial=(60, 60), dst_spatial=(60, 60))
    inputs = case.floats()
    seen = verify(case, inputs, case.expected(inputs))["detection"]
    assert 0 < seen["every_element"] < seen["one_element"] < 1e-3
    missing = dict(inputs)
    missing["src"] = inputs["src"].copy()
    missing["src"][0, :, 0, 0] = 0  # one of 3,600 products
    assert seen["every_element"] < 1 / 3600
    assert "mean_square" in broken(verify(case, inputs, case.expected(missing)))


@pytest.mark.parametrize("side", [60, 150])
def test_the_report_says_which_products_could_hide(side: int) -> None:
    """Products of fewer bits than stated are found, and long positive sums are said to hide those of TF32."""
    case = replace(LONG, n=1, src_channels=8, dst_channels=8, src_spatial=(side, side), dst_spatial=(side, side))
    rng = np.random.default_rng(3)
    inputs = {name: np.abs(tensor) if side > 60 else tensor for name, tensor in case.floats().items()}
    report = verify(case, inputs, case.expected(inputs))
    bits = report["detection"]["product_bits"]
    for missing in (1, -2):
        width = sqrt(3 * 0.18) * 2 ** (missing - bits)
        noisy = {
            name: (tensor * (1 + rng.uniform(-width, width, tensor.shape))).astype(np.float64)
            for name, tensor in inputs.items()
        }
        found = broken(verify(case, inputs, case.expected(noisy)))
        assert ("mean_square" in found) == (missing > 0)
    assert (
        (
            "can hide in these sums"
            in Report({**report, "op": case.op, "output": "diff_weights", "factors": ["src", "diff_dst"]}).text()
        )
        == (side > 60)
        == (bits < 11)
    )


def test_a_sum_that_cancels_is_held_to_its_products() -> None:
    """An element whose products cancel to zero may be as far off as they are small, however small that is."""
    inputs = {name: tensor * np.float32(2.0**-30) for name, tensor in LONG.floats().items()}
    for name, sign in (("src", 1), ("diff_dst", -1)):
        inputs[name][2:] = sign * inputs[name][:2]
    zeros = np.zeros(LONG.output_shape, np.float32)
    assert verify(LONG, inputs, zeros)["passed"]
    wrong = zeros.copy()
    wrong[3, 2] = 2.0**-40
    report = verify(LONG, inputs, wrong)
    assert "largest" in broken(report)
    assert report["where"]["wrong"] == 1


@pytest.mark.parametrize("dtype", list(naive.DTYPES))
def test_the_distance_of_numbers(dtype: str) -> None:
    """`ulp` is the step from a number to the next larger one, also of zero, subnormals and the largest."""
    kind = naive.DTYPES[dtype]
    bits = np.dtype(f"u{kind.itemsize}")
    finfo: Any = ml_dtypes.finfo
    info = finfo(kind)
    values = np.array([0, info.smallest_subnormal, info.tiny, 0.75, 1, 1.5, -3, float(info.max) / 2], kind)
    above = (values.view(bits) + bits.type(1)).view(kind)
    steps = np.abs(above.astype(float) - values.astype(float))
    assert ulp(values.astype(float), dtype).tolist() == steps.tolist()
