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
from tests.verify.judged import memory_of, verify
from verify.arithmetic import PLAIN
from verify.compared import Compared
from verify.fast import plan_fast_verification
from verify.report import report_on, report_work
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


POINT = Case(src_spatial=(1, 1), dst_spatial=(1, 1), kernel=(1, 1))


def point(value: float, dtype: Any = np.float32) -> Tensor:
    """Return a tensor of one element."""
    return np.full((1, 1, 1, 1), value).astype(dtype)


def test_an_overflow_that_rounding_explains_passes() -> None:
    """Where the sum is a little below the largest f32, Inf is within its bound; far below it is not."""
    for value, passes in ((2.0**64 * (1 - 2.0**-24), True), (1.5 * 2.0**63, False)):
        report = verify(POINT, {"src": point(value), "diff_dst": point(value)}, point(np.inf))
        assert report["passed"] is passes


@pytest.mark.parametrize(
    ("dtype", "value"), [("f16", 300.0), ("f16", 60000.0), ("f32", 1e30), ("bf16", 1e30), ("f64", 1e300)]
)
def test_an_overflow_of_the_reference_passes(dtype: str, value: float) -> None:
    """Where the exact sum is beyond the largest number, Inf is right: neither a finite number nor -Inf is."""
    case = replace(POINT, dtype=dtype)
    inputs = {name: case.rounded(point(value, float)) for name in ("src", "diff_dst")}
    report = verify(case, inputs, case.rounded(point(np.inf, float)))
    assert (report["equal"], report["passed"], report["worst"], report["max_error"]) == (True, True, None, 0.0)
    for wrong in (-np.inf, 1.0):
        assert not verify(case, inputs, case.rounded(point(wrong, float)))["passed"]


def test_an_overflow_of_both_signs() -> None:
    """NaN and either Inf pass where positive and negative products overflow each by themselves, and only there."""
    case = replace(POINT, src_spatial=(1, 4), dst_spatial=(1, 4))
    for negative, passes in ((2.0**66, True), (2.0**60, False)):
        src, diff_dst = np.full((1, 1, 1, 4), 2.0**64, np.float32), np.full((1, 1, 1, 4), 2.0**66, np.float32)
        src[..., 3], diff_dst[..., 3] = -(2.0**64), negative
        for value, right in ((np.nan, passes), (-np.inf, passes), (np.inf, True)):
            assert verify(case, {"src": src, "diff_dst": diff_dst}, point(value))["passed"] is right


def test_errors_beyond_the_largest_number() -> None:
    """An error of more allowances than the largest number fails the result, without a warning."""
    inputs = {name: tensor * np.float32(2.0**-60) for name, tensor in LAYER.floats().items()}
    assert not verify(LAYER, inputs, np.ones(LAYER.weights_shape, np.float32))["passed"]


def test_the_order_of_the_units_does_not_change_the_report() -> None:
    """The report is the same whatever unit of the reference is computed first, and for any number of workers."""
    inputs = LAYER.floats()
    result = LAYER.expected(inputs)
    reports = []
    for workers, order in ((1, 1), (8, -1)):
        plan = plan_verification(problem_of(LAYER), workers=workers)
        output, scratch = memory_of(plan)
        for unit in (*plan.units[:-1][::order], plan.units[-1]):
            assert run_unit(plan, unit, [*map(stored, inputs.values()), stored(result)], output, scratch)
        reports.append(output.tobytes())
    assert reports[0] == reports[1]


@pytest.mark.heavy
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
    compared = Compared(
        problem, inputs, np.zeros(problem.output_shape, np.float32), exact, None, exact, arithmetic=PLAIN
    )
    tracemalloc.start()
    try:
        assert report_on(compared, lambda: False)
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


@pytest.mark.heavy
def test_the_report_is_bounded() -> None:
    """A large result has maps that fit in a report: of at most 64 entries an axis, or 16 of three."""
    case = Case(src_channels=300, dst_channels=200, src_spatial=(1, 1), dst_spatial=(1, 1), kernel=(1, 1))
    volume = Case(op="Convolution", src_spatial=(64, 64, 64), dst_spatial=(64, 64, 64), kernel=(1, 1, 1))
    for each, name, cells, shape in ((case, "channels", [64] * 2, [200, 300]), (volume, "pixel", [16] * 3, [64] * 3)):
        found = verify(each, each.floats(), np.zeros(each.output_shape, np.float32))["maps"][name]
        assert (list(np.shape(found["values"])), found["shape"]) == (cells, shape)


@pytest.mark.heavy
@pytest.mark.parametrize("op", ["ConvolutionBackwardWeights", "Convolution"])
@pytest.mark.parametrize("make", [plan_verification, plan_fast_verification])
def test_a_stop_is_looked_at_often(op: str, make: Callable[[ConvProblem], Plan]) -> None:
    """However many taps a filter has, no unit runs through all of them after a stop."""
    case = Case(
        op=op, n=1, src_channels=64, dst_channels=64, src_spatial=(26, 26), dst_spatial=(11, 11), kernel=(16, 16)
    )
    plan = make(problem_of(case))
    output, scratch = memory_of(plan)
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
        many(1000, (1, 1, 1), (15, 15, 15)), many(1000, (1, 1), (3, 3), 4), many(2, (15, 15, 15), (15, 15, 15)),
        many(8, (1000,), (1001,)), many(3, (32, 32), (63, 63)), many(1000, (1, 1, 1), (7, 7, 7), op="Convolution"),
        many(1, (9, 9, 9), (9, 9, 9), op="Convolution"),
    ],
    ids=lambda case: f"{case.op}-{case.n}-{case.kernel}",
)  # fmt: skip
def test_a_report_takes_no_longer_than_it_counts(case: Case) -> None:
    """Of a wrong result of many images, taps or both few are looked at; before each the worker may be asked to stop."""
    inputs, wrong = case.floats(), np.random.default_rng(1).standard_normal(case.output_shape).astype(np.float32)
    plan = plan_verification(problem_of(case))
    output, scratch = memory_of(plan)
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
