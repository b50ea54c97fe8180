"""Tolerances to take along: honest kernels are within them on every seed, faults above the detection limit are not."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kernels import run_unit
from tests.kernels.harness import problem_of, stored
from tests.problems import Case, random_case
from tests.verify.judged import memory_of
from tests.verify.kernels import DATA, LAYER, honest, mutants, products
from verify.arithmetic import Arithmetic, round_bits, truncate_bits
from verify.tolerance import places_of, plan_tolerance, smallest_pair
from verify.unit import read_report

Array = npt.NDArray[Any]

DOT = Case(name="dot", n=4, src_channels=6, dst_channels=5, src_spatial=(16, 16), dst_spatial=(16, 16), kernel=(1, 1))


def tolerance(
    case: Case, inputs: dict[str, Array], said: Arithmetic | None = None
) -> tuple[dict[str, Any], Array, Array]:
    """Return the report, the reference and the tolerances of a case."""
    plan = plan_tolerance(problem_of(case), workers=2, arithmetic=said)
    output, scratch = memory_of(plan)
    for unit in plan.units:
        assert run_unit(plan, unit, [*map(stored, inputs.values())], output, scratch)
    kind = np.float64 if case.dtype == "f64" else np.float32
    arrays = [output[place].view(kind).reshape(case.output_shape) for place in places_of(case.output_shape, case.dtype)]
    return read_report(output.tobytes()), arrays[0], arrays[1]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seeds", [range(10), pytest.param(range(10, 1000), marks=pytest.mark.release)])
def test_honest_kernels_and_faults(seeds: range) -> None:
    """Five honest kernels pass on every seed, for each element and by the pair; faults above the limit pass on none.

    A fault is above the limit if it moves an element by more than twice its tolerance: one for the kernel's own error.
    """
    visible = 0
    for seed in seeds:
        rng = np.random.default_rng(seed)
        inputs = DATA[seed % len(DATA)](rng)
        report, reference, allowed = tolerance(LAYER, inputs)
        terms, pair = products(inputs), {"rtol": report["rtol"], "atol": report["atol"]}
        for name, result in honest(inputs, terms):
            assert (np.abs(result - reference) <= allowed).all(), (name, seed)
            np.testing.assert_allclose(result, reference, **pair, err_msg=f"{name}, {seed}")
        for name, result in mutants(inputs):
            off = np.abs(result.astype(np.float64) - reference)
            if (off > 2 * allowed).any():
                visible += 1
                assert not (np.abs(result.astype(np.float32) - reference) <= allowed).all(), (name, seed)
            if (off > 2 * (pair["atol"] + pair["rtol"] * np.abs(reference))).any():
                assert not np.allclose(result.astype(np.float32), reference, **pair), (name, seed)
    assert visible > 0.9 * len(seeds) * len(list(mutants(inputs)))


def test_the_detection_limit_is_what_is_seen() -> None:
    """Without 8 times as many random products as stated most elements fail, without an eighth nearly none."""
    case, rng = replace(DOT, n=64, src_channels=12, dst_channels=12), np.random.default_rng(1)
    shapes = {"src": case.src_shape, "diff_dst": case.dst_shape}
    inputs = {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}
    report, reference, allowed = tolerance(case, inputs, Arithmetic(sum="f16"))
    limit, n = report["detection"]["one_element"], report["detection"]["products"]
    a, b = (np.moveaxis(each.astype(np.float64), 1, 0).reshape(12, -1) for each in inputs.values())
    assert n == a.shape[1] == 16384
    seen = []
    for share in (8 * limit, limit / 8):
        assert 1 < share * n < n / 2
        kept = np.ones(n)
        kept[rng.choice(n, round(share * n), replace=False)] = 0
        seen.append(float((np.abs((b * kept) @ a.T - reference.reshape(12, 12)) > allowed.reshape(12, 12)).mean()))
    assert seen[0] > 0.6
    assert seen[1] < 0.05


def test_the_smallest_pair() -> None:
    """No other line above all tolerances allows less in the mean, and none of those returned is below one."""
    rng = np.random.default_rng(2)
    for trial in range(60):
        sizes = rng.standard_normal(12) * (trial % 3)
        sizes[0] *= trial % 2
        least = np.abs(rng.standard_normal(12) + (trial % 5 - 2) * sizes) * np.float64(10.0) ** (trial % 7 - 5)
        atol, rtol = smallest_pair(sizes, least, lambda: False)
        assert (atol + rtol * np.abs(sizes) >= least).all()
        x = np.abs(sizes)
        slopes = [(least[i] - least[j]) / (x[i] - x[j]) for i, j in combinations(range(12), 2) if x[i] != x[j]]
        slopes += [0.0, *(least[x > 0] / x[x > 0])]
        lines = [(max(0.0, float((least - slope * x).max())), slope) for slope in slopes if slope >= 0]
        best = min(base + slope * x.mean() for base, slope in lines)
        assert atol + rtol * x.mean() <= best * 1.002


def test_what_is_not_finite_does_not_count() -> None:
    """NaN, Inf and elements without a bound leave the pair as it is; without others it is 0."""
    sizes, least = np.array([1.0, 2.0, np.nan, np.inf, 5.0]), np.array([0.1, 0.3, 0.0, 0.0, np.inf])
    assert smallest_pair(sizes, least, lambda: False) == smallest_pair(sizes[:2], least[:2], lambda: False)
    assert smallest_pair(sizes[2:], least[2:], lambda: False) == (0.0, 0.0)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "f64"])
def test_exact_sums_have_no_tolerance(dtype: str) -> None:
    """Integers must have every bit of the rounded reference, in any dtype, and the sentence says so."""
    case = replace(LAYER, dtype=dtype)
    inputs = case.inputs()
    report, reference, allowed = tolerance(case, inputs)
    assert (reference == case.expected(inputs).astype(np.float64)).all()
    assert not allowed.any()
    assert (report["atol"], report["rtol"], report["exact"]) == (0.0, 0.0, reference.size)
    assert "every bit" in report["text"]


@pytest.mark.parametrize("lanes", [2, 8])
def test_data_that_are_hard_in_lanes(lanes: int) -> None:
    """A row whose sign alternates is summed in lanes that grow far beyond the sum, and is within its tolerance."""
    rng, size = np.random.default_rng(4), 1 << 14
    case = replace(DOT, n=1, src_spatial=(size,), dst_spatial=(size,), kernel=(1,), strides=(1,), dilations=(1,),
                   pads_begin=(0,), pads_end=(0,), output_padding=(0,))  # fmt: skip
    src, dst = (np.abs(rng.standard_normal(shape, dtype=np.float32)) for shape in (case.src_shape, case.dst_shape))
    dst[..., 1::2] *= -1
    report, reference, allowed = tolerance(case, {"src": src, "diff_dst": dst})
    terms = (dst[0, :, None] * src[0]).reshape(-1, size // lanes, lanes)
    total = np.add.accumulate(terms, axis=1, dtype=np.float32)[:, -1]
    result = np.add.accumulate(total, axis=1, dtype=np.float32)[:, -1].reshape(case.output_shape)
    assert (np.abs(result - reference) <= allowed).all()
    assert report["difficulty"] > 20


def test_every_operation() -> None:
    """Of any call, the reference of integers has the bits of the oracle, and real sums in f64 are within f32's."""
    rng, seen = np.random.default_rng(3), set[str]()
    while len(seen) < 8:
        case = random_case(rng)
        inputs = case.inputs()
        _, reference, allowed = tolerance(case, inputs)
        np.testing.assert_array_equal(reference, case.expected(inputs).astype(np.float64))
        assert not allowed.any(), case
        inputs = case.floats()
        report, reference, allowed = tolerance(case, inputs)
        assert (np.abs(case.expected(inputs).astype(np.float64) - reference) <= allowed).all(), case
        assert report["elements"] == reference.size
        seen.add(case.op)


def test_nan_and_inf_are_expected_where_they_belong() -> None:
    """NaN and Inf of the data are in the reference, counted, with their first places; other elements are as before."""
    inputs = LAYER.floats()
    inputs["src"][0, 0, 3, 3], inputs["src"][0, 1, 2, 2] = np.nan, np.inf
    report, reference, allowed = tolerance(LAYER, inputs)
    expected = LAYER.expected(inputs)
    np.testing.assert_array_equal(np.isnan(reference), np.isnan(expected))
    np.testing.assert_array_equal(np.isinf(reference), np.isinf(expected))
    found = report["not_finite"]
    assert (found["nan"], found["inf"]) == (np.isnan(expected).sum(), np.isinf(expected).sum())
    assert min(found["nan"], found["inf"]) > 0
    assert not np.isfinite(expected[tuple(found["first"][0])])
    assert not allowed[~np.isfinite(expected)].any()
    assert (allowed[np.isfinite(expected)] > 0).all()
    assert report["rtol"] < 1e-3


def test_sums_that_are_too_large() -> None:
    """Where the accumulator may overflow any value may be honest; a sum that does must be Inf."""
    ones = np.full(DOT.dst_shape, 2.0**57, np.float32)
    src = np.full(DOT.src_shape, 2.0**50, np.float32)
    src[:, 2, ::2], src[:, 2, 1::2], src[:, 3] = 2.0**70, -(2.0**70), 1e30
    report, reference, allowed = tolerance(DOT, {"src": src, "diff_dst": ones})
    assert np.isinf(reference[:, 3]).all()
    assert not allowed[:, 3].any()
    assert np.isinf(allowed[:, 2]).all()
    assert np.isfinite(reference[:, 2]).all()
    assert np.isfinite(allowed[:, [0, 1]]).all()
    assert report["unbounded"] == 5


@pytest.mark.parametrize("change", [round_bits, truncate_bits, None])
@pytest.mark.parametrize("both", [True, False])
def test_rounded_inputs_in_any_way(change: Any, both: bool) -> None:
    """Declared TF32 holds however one input or both are rounded, or none; plain f32 does not hold TF32."""
    inputs = DATA[0](np.random.default_rng(0))
    report, reference, allowed = tolerance(LAYER, inputs, Arithmetic("tf32"))
    plain = tolerance(LAYER, inputs)[2]
    rounded = dict(inputs)
    for name in ("src", "diff_dst")[: 2 if both else 1] if change else ():
        rounded[name] = np.asarray(change(inputs[name].astype(np.float64), 11)).astype(np.float32)
    for name, result in honest(rounded, products(rounded)):
        off = np.abs(result - reference)
        assert (off <= allowed).all(), name
        assert (off > plain).any() == (change is not None)
    assert "what rounding the inputs changes" in report["text"]
    assert report["arithmetic"] == "TF32 products, f32 sums"


@pytest.mark.parametrize("said", [Arithmetic(sum="bf16"), Arithmetic(segments=4, segment_sum="f16")])
def test_declared_sums(said: Arithmetic) -> None:
    """Sums that are kept, or added, in a narrow dtype have a larger tolerance, which an f32 sum is within as well."""
    inputs = DATA[0](np.random.default_rng(0))
    _, reference, allowed = tolerance(LAYER, inputs, said)
    assert (allowed > 10 * tolerance(LAYER, inputs)[2]).all()
    assert all((np.abs(result - reference) <= allowed).all() for _, result in honest(inputs, products(inputs)))


def test_an_empty_result() -> None:
    """A result without elements has a tolerance without elements."""
    case = replace(DOT, dst_channels=0)
    report, reference, allowed = tolerance(case, case.inputs())
    assert reference.size == allowed.size == report["elements"] == 0
