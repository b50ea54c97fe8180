"""The reference has the same bits on every target: each path that runs here gives the recorded checksums."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from hashlib import sha256
from math import fsum

import numpy as np
import pytest

from kernels import plan
from kernels.exact.unit import EXACT
from tests import naive
from tests.kernels.harness import Tensor, assert_same_bits, compute, problem_of
from tests.naive import round_to
from tests.problems import OPS, Case, random_case

DTYPES = ("f32", "f16", "bf16", "f64")
CALLS = 200

RECORDED = "a94af4c216e098bfac9efb365f9fba6fb84fccbaff29d79a48907127a80a341b"
"""sha256 of all results of `_calls`: another value breaks the promise of `options.reproducible`."""


def _random(rng: np.random.Generator, case: Case) -> dict[str, Tensor]:
    """Draw values of very different magnitudes, so that every rounding shows in the bits."""
    scales = np.array([-8, 0, 0, 0, 6])
    drawn = {
        name: rng.standard_normal(shape) * np.exp2(rng.choice(scales, shape))
        for name, shape in case.input_shapes.items()
    }
    return drawn if case.dtype == "f64" else {name: round_to(case.dtype, tensor) for name, tensor in drawn.items()}


def _calls() -> list[tuple[Case, dict[str, Tensor]]]:
    """Return calls of every operation in every dtype; some hold Inf or NaN."""
    rng, calls = np.random.default_rng(2911), []
    for number in range(CALLS):
        case = random_case(rng, macs=30_000)
        while case.op != OPS[number % len(OPS)]:
            case = random_case(rng, macs=30_000)
        case = replace(case, dtype=DTYPES[number // len(OPS) % len(DTYPES)])
        inputs = _random(rng, case)
        if number % 5 == 4:
            for tensor in inputs.values():
                if tensor.size:
                    tensor.reshape(-1)[int(rng.integers(tensor.size))] = rng.choice([np.inf, -np.inf, np.nan])
        calls.append((case, inputs))
    return calls


@pytest.mark.path
def test_the_recorded_bits() -> None:
    """200 calls of every operation and dtype have one checksum on every path."""
    digest = sha256()
    for case, inputs in _calls():
        digest.update(compute(case, inputs, reference=True).tobytes())
    assert digest.hexdigest() == RECORDED


@pytest.mark.path
def test_integers() -> None:
    """Sums of integers have the oracle's bits, and other sums are at most one unit in the last place from it."""
    rng = np.random.default_rng(2912)
    for number in range(300):
        case = replace(random_case(rng, macs=30_000), dtype=DTYPES[number % len(DTYPES)])
        inputs = case.inputs() if number % 2 else _random(rng, case)
        got, expected = compute(case, inputs, reference=True), case.expected(inputs)
        if number % 2 or case.dtype in ("f16", "bf16"):
            assert_same_bits(got, expected, case)
        elif case.dtype == "f32":
            np.testing.assert_array_max_ulp(got, expected, maxulp=1)


def test_any_number_of_workers() -> None:
    """Units for 1, 2, 3 and 7 workers give the same bits, though most of the calls are cut."""
    rng, cut = np.random.default_rng(2913), dict.fromkeys(OPS, 0)
    for number in range(64):
        op = OPS[number % len(OPS)]
        case = random_case(rng, macs=200_000)
        while case.op != op or case.macs < 1_000:
            case = random_case(rng, macs=200_000)
        case = replace(case, dtype=("f32", "f64")[number // len(OPS) % 2])
        inputs = _random(rng, case)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("kernels.exact.parts.UNIT_MACS", 50)
            patch.setattr("kernels.exact.parts.BLOCK", 3)
            patch.setattr("kernels.exact.gradient.SLAB", 600)
            plan.cache_clear()
            found = [compute(case, inputs, reference=True, workers=workers) for workers in (1, 2, 3, 7)]
            cut[op] += len(plan(problem_of(case), workers=7, reference=True).units) > 1
        plan.cache_clear()
        for other in [*found[1:], compute(case, inputs, reference=True)]:
            assert other.tobytes() == found[0].tobytes(), case
    assert all(count >= 5 for count in cut.values()), cut


def test_far_taps_and_large_weights() -> None:
    """Passes over single taps and some src channels give the bits of one pass over all."""
    rng = np.random.default_rng(2914)
    for number in range(120):
        case = replace(random_case(rng, macs=30_000), dtype=("f32", "f64")[number % 2])
        inputs = _random(rng, case)
        whole = compute(case, inputs, reference=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("kernels.exact.forward.MOST_PACKED", 40)
            patch.setattr("kernels.exact.forward.MOST_PANEL", 64 * 32)
            patch.setattr("kernels.exact.gradient.MOST_SLAB", 40)
            assert compute(case, inputs, reference=True).tobytes() == whole.tobytes(), case


@pytest.mark.path
@pytest.mark.parametrize("op", ["ConvolutionBackwardWeights", "Convolution", "BiasAddBackward"])
def test_sums_of_f64_that_cancel(op: str) -> None:
    """A sum of f64 is off by less than 2^-100 of the sum of magnitudes, before it is rounded once."""
    rng = np.random.default_rng(2915)
    for count in (5, 64, 1000, 5000):
        values, others = rng.standard_normal((2, count)) * np.exp2(rng.integers(-40, 40, (2, count)))
        values[count // 2 :], others[count // 2 :] = -values[count - count // 2 - 1 :: -1][: count - count // 2], 1.0
        others[: count // 2] = 1.0 + rng.standard_normal(count // 2) * 2.0**-45
        if op == "BiasAddBackward":
            case = Case(op=op, dtype="f64", src_channels=1, dst_channels=1, groups=1,
                        src_spatial=(count,), dst_spatial=(count,), kernel=(1,))  # fmt: skip
            inputs, others = {"diff_dst": values.reshape(1, 1, count)}, np.ones(count)
        elif op == "Convolution":
            case = Case(op=op, dtype="f64", src_channels=count, src_spatial=(1,), dst_spatial=(1,), kernel=(1,))
            inputs = {"src": values.reshape(1, count, 1), "weights": others.reshape(case.input_shapes["weights"])}
        else:
            case = Case(op=op, dtype="f64", src_spatial=(count,), dst_spatial=(count,), kernel=(1,))
            inputs = {"src": values.reshape(1, 1, count), "diff_dst": others.reshape(1, 1, count)}
        products = [Fraction(float(a)) * Fraction(float(b)) for a, b in zip(values, others, strict=True)]
        exact, magnitude = sum(products, Fraction(0)), sum(map(abs, products), Fraction(0))
        problem = problem_of(case)
        high, low = np.zeros(problem.output_shape), np.zeros(problem.output_shape)
        for unit in EXACT.units(problem, 1)[0]:
            assert EXACT.write(problem, unit, [*inputs.values()], (high, low), lambda: False)
        off = abs(Fraction(high.item()) + Fraction(low.item()) - exact)
        assert off <= magnitude / 2**100 + abs(exact) / 2**100
        assert compute(case, inputs, reference=True).item() == float(exact)
        if op == "BiasAddBackward":
            assert high.item() == fsum(values)
    assert naive.DTYPES["f64"] == np.float64
