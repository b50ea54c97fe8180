"""Forward operations on bf16 of few src channels, an odd number: words of a run hold values of two pixels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kernels import plan
from kernels.cache import CACHE
from kernels.forward.axes import AxisTable
from kernels.target import target
from tests.kernels.guard_pages import run as guarded
from tests.kernels.harness import compute, problem_of
from tests.kernels.sizes import resize
from tests.kernels.special import assert_propagates
from tests.kernels.workers import WORKERS
from tests.naive import round_to
from tests.problems import Case

pytestmark = [
    pytest.mark.path,
    pytest.mark.skipif(target().dots != "avx512bf16", reason="where dot products of bf16 are, or imitated"),
]


@pytest.fixture(autouse=True)
def gathered(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Let every dst pixel gather its taps, from lines of all lengths; note of each unit whether its words do this."""
    found: list[bool] = []

    def noted(*arguments: Any) -> bool:
        found.append(decide(*arguments))
        return found[-1]

    decide = AxisTable.compacts
    monkeypatch.setattr("kernels.forward.tiles._way", lambda _: "gather")
    monkeypatch.setattr(AxisTable, "compacts", noted)
    resize(monkeypatch, compact_positions=2)
    CACHE.forget(lambda _: True)
    yield found
    CACHE.forget(lambda _: True)


def _cases(seed: int, count: int) -> Iterator[Case]:
    """Draw Convolution and ConvTranspose of few channels, with all kinds of borders."""
    rng = np.random.default_rng([407, seed])

    def pick(*options: Any) -> Any:
        return options[int(rng.integers(len(options)))]

    for number in range(count):
        rank, transposed = pick(1, 2, 2, 3), bool(rng.integers(2))
        groups, strides = pick(1, 1, 1, 2), tuple(pick(1, 1, 2, 3) for _ in range(rank))
        kernel = (*(pick(1, 2, 3) for _ in range(rank - 1)), pick(2, 3, 3, 4, 5, 7))
        dilations = (*(pick(1, 2) for _ in range(rank - 1)), pick(1, 1, 1, 2))
        narrow = (*(int(rng.integers(1, 6)) for _ in range(rank - 1)), int(rng.integers(4, 70)))
        begin, end = (tuple(int(rng.integers(0, k)) for k in kernel) for _ in range(2))
        sizes = zip(narrow, strides, kernel, dilations, begin, end, strict=True)
        wide = tuple((x - 1) * s + (k - 1) * d + 1 - low - high for x, s, k, d, low, high in sizes)
        if min(wide) < 1:
            begin, end = (0,) * rank, (0,) * rank
            sizes = zip(narrow, strides, kernel, dilations, begin, end, strict=True)
            wide = tuple((x - 1) * s + (k - 1) * d + 1 for x, s, k, d, _, _ in sizes)
        yield Case(
            op="ConvTranspose" if transposed else "Convolution", dtype="bf16", n=int(rng.integers(1, 4)), groups=groups,
            src_channels=groups * pick(1, 1, 3, 3, 5), dst_channels=groups * int(rng.integers(1, 70)),
            src_spatial=narrow if transposed else wide, dst_spatial=wide if transposed else narrow, kernel=kernel,
            strides=strides, dilations=dilations, pads_begin=begin, pads_end=end, data_format=pick("NCX", "NXC"),
            weights_format=pick("OIX", "IOX", "XIO", "XOI"), bias=bool(rng.integers(2)), seed=407 * seed + number,
        )  # fmt: skip


@pytest.mark.parametrize("block", range(4))
def test_inf_and_nan_stay_where_they_belong(block: int, gathered: list[bool]) -> None:
    """No value of a neighbour, not even an Inf beside the last tap, gets into a sum; integers are exact."""
    rng = np.random.default_rng([408, block])
    for case in _cases(block, 30):
        assert_propagates(rng, case)
        guarded(case, at_end=bool(rng.integers(2)), workers=1)
    assert np.mean(gathered) > 0.3


def _rough(case: Case) -> dict[str, Any]:
    rng = np.random.default_rng(case.seed)
    drawn = {
        name: rng.standard_normal(shape) * np.exp2(rng.integers(-8, 9, shape))
        for name, shape in case.input_shapes.items()
    }
    return {name: round_to("bf16", values) for name, values in drawn.items()}


@pytest.mark.parametrize("block", range(4))
def test_bits_depend_on_no_cut_and_no_neighbour(
    block: int, gathered: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many small units, one with a NaN beside them that sends a band to ordinary instructions: all give one result."""
    cut = 0
    for case in _cases(10 + block, 20):
        inputs = _rough(case)
        whole = compute(case, inputs)
        with monkeypatch.context() as patch:
            resize(patch, unit_macs=2000, more_macs=4000, band_bytes=2048, band_pixels=64)
            CACHE.forget(lambda _: True)
            cut += len(plan(problem_of(case), workers=WORKERS[-1]).units) > 1
            assert {compute(case, inputs, workers=workers).tobytes() for workers in WORKERS} == {whole.tobytes()}
        CACHE.forget(lambda _: True)
        spoiled = {name: values.copy() for name, values in inputs.items()}
        spoiled["src"][-1] = np.nan
        if case.n > 1:
            assert compute(case, spoiled)[:-1].tobytes() == whole[:-1].tobytes(), case
        spoiled["src"][-1] = inputs["src"][-1] * 2.0**-125  # subnormal numbers, which dot products lose
        if case.n > 1:
            assert compute(case, spoiled)[:-1].tobytes() == whole[:-1].tobytes(), case
    assert cut > 5
    assert np.mean(gathered) > 0.3


def test_a_negative_zero_as_bias_is_kept() -> None:
    """Zeros beside a word's own value change no sign, whatever else is in the call."""
    case = Case(
        op="Convolution", dtype="bf16", n=2, src_channels=1, dst_channels=17, src_spatial=(5, 40), dst_spatial=(3, 38),
        kernel=(3, 3), bias=True,
    )  # fmt: skip
    inputs = _rough(case)
    inputs["bias"], inputs["weights"] = -np.zeros_like(inputs["bias"]), np.zeros_like(inputs["weights"])
    inputs["src"] = -abs(inputs["src"])
    whole, spoiled = compute(case, inputs), inputs["src"].copy()
    spoiled[1] = np.inf
    assert compute(case, {**inputs, "src": spoiled})[:1].tobytes() == whole[:1].tobytes()
