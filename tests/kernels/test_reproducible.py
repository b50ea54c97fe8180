"""The reference: sums that have the same bits on every processor, compiled or not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from hashlib import sha256
from itertools import product
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pytest

from kernels import ConvProblem, plan
from kernels.expansion import add_product, pair
from kernels.plan import box
from kernels.reference import REFERENCE, add_products, narrow, sums_of
from kernels.registry import compute
from tests.kernels.harness import problem_of, stored
from tests.kernels.paths import inside, some
from tests.naive import DTYPES, round_to
from tests.problems import random_case

pytestmark = pytest.mark.path

Array = npt.NDArray[np.float64]

LAYER = ConvProblem(
    op="ConvolutionBackwardWeights", dtype="f32", n=2, src_channels=24, dst_channels=40, groups=2, src_spatial=(19, 23),
    dst_spatial=(10, 12), kernel=(3, 3), strides=(2, 2), dilations=(1, 1), pads_begin=(1, 1), data_format="NCX",
    weights_format="OIX",
)  # fmt: skip
TURNED = replace(LAYER, op="ConvTranspose", src_spatial=(10, 12), dst_spatial=(19, 23), bias=True)
DEEP = replace(
    LAYER, n=1, groups=1, src_channels=5, dst_channels=7, src_spatial=(6, 7, 9), dst_spatial=(4, 5, 7),
    kernel=(2, 2, 2), strides=(1, 1, 1), dilations=(2, 2, 2), pads_begin=(0, 0, 0), data_format="NXC",
    weights_format="XIO",
)  # fmt: skip
PLANES: dict[str, Any] = {"dtype": "f32", "n": 3, "data_format": "NCX", "channels": 5, "spatial": (40, 50)}
PROBLEMS = {
    "wgrad": LAYER,
    "wgrad 3D": DEEP,
    "wgrad transposed": replace(TURNED, op="ConvTransposeBackwardWeights", bias=False, data_format="NXC"),
    "transposed": TURNED,
    "forward": replace(LAYER, op="Convolution", bias=True),
    "depthwise": replace(LAYER, op="Convolution", groups=24, dst_channels=24),
    "depthwise wgrad": replace(
        LAYER, data_format="NXC", groups=24, dst_channels=24, strides=(1, 1), dst_spatial=(19, 23)
    ),
    "bias": ConvProblem.of_bias(op="BiasAdd", **PLANES),
    "bias gradient": ConvProblem.of_bias(op="BiasAddBackward", **PLANES),
}
RECORDED: dict[str, tuple[str, str, str, str]] = {
    "wgrad": ("31c239fb52d1", "f59f92f66c43", "19e98b81b10a", "a15b0a55af39"),
    "wgrad 3D": ("009ec1bfe471", "dea1d1f8dabf", "129b1d55c816", "0dd354b566d1"),
    "wgrad transposed": ("fe45026bd323", "621395715e71", "a53f6b8cbe9b", "154fffdfb286"),
    "transposed": ("d1cf44b34ae7", "995d4ba8845b", "be55fb4652ca", "5a0ea435e45d"),
    "forward": ("0f6de061d43f", "1769323ff35e", "e1399a4fcb35", "0fdcb375d793"),
    "depthwise": ("0334748b9bac", "ac78a9211f69", "fa4b2b5256d3", "2865fc0090db"),
    "depthwise wgrad": ("e9811d8e31b0", "12cbd6980397", "553def50f0af", "0e9bf7561d19"),
    "bias": ("abc0f5bc8807", "85fa15de7463", "d1241461941e", "c191e0ae98e1"),
    "bias gradient": ("240528c15406", "98d8dbdbeb9b", "9458bdfabb8c", "954c79e2be36"),
}
"""The first digits of the SHA-256 of each result, and of its sums before they are rounded: f32, f16, bf16 and f64."""


def _inputs(problem: ConvProblem) -> list[Any]:
    """Return numbers of many magnitudes that never change: no logarithm or the like is in them."""
    rng = np.random.RandomState(5)
    found = []
    for shape in problem.input_shapes:
        values = (rng.random_sample(shape) - 0.5) * 2.0 ** rng.randint(-8, 8, shape)
        found.append(stored(round_to(problem.dtype, values)))
    return found


def _digest(problem: ConvProblem) -> str:
    inputs = _inputs(problem)
    digest = sha256(compute(problem, *inputs, reference=True).tobytes())
    for sums in _sums_of(problem, inputs):
        digest.update(sums.tobytes())
    return digest.hexdigest()[:12]


def _sums_of(problem: ConvProblem, inputs: list[Any]) -> Iterator[Array]:
    """Yield the sums before they are rounded, of one image or kernel position after another."""
    found = np.full((2 if problem.dtype == "f64" else 1, *problem.output_shape), np.nan)
    for unit in plan(problem, reference=True, workers=2).units:
        given = problem, unit, inputs, lambda: False
        sums = REFERENCE.exact(*given) if problem.dtype == "f64" else (REFERENCE.values(*given),)
        assert sums is not None
        for whole, each in zip(found, sums, strict=True):
            box(whole, unit)[...] = each
    if problem.forward:
        yield from found.swapaxes(0, 1)
    elif problem.computes == "diff_bias":
        yield found
    else:
        x = 1 + problem.weights_format.index("X")
        by_tap = np.moveaxis(found, range(x, x + problem.rank), range(problem.rank))
        yield from by_tap.reshape(-1, *by_tap.shape[problem.rank :])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PROBLEMS)
def test_recorded_bits(name: str, dtype: str) -> None:
    """Results of every operation and dtype have the same bits on every processor."""
    problem: ConvProblem = replace(PROBLEMS[name], dtype=dtype)  # type: ignore[arg-type] # one of the dtypes
    assert _digest(problem) == RECORDED[name][list(DTYPES).index(dtype)]


def _sums(rows: Array, columns: Array, parts: int, data_format: Literal["NCX", "NXC"] = "NCX") -> Array:
    """Return products of (groups, rows, terms) and (groups, columns, terms), as a weight gradient of one tap."""
    groups, terms = rows.shape[0], (rows.shape[2],)
    problem = replace(
        LAYER, dtype="f64", n=1, src_channels=groups * rows.shape[1], dst_channels=groups * columns.shape[1],
        groups=groups, src_spatial=terms, dst_spatial=terms, kernel=(1,), strides=(1,), dilations=(1,),
        pads_begin=(0,), data_format=data_format, weights_format="OIX",
    )  # fmt: skip
    inputs = [each.reshape(1, -1, *terms) for each in (rows, columns)]
    if data_format == "NXC":
        inputs = [np.ascontiguousarray(np.moveaxis(each, 1, -1)) for each in inputs]
    (unit,) = plan(problem, reference=True).units
    found: Array | None = sums_of(problem, unit, inputs, lambda: False, None, parts)
    assert found is not None
    return found.reshape(parts, groups, columns.shape[1], rows.shape[1]).swapaxes(2, 3)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("terms", [2, 255, 256, 257, 600])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (2, 2), (3, 2), (6, 16), (7, 17), (13, 40), (40, 13)])
def test_each_sum_is_one_chain(rows: int, columns: int, terms: int, parts: int) -> None:
    """Terms are added one after another, whatever the layout of the factors."""
    rng = np.random.default_rng(terms)
    a, b = (rng.standard_normal((2, count, terms)) for count in (rows, columns))
    if parts == 1:  # products are exact
        a, b = (each.astype(np.float32).astype(np.float64) for each in (a, b))
    chain = np.zeros((parts, 2, rows, columns))
    for term in range(terms):
        add_product(chain, a[:, :, term, None], b[:, None, :, term])
    for found in (_sums(a, b, parts), _sums(a, b, parts, "NXC"), _sums(a[:, ::-1], b, parts)[:, :, ::-1]):
        assert found.tobytes() == chain.tobytes()


@pytest.mark.parametrize("block", range(some(4)))
def test_numpy_alone_gives_the_same_bits(block: int) -> None:
    """Compiled code and NumPy form the same sums, of every operation and dtype, also where some are not finite."""
    rng = np.random.default_rng([29, block])
    for number in range(60):
        case = random_case(rng, macs=40_000)
        problem = replace(problem_of(case), dtype=list(DTYPES)[number % 4])  # type: ignore[arg-type] # one
        inputs = _inputs(problem)
        if number % 5 == 0 and inputs[0].size:
            inputs[0].reshape(-1)[-1:] = narrow(np.array([np.inf]), problem.dtype)
        _assert_numpy_agrees(problem, inputs)


@pytest.mark.parametrize(
    "name", ["a long line", "many groups", "few pixels", *([] if inside() else ["many pixels", "deep"])]
)
def test_numpy_alone_gives_the_same_bits_in_larger_layers(name: str) -> None:
    """So it is where images, channels and images of a unit are cut."""
    base = replace(LAYER, n=1, groups=1, strides=(1, 1), dst_spatial=LAYER.src_spatial)
    sizes: dict[str, dict[str, Any]] = {
        "many pixels": {"src_channels": 20, "dst_channels": 33, "src_spatial": (70, 60), "dst_spatial": (70, 60)},
        "a long line": {"groups": 2, "src_channels": 2, "dst_channels": 2, "src_spatial": (3, 9001),
                        "dst_spatial": (3, 9001)},
        "many groups": {"groups": 37, "src_channels": 74, "dst_channels": 111},
        "deep": {"src_channels": 600, "dst_channels": 70, "src_spatial": (5, 5), "dst_spatial": (5, 5)},
        "few pixels": {"n": 9, "src_channels": 9, "dst_channels": 5, "src_spatial": (4, 3), "dst_spatial": (4, 3)},
    }  # fmt: skip
    for op, data_format in product(("ConvolutionBackwardWeights", "Convolution"), ("NCX", "NXC")):
        problem = replace(base, op=op, data_format=data_format, **sizes[name])  # type: ignore[arg-type] # both literal
        _assert_numpy_agrees(problem, _inputs(problem))


def _assert_numpy_agrees(problem: ConvProblem, inputs: list[Any]) -> None:
    parts = 3 if problem.dtype == "f64" else 1
    for unit in plan(problem, reference=True, workers=3).units:
        given = inputs, lambda: False, None, parts
        found, expected = sums_of(problem, unit, *given), sums_of(problem, unit, *given, add_products)
        assert found is not None
        assert expected is not None
        np.testing.assert_array_equal(found, expected, err_msg=str(problem))


def _exact(rows: Array, columns: Array) -> tuple[Fraction, Fraction]:
    """Return the sum of products of two lists, and that of the magnitudes."""
    products = [Fraction(float(a)) * Fraction(float(b)) for a, b in zip(rows, columns, strict=True)]
    return sum(products, Fraction(0)), sum(map(abs, products), Fraction(0))


@pytest.mark.parametrize("cancel", [False, True])
@pytest.mark.parametrize("terms", [1, 40] if inside() else [1, 40, 3000])
def test_exact_sums(terms: int, cancel: bool) -> None:
    """Sums of f64 are wrong by less than 2^-100 of the magnitudes, also where nearly all of that cancels."""
    rng = np.random.default_rng(terms)
    a, b = (rng.standard_normal((2, 3, terms)) * 2.0 ** rng.integers(-40, 40, (2, 3, terms)) for _ in range(2))
    if cancel:
        a, b = np.concatenate([a, -a, a[..., :1] * 2.0**-60], -1), np.concatenate([b, b, b[..., :1]], -1)
        b[:, 1:] = b[:, :1]
        a[:, :] = a[:, :1]
    high, low = pair(_sums(a, b, 3))
    for group, row, column in product(range(2), range(3), range(3)):
        right, magnitudes = _exact(a[group, row], b[group, column])
        found = high[group, row, column], low[group, row, column]
        assert abs(sum(map(Fraction, found)) - right) <= magnitudes / 2**100
        assert found[0] == float(right) or cancel, "rounded once"


def _point(terms: int) -> ConvProblem:
    """Return a weight gradient that is one sum of so many products."""
    return replace(LAYER, dtype="f64", n=1, src_channels=1, dst_channels=1, groups=1, src_spatial=(1, terms),
                   dst_spatial=(1, terms), kernel=(1, 1), strides=(1, 1), pads_begin=(0, 0))  # fmt: skip


def _sum_of(a: list[float], b: list[float]) -> float:
    problem = _point(len(a))
    tensors = [
        np.array(each, np.float64).reshape(shape) for each, shape in zip((a, b), problem.input_shapes, strict=True)
    ]
    return float(compute(problem, *tensors, reference=True).item())


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ([2.0**600, 2.0**600, 3.0], [2.0**600, -(2.0**600), 5.0]),  # products overflow and cancel
        ([2.0**1023, -(2.0**1023), 2.0**1023], [1.0, 1.0, 0.5]),
        ([2.0**1023] * 3, [1.0, 1.0, -1.0]),  # a partial sum overflows
        ([1 + 2.0**-52, 1.0], [2.0**-1000 * (1 + 2.0**-52), 2.0**-1000 * -1.0]),  # the error of a product underflows
        ([2.0**-540 * (1 + 2.0**-52), 2.0**-540], [2.0**-520 * (1 + 2.0**-50), 2.0**-520]),
        ([2.0**-1074, 2.0**1000], [2.0**1000, 2.0**-900]),  # a subnormal value, and one whose own layer is far above
        ([5e-324, 1.5], [0.5, 3e-324]),
        ([2.0**1000, 2.0**-1000], [3.0, 7.0]),
        ([2.0**1023, 2.0**-20, 2.0**-1060], [2.0**-1060, 2.0**-20, 2.0**1023]),
    ],
)  # fmt: skip
def test_extreme_magnitudes(a: list[float], b: list[float]) -> None:
    """The result is the exact sum, rounded, whatever becomes of its products in float64."""
    right, _ = _exact(np.array(a), np.array(b))
    assert _sum_of(a, b) == float(right)


def test_overflow_inf_and_nan() -> None:
    """A sum beyond the largest number is Inf; Inf and NaN spread as they do in float64, and meet no padding."""
    assert _sum_of([2.0**1000, 1.0], [2.0**24, 1.0]) == np.inf
    assert _sum_of([-(2.0**1000), 1.0], [2.0**24, 1.0]) == -np.inf
    assert _sum_of([np.inf, -(2.0**1000)], [1.0, 2.0**1000]) == np.inf
    assert np.isnan(_sum_of([np.inf, 1.0], [0.0, 1.0]))
    assert np.isnan(_sum_of([np.inf, np.inf], [1.0, -1.0]))
    assert np.isnan(_sum_of([np.nan], [1.0]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["wgrad", "transposed", "bias gradient"])
def test_any_number_of_workers(name: str, dtype: str) -> None:
    """Units may run in any order, and the plan for more workers gives the same bits."""
    problem: ConvProblem = replace(PROBLEMS[name], dtype=dtype)  # type: ignore[arg-type] # one of the dtypes
    inputs, output = _inputs(problem), np.empty(problem.output_shape, problem.output_dtype)
    for unit in reversed(plan(problem, reference=True, workers=7).units):
        assert REFERENCE.run(problem, unit, inputs, output, None, lambda: False)
    assert output.tobytes() == compute(problem, *inputs, reference=True).tobytes()


def test_nan_has_one_sign() -> None:
    """NaN that a processor makes has the bits of NumPy's."""
    problem = replace(LAYER, groups=1, n=1)
    inputs: list[Any] = [np.full(shape, np.inf, np.float32) for shape in problem.input_shapes]
    inputs[1][:, :, 0] = -np.inf
    chosen, output = plan(problem, reference=True), np.empty(problem.output_shape, np.float32)
    for unit in chosen.units:
        assert REFERENCE.run(problem, unit, inputs, output, None, lambda: False)
    assert np.isnan(output).any()
    assert set(output[np.isnan(output)].view(np.uint32)) == {0x7FC00000}
