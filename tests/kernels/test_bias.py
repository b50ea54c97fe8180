"""BiasAdd and BiasAddBackward: every layout and rank, how they are cut, and what decides their bits."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np
import pytest

from kernels import plan
from tests.kernels.harness import Run, assert_same_bits, check, compute, problem_of
from tests.kernels.sizes import resize
from tests.problems import Case, Ints

pytestmark = pytest.mark.path

DTYPES = ("f32", "f16", "bf16")
FORMATS = ("NCX", "NXC")
BIAS_OPS = ("BiasAdd", "BiasAddBackward")


def bias_case(op: str, n: int, channels: int, spatial: Ints, *, data_format: str = "NCX", dtype: str = "f32") -> Case:
    """Return a call on images of this size."""
    return Case(
        op=op, dtype=dtype, n=n, src_channels=channels, dst_channels=channels, groups=channels, src_spatial=spatial,
        dst_spatial=spatial, kernel=(1,) * len(spatial), data_format=data_format, bias=op == "BiasAdd",
    )  # fmt: skip


@pytest.mark.parametrize("data_format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", BIAS_OPS)
def test_every_size(op: str, dtype: str, data_format: str) -> None:
    """Images of no axis to three, of any size, and no image at all: every integer result equals the oracle."""
    rng = np.random.default_rng(17)
    for spatial in ((), (1,), (9,), (8, 1), (1, 1), (5, 7), (33, 40), (2, 3, 5)):
        for n in (0, 1, 2, 7):
            channels = int(rng.choice([1, 2, 3, 8, 17, 64, 300]))
            case = bias_case(op, n, channels, spatial, data_format=data_format, dtype=dtype)
            for workers in (1, 3):
                check(replace(case, seed=int(rng.integers(1 << 16))), workers=workers)


@pytest.mark.parametrize("op", BIAS_OPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_bits_however_it_is_cut(op: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real numbers give the same bits for any number of workers, although the work is cut in several ways."""
    resize(monkeypatch, bias_chunk=3000, bias_piece=700)
    cut = set()
    for number, (n, channels, spatial) in enumerate(
        [(9, 5, (30, 41)), (1, 40, (31, 33)), (6, 3, (1, 1)), (1500, 9, ()), (2, 7, (90, 17)), (3, 1000, (5,))]
    ):
        for data_format in FORMATS:
            case = bias_case(op, n, channels, spatial, data_format=data_format, dtype=dtype)
            inputs = replace(case, seed=number).floats()
            one = compute(case, inputs)
            for workers in (2, 3, 8):
                chosen = plan(problem_of(case), workers=workers)
                cut |= {(chosen.stages, len(chosen.units) > 1)}
                assert_same_bits(compute(case, inputs, workers=workers), one, case)
            reference = compute(case, inputs, reference=True).astype(np.float64)
            error = np.abs(one.astype(np.float64) - reference)
            assert (error <= np.spacing(np.abs(one)).astype(np.float64) * 0.51).all()
    assert cut >= ({(1, True)} if op == "BiasAdd" else {(1, True), (2, True)})


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_a_sum_of_two_is_rounded_once(dtype: str) -> None:
    """The sum of any value and any bias, whatever their magnitudes, has the bits of the exact sum rounded once."""
    rng = np.random.default_rng(3)
    case = bias_case("BiasAdd", 40, 250, (), dtype=dtype)
    for _ in range(20):
        inputs = {}
        for name, shape in case.input_shapes.items():
            exponents = rng.integers(*{"f16": (-24, 16), "bf16": (-126, 127)}[dtype], shape)
            inputs[name] = case.rounded(rng.choice([-1, 1], shape) * np.ldexp(1 + rng.random(shape), exponents))
        assert_same_bits(compute(case, inputs), case.expected(inputs), case)


@pytest.mark.parametrize("data_format", FORMATS)
@pytest.mark.parametrize("op", BIAS_OPS)
@pytest.mark.parametrize("reference", [False, True])
def test_a_stop_is_looked_at(op: str, data_format: str, reference: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit asks whether to stop at least once in every piece or image, obeys, and can be run again."""
    resize(monkeypatch, bias_piece=2000)
    case = bias_case(op, 2, 9, (40, 50), data_format=data_format)
    run = Run(case, case.inputs(), reference=reference)
    for unit in run.plan.units:
        asked, images = run.asks(unit.index), 2 if op == "BiasAddBackward" else 1
        assert asked >= (images if reference else prod(case.src_shape) // len(run.plan.units) // 2000)
        assert all(run.stopped(unit.index, after) for after in range(asked))
        assert run.unit(unit.index)
    assert_same_bits(run.output, case.expected(case.inputs()), case)
