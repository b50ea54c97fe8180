"""Verification: right results pass, planted errors are found and explained, however the work is cut."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kernels import ConvProblem, Plan, Unit, run_unit
from tests.kernels.harness import compute, problem_of, stored
from tests.problems import Case, Tensor, random_case
from tests.verify.judged import verify
from verify.fast import plan_fast_verification
from verify.hints import hints
from verify.report import report_work, write_report
from verify.rules import Compared
from verify.stopping import Stopped, raising
from verify.terms import worst_terms
from verify.unit import plan_verification, read_report

LAYER = Case(
    n=2, src_channels=5, dst_channels=7, src_spatial=(9, 8), dst_spatial=(9, 8), kernel=(3, 3), pads_begin=(1, 1),
    pads_end=(1, 1),
)  # fmt: skip


def test_right_results_pass() -> None:
    """What the kernels compute passes, from integers bit for bit by both verdicts, and from real numbers."""
    rng = np.random.default_rng(1)
    for number in range(150):
        case = random_case(rng, macs=20_000)
        inputs = case.inputs() if number % 2 else case.floats()
        report = verify(case, inputs, compute(case, inputs))
        assert report["passed"], case
        if number % 2:
            assert report["equal"], case
            assert report["verdicts"]["onednn"] == report["verdicts"]["onednn"] | {"passed": True, "test": "benchdnn"}
        assert sum(row["count"] for row in report["ulp"]) == report["elements"] - report["not_finite"] or not number % 2


def test_errors_are_compared_with_two_others() -> None:
    """The rounded reference has the error of one rounding; a naive sum that of a naive sum; exact sums have none."""
    case = Case(
        n=4, src_channels=6, dst_channels=8, src_spatial=(40, 40), dst_spatial=(40, 40), kernel=(1, 1), seed=3,
    )  # fmt: skip
    inputs = case.floats()
    assert verify(case, inputs, case.expected(inputs))["errors"]["to_best"] == pytest.approx(1)
    products = np.einsum("nixy,noxy->oinxy", inputs["src"], inputs["diff_dst"]).reshape(8, 6, -1)
    naive = np.add.accumulate(products, axis=-1, dtype=np.float32)[..., -1].reshape(8, 6, 1, 1)
    found = verify(case, inputs, naive)["errors"]
    assert 0.5 < found["to_naive"] < 1.5
    assert found["to_best"] > 20
    assert verify(case, case.inputs(), case.expected(case.inputs()))["errors"] is None


def test_a_planted_error_is_found_and_its_sum_explained() -> None:
    """One element beyond its bound fails; its index is named, and the products of its sum are those of the inputs."""
    rng = np.random.default_rng(2)
    found = 0
    for _ in range(150):
        case = random_case(rng, macs=20_000)
        inputs = case.inputs()
        result, exact = case.expected(inputs), case.exact(inputs)
        if not result.size:
            continue
        index = tuple(int(rng.integers(size)) for size in result.shape)
        result[index] = case.rounded(np.array(1.5 * float(exact[index]) + 2000))
        report = verify(case, inputs, result)
        worst = report["worst"]
        assert not report["passed"], case
        assert (tuple(worst["index"]), worst["exact"]) == (index, exact[index])
        tensors = list(inputs.values())
        for term in worst["largest"] if len(worst["largest"]) > 1 and not case.of_bias else []:
            factors = [float(tensor[tuple(at)]) for tensor, at in zip(tensors, term["at"], strict=False)]
            assert np.prod(factors) == term["value"], (case, term)
            found += 1
        if worst["terms"] <= len(worst["largest"]):
            assert sum(term["value"] for term in worst["largest"]) == exact[index], case
        assert all(np.nanmax(np.array(each["values"], float)) > 1 for each in report["maps"].values())
    assert found > 300


def test_results_in_f64() -> None:
    """f64 is judged in f64: the oracle's sums pass, what f32 rounds away fails, as does one wrong bit of integers."""
    rng = np.random.default_rng(6)
    for number in range(60):
        case = replace(random_case(rng, macs=20_000), dtype="f64")
        inputs = case.inputs() if number % 2 else case.floats()
        right = case.expected(inputs)
        report = verify(case, inputs, right)
        assert report["passed"], case
        assert report["verdicts"]["onednn"]["passed"], case
        if number % 2 and right.size:
            assert report["equal"], case
            index = tuple(int(rng.integers(size)) for size in right.shape)
            right[index] = np.nextafter(right[index], np.inf)
            report = verify(case, inputs, right)
            assert (report["worst"]["ulp"], report["verdicts"]["onednn"]["failed"]) == (1, 1), case
            right[index] = -right[index] - 1e300
            assert verify(case, inputs, right)["worst"]["ulp"] > 1 << 60
        elif np.count_nonzero(right) > 8:
            assert not verify(case, inputs, right.astype(np.float32).astype(np.float64))["passed"], case


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_one_step_beyond_the_bound(dtype: str) -> None:
    """In the last tap, the last number within the bound passes and the next one fails, alone in the map of taps."""
    case = replace(LAYER, dtype=dtype, weights_format="OIX")
    inputs = case.floats()
    right, exact = case.expected(inputs), case.exact(inputs)
    index, terms = (6, 4, 2, 2), 2 * 8 * 7
    squares = case.exact({name: np.square(tensor.astype(np.float64)) for name, tensor in inputs.items()})
    coherence = float(np.mean(exact**2 / squares))
    square, q = max(float(exact[index]) ** 2, coherence * squares[index]), squares[index]
    added = terms - (dtype == "f32")
    summing = 0.18 * 2.0**-48 * (added * square / 3 + added * q * max(1, coherence) / 6 + q)

    def stepped(steps: int) -> Tensor:
        """Return the result with this element so many numbers of its dtype farther from zero."""
        changed = right.copy()
        bits = changed.view(np.uint32 if dtype == "f32" else np.uint16)
        bits[index] += steps
        return changed

    passes, fails = 0, 1 << 12
    while fails - passes > 1:
        middle = (passes + fails) // 2
        if verify(case, inputs, stepped(middle))["passed"]:
            passes = middle
        else:
            fails = middle
    last, first = (float(stepped(steps)[index]) for steps in (passes, fails))
    inside, outside, result = abs(last - exact[index]), abs(first - exact[index]), stepped(fails)
    allowed = abs(first - last) / 2 + 8 * np.sqrt(summing)
    assert allowed < outside
    assert inside <= 1.5 * allowed  # naive sums of this very element may allow a little more
    report = verify(case, inputs, result)
    taps = np.array(report["maps"]["tap"]["values"], float)
    assert np.argwhere(taps > 1).tolist() == [[2, 2]]
    assert [rule["rule"] for rule in report["rules"] if not rule["passed"]] == ["largest"]
    assert report["where"]["text"].startswith(
        "the one wrong element has dst channel = 6, src channel = 4, tap y = 2 and tap x = 2"
    )
    assert report["worst"]["index"] == list(index)


@pytest.mark.parametrize("shift", [(1, 0), (0, -1), (1, 1), (-2, 1)])
def test_wrong_padding_is_named(shift: tuple[int, int]) -> None:
    """A gradient computed with other pads is told apart: the hint has the pads that it was computed with."""
    begin = tuple(2 + far for far in shift)
    case = replace(LAYER, pads_begin=(2, 2), pads_end=(2, 2), kernel=(5, 5), src_channels=9)
    wrong = replace(case, pads_begin=begin, pads_end=tuple(4 - pad for pad in begin))
    inputs = case.floats()
    report = verify(case, inputs, wrong.expected(inputs))
    assert not report["passed"]
    assert any(f"as if pads_begin were {list(begin)}" in hint for hint in report["hints"])


def test_other_mistakes_are_named() -> None:
    """Taps in reverse, and a gradient averaged over the batch, are told apart too; noise has no explanation."""
    inputs = LAYER.floats()
    right = LAYER.expected(inputs)
    assert "reverse order" in verify(LAYER, inputs, right[..., ::-1, ::-1].copy())["hints"][0]
    assert "averaged over the batch" in verify(LAYER, inputs, right / 2)["hints"][0]
    noise = np.random.default_rng(1).standard_normal(right.shape).astype(np.float32)
    assert verify(LAYER, inputs, noise)["hints"] == []


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "f64"])
def test_inf_and_nan(dtype: str) -> None:
    """Inf and NaN pass where the reference has them, and fail anywhere else."""
    case = replace(LAYER, dtype=dtype)
    inputs = case.inputs()
    inputs["src"][0, 1, 4, 4] = np.nan
    inputs["src"][1, 2, 4, 4] = np.inf
    right = case.expected(inputs)
    assert np.isnan(right.astype(np.float32)).any()
    assert verify(case, inputs, right)["passed"]
    for value in (np.nan, np.inf, -np.inf):
        wrong = right.copy()
        wrong[0, 0, 0, 0] = value
        report = verify(case, inputs, wrong)
        assert not report["passed"]
        assert report["worst"]["index"] == [0, 0, 0, 0]
    lost = np.where(np.isnan(right.astype(np.float32)), np.zeros_like(right), right)
    assert verify(case, inputs, lost)["not_finite"] > 0
    assert not verify(case, inputs, lost)["passed"]


def test_an_overflow_that_rounding_explains_passes() -> None:
    """Where the sum is a little below the largest f32, Inf is within its bound; far below it is not."""
    case = replace(LAYER, n=1, src_channels=1, dst_channels=1, src_spatial=(1, 1), dst_spatial=(1, 1),
                   kernel=(1, 1), pads_begin=(0, 0), pads_end=(0, 0))  # fmt: skip
    infinite = np.full((1, 1, 1, 1), np.inf, np.float32)
    for value, passes in ((2.0**64 * (1 - 2.0**-24), True), (1.5 * 2.0**63, False)):
        inputs = {name: np.full((1, 1, 1, 1), value, np.float32) for name in ("src", "diff_dst")}
        assert verify(case, inputs, infinite)["passed"] is passes


@pytest.mark.parametrize(
    ("dtype", "value"), [("f16", 300.0), ("f16", 60000.0), ("f32", 1e30), ("bf16", 1e30), ("f64", 1e300)]
)
def test_an_overflow_of_the_reference_passes(dtype: str, value: float) -> None:
    """Where the exact sum is beyond the largest number, Inf is right: neither a finite number nor -Inf is."""
    case = replace(LAYER, dtype=dtype, n=1, src_channels=1, dst_channels=1, src_spatial=(1, 1), dst_spatial=(1, 1),
                   kernel=(1, 1), pads_begin=(0, 0), pads_end=(0, 0))  # fmt: skip
    inputs = {name: case.rounded(np.full((1, 1, 1, 1), value)) for name in ("src", "diff_dst")}
    report = verify(case, inputs, case.rounded(np.full((1, 1, 1, 1), np.inf)))
    assert (report["equal"], report["passed"], report["worst"], report["max_error"]) == (True, True, None, 0.0)
    for wrong in (-np.inf, 1.0):
        assert not verify(case, inputs, case.rounded(np.full((1, 1, 1, 1), wrong)))["passed"]


def test_an_overflow_of_both_signs() -> None:
    """NaN and either Inf pass where positive and negative products overflow each by themselves, and only there."""
    case = replace(LAYER, n=1, src_channels=1, dst_channels=1, src_spatial=(1, 4), dst_spatial=(1, 4),
                   kernel=(1, 1), pads_begin=(0, 0), pads_end=(0, 0))  # fmt: skip
    for negative, passes in ((2.0**66, True), (2.0**60, False)):
        src, diff_dst = np.full((1, 1, 1, 4), 2.0**64, np.float32), np.full((1, 1, 1, 4), 2.0**66, np.float32)
        src[..., 3], diff_dst[..., 3] = -(2.0**64), negative
        for value in (np.nan, -np.inf):
            wrong = np.full((1, 1, 1, 1), value, np.float32)
            assert verify(case, {"src": src, "diff_dst": diff_dst}, wrong)["passed"] is passes
        assert verify(case, {"src": src, "diff_dst": diff_dst}, np.full((1, 1, 1, 1), np.inf, np.float32))["passed"]


def test_errors_beyond_the_largest_number() -> None:
    """An error of more allowances than the largest number fails the result, without a warning."""
    inputs = {name: tensor * np.float32(2.0**-60) for name, tensor in LAYER.floats().items()}
    assert not verify(LAYER, inputs, np.ones(LAYER.weights_shape, np.float32))["passed"]


def test_swapped_channels_are_named() -> None:
    """A gradient whose channel axes are in the other order is told apart, in every format."""
    for weights_format in ("OIX", "XIO", "XOI", "IOX"):
        case = replace(LAYER, src_channels=7, weights_format=weights_format)
        inputs = case.floats()
        axes = (-2, -1) if weights_format.startswith("X") else (0, 1)
        (hint,) = verify(case, inputs, np.swapaxes(case.expected(inputs), *axes).copy())["hints"]
        assert "channel axes swapped" in hint


def test_data_that_look_alike_give_no_hints() -> None:
    """One wrong element of a constant gradient is no shift and no flip, though it equals both nearly everywhere."""
    case = replace(LAYER, pads_begin=(0, 0), pads_end=(0, 0), dst_spatial=(7, 6))
    inputs = {name: np.ones_like(tensor) for name, tensor in case.inputs().items()}
    result = case.expected(inputs)
    result[0, 0, 0, 0] *= 2
    report = verify(case, inputs, result)
    assert (report["passed"], report["worst"]["index"], report["hints"]) == (False, [0, 0, 0, 0], [])


def test_the_order_of_the_units_does_not_change_the_report() -> None:
    """The report is the same whatever unit of the reference is computed first, and for any number of workers."""
    inputs = LAYER.floats()
    result = LAYER.expected(inputs)
    reports = []
    for workers, order in ((1, 1), (8, -1)):
        plan = plan_verification(problem_of(LAYER), workers=workers)
        output, scratch = np.zeros(plan.problem.output_shape, np.uint8), np.zeros(plan.scratch_bytes, np.uint8)
        for unit in (*plan.units[:-1][::order], plan.units[-1]):
            assert run_unit(plan, unit, [*map(stored, inputs.values()), stored(result)], output, scratch)
        reports.append(output.tobytes())
    assert reports[0] == reports[1]


@pytest.mark.parametrize("kernel", [(1, 1), (3, 3)])
def test_memory_is_bounded(kernel: tuple[int, int]) -> None:
    """A failed result of many elements is described in less memory than its float64 values would take."""
    channels = 3000 // kernel[0]
    case = Case(
        n=1, src_channels=channels, dst_channels=channels, src_spatial=kernel, dst_spatial=(1, 1), kernel=kernel,
        pads_begin=(0, 0), pads_end=(0, 0),
    )  # fmt: skip
    problem = problem_of(case)
    exact = np.ones(problem.output_shape)
    inputs = [np.ones(shape, np.float32) for shape in problem.input_shapes]
    compared = Compared(problem, inputs, np.zeros(problem.output_shape, np.float32), exact, None, exact)
    tracemalloc.start()
    try:
        assert write_report(compared, lambda: False) is not None
        assert tracemalloc.get_traced_memory()[1] < exact.nbytes * 3 // 4
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("data_format", ["NCX", "NXC"])
@pytest.mark.parametrize("computes", ["diff_weights", "diff_bias"])
def test_a_long_sum_is_described_in_little_memory(data_format: str, computes: str) -> None:
    """The largest of a million products are found wherever they are, in less memory than the products would take."""
    case = Case(
        n=3, src_channels=2, dst_channels=2, src_spatial=(700, 500), dst_spatial=(700, 500), kernel=(1, 1),
        pads_begin=(0, 0), pads_end=(0, 0), data_format=data_format, weights_format="OIX",
    )  # fmt: skip
    rng = np.random.default_rng(4)
    problem = problem_of(case)
    inputs = [rng.standard_normal(shape, dtype=np.float32) for shape in problem.input_shapes]
    if computes == "diff_bias":
        problem = ConvProblem.of_bias(
            op="BiasAddBackward", dtype="f32", n=3, data_format=problem.data_format, channels=2, spatial=(700, 500)
        )
    given = inputs if computes == "diff_weights" else inputs[1:]
    factors = [np.take(tensor, 1, 1 if data_format == "NCX" else 3).astype(np.float64) for tensor in given]
    products = np.prod(factors, axis=0)
    tracemalloc.start()
    try:
        found = worst_terms(problem, given, (1, 1, 0, 0)[: len(problem.output_shape)], lambda: False)
        assert tracemalloc.get_traced_memory()[1] < products.nbytes
    finally:
        tracemalloc.stop()
    largest = products.reshape(-1)[np.argsort(-np.abs(products.reshape(-1)))][: len(found["largest"])]
    assert found["terms"] == products.size
    assert [term["value"] for term in found["largest"]] == largest.tolist()
    for term in found["largest"]:
        at = [float(tensor[tuple(place)]) for tensor, place in zip(given, term["at"], strict=True)]
        assert np.prod(at) == term["value"]


def test_hints_stop() -> None:
    """The search for an explanation obeys a stop too."""
    exact = np.random.default_rng(1).standard_normal(LAYER.output_shape)
    result = exact.astype(np.float32)[::-1].copy()
    inputs = list(LAYER.floats().values())
    compared = Compared(problem_of(LAYER), inputs, result, exact, None, np.ones_like(exact))
    answers = iter([False, False, True])
    with pytest.raises(Stopped):
        hints(compared, np.ones(exact.shape, np.float32), (0, 0, 0, 0), raising(lambda: next(answers, True)))


def test_the_report_is_bounded_and_stops() -> None:
    """A large result has maps of at most 64 entries an axis; every unit obeys a stop."""
    case = Case(
        n=1, src_channels=300, dst_channels=200, src_spatial=(5, 5), dst_spatial=(5, 5), kernel=(3, 3),
        pads_begin=(1, 1), pads_end=(1, 1),
    )  # fmt: skip
    inputs = case.floats()
    report = verify(case, inputs, np.zeros(case.output_shape, np.float32))
    assert np.shape(report["maps"]["channels"]["values"]) == (64, 64)
    assert report["maps"]["channels"]["shape"] == [200, 300]
    plan = plan_verification(problem_of(case))
    output, scratch = np.zeros(plan.problem.output_shape, np.uint8), np.zeros(plan.scratch_bytes, np.uint8)
    tensors = [*map(stored, inputs.values()), np.zeros(case.output_shape, np.float32)]
    for unit in (plan.units[0], plan.units[-1]):
        assert not run_unit(plan, unit, tensors, output, scratch, lambda: True)


@pytest.mark.parametrize("op", ["ConvolutionBackwardWeights", "Convolution"])
@pytest.mark.parametrize("make", [plan_verification, plan_fast_verification])
def test_a_stop_is_looked_at_often(op: str, make: Callable[[ConvProblem], Plan]) -> None:
    """However many taps a filter has, no unit runs through all of them after a stop."""
    case = Case(
        op=op, n=1, src_channels=64, dst_channels=64, src_spatial=(26, 26), dst_spatial=(11, 11), kernel=(16, 16)
    )
    plan = make(problem_of(case))
    output, scratch = np.zeros(plan.problem.output_shape, np.uint8), np.zeros(plan.scratch_bytes, np.uint8)
    tensors = [*map(stored, case.floats().values()), np.zeros(case.output_shape, np.float32)]
    asked = 0

    def run(unit: Unit, answers: int) -> bool:
        nonlocal asked
        asked = 0

        def stop() -> bool:
            nonlocal asked
            asked += 1
            return asked > answers

        return run_unit(plan, unit, tensors, output, scratch, stop)

    total = 0
    for unit in plan.units:
        assert run(unit, 1 << 62)
        total += (before := asked)
        assert not run(unit, before // 2)
        assert asked == before // 2 + 1
    assert total > 5


def many(n: int, size: tuple[int, ...], kernel: tuple[int, ...], channels: int = 1, **more: Any) -> Case:
    """Return a problem of many taps or images, whose result has as many pixels as its data."""
    pads = tuple(extent // 2 for extent in kernel)
    return Case(
        n=n, src_channels=channels, dst_channels=channels, src_spatial=size, dst_spatial=size, kernel=kernel,
        pads_begin=pads, pads_end=pads, **more,
    )  # fmt: skip


@pytest.mark.parametrize(
    "case",
    [
        many(1000, (1, 1, 1), (15, 15, 15)),
        many(1000, (1, 1), (3, 3), 4),
        many(2, (15, 15, 15), (15, 15, 15)),
        many(8, (1000,), (1001,)),
        many(3, (32, 32), (63, 63)),
        many(1000, (1, 1, 1), (7, 7, 7), op="Convolution"),
        many(1, (9, 9, 9), (9, 9, 9), op="Convolution"),
    ],
    ids=lambda case: f"{case.op}-{case.n}-{case.kernel}",
)
def test_a_report_takes_no_longer_than_it_counts(case: Case) -> None:
    """Of a wrong result of many images, taps or both few are looked at; before each the worker may be asked to stop."""
    inputs, wrong = case.floats(), np.random.default_rng(1).standard_normal(case.output_shape).astype(np.float32)
    plan = plan_verification(problem_of(case))
    output, scratch = np.zeros(plan.problem.output_shape, np.uint8), np.zeros(plan.scratch_bytes, np.uint8)
    looks = 0

    def stop() -> bool:
        nonlocal looks
        looks += 1
        return looks > 50_000

    *sums, report = plan.units
    tensors = [*map(stored, inputs.values()), wrong]
    assert all(run_unit(plan, unit, tensors, output, scratch) for unit in sums)
    assert run_unit(plan, report, tensors, output, scratch, stop)
    assert not read_report(output.tobytes())["passed"]
    assert looks < report_work(problem_of(case)) / 1000


def test_many_small_images_give_the_same_hints() -> None:
    """Mistakes in gradients of a thousand small images are named, as those of a few large ones are."""
    case = many(1000, (2, 2), (3, 3), 3)
    inputs = case.floats()
    right = case.expected(inputs)
    assert verify(case, inputs, right)["passed"]
    lost = case.expected({name: np.concatenate([tensor[:-1], 0 * tensor[-1:]]) for name, tensor in inputs.items()})
    assert not verify(case, inputs, lost)["passed"]
    assert "reverse order" in verify(case, inputs, right[..., ::-1, ::-1].copy())["hints"][0]
    cut = {name: (tensor.view(np.uint32) & 0xFFFFE000).view(np.float32) for name, tensor in inputs.items()}
    assert verify(case, inputs, case.expected(cut))["causes"][0]["cause"] == "the inputs were read as TF32, truncated"


def test_maps_of_three_axes() -> None:
    """A result with 64 pixels along each of three axes has maps that fit in a report."""
    case = Case(op="Convolution", src_spatial=(64, 64, 64), dst_spatial=(64, 64, 64), kernel=(1, 1, 1))
    inputs = case.floats()
    report = verify(case, inputs, np.zeros(case.output_shape, np.float32))
    assert np.shape(report["maps"]["pixel"]["values"]) == (16, 16, 16)
    assert report["maps"]["pixel"]["shape"] == [64, 64, 64]


def test_large_results_are_recognised_by_a_part_of_them() -> None:
    """A result of a million elements that is rearranged is recognised, and noise is not."""
    case = Case(src_channels=512, dst_channels=512, src_spatial=(2, 2), dst_spatial=(1, 1), kernel=(2, 2))
    problem, rng = problem_of(case), np.random.default_rng(3)
    exact = rng.standard_normal(problem.output_shape)
    inputs = [np.zeros(shape, np.float32) for shape in problem.input_shapes]
    for wrong, words in (
        (exact[..., ::-1, ::-1], "its taps in reverse order"),
        (exact.swapaxes(0, 1), "its two channel axes swapped"),
        (exact.transpose(2, 3, 0, 1).reshape(exact.shape), "has the layout XOI instead of OIX"),
        (3 * exact, "is 3 times the reference"),
        (rng.standard_normal(exact.shape), ""),
    ):
        stored_result = np.ascontiguousarray(wrong, np.float32)
        compared = Compared(problem, inputs, stored_result, exact, None, np.ones_like(exact))
        found = hints(compared, np.full(exact.shape, 2, np.float32), (0, 0, 0, 0), lambda: False)
        assert any(words in sentence for sentence in found) if words else not found
