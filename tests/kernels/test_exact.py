"""Random problems on integers, where f32 sums are exact: equality with the oracle, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.harness import assert_same_bits, check, compute
from tests.kernels.paths import some
from tests.problems import WITH_WEIGHTS, Case, random_case

pytestmark = pytest.mark.path

BLOCKS, PER_BLOCK = some(24), 100


@pytest.mark.parametrize("block", range(BLOCKS))
def test_random_problems(block: int) -> None:
    """A hundred random problems of every kind match the oracle's bits, for an arbitrary number of workers.

    In half of the blocks they are made of small numbers: kernels, strides, pads and sizes that are equal, or nearly.
    """
    rng = np.random.default_rng([1, block])
    for _ in range(PER_BLOCK):
        check(random_case(rng, macs=40_000, small=block % 2 == 1), workers=int(rng.integers(1, 5)))


@pytest.mark.parametrize("block", range(some(4)))
def test_longer_random_problems(block: int) -> None:
    """Problems long enough for several chunks match the oracle's bits too."""
    rng = np.random.default_rng([2, block])
    for _ in range(15):
        check(random_case(rng, macs=4_000_000, longer=16), workers=int(rng.integers(1, 5)))


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("data_format", ["NCX", "NXC"])
def test_rounds_once_at_ties(dtype: str, data_format: str) -> None:
    """Sums exactly between two values of the dtype round to the even one, and sums next to a tie do not."""
    digits = {"f16": 11, "bf16": 8}[dtype]
    targets = np.arange(1 << digits, 1 << (digits + 2))  # every tie in two binades, and its neighbours
    case = Case(
        dtype=dtype, n=8, dst_channels=len(targets), src_spatial=(1,), dst_spatial=(1,), kernel=(1,),
        data_format=data_format,
    )  # fmt: skip
    parts = np.stack([(targets + image) // 8 for image in range(8)])
    assert parts.max() <= 1 << digits
    shape = case.dst_shape
    inputs = {"src": np.ones(case.src_shape), "diff_dst": parts.reshape(shape)}
    typed = {name: case.rounded(values) for name, values in inputs.items()}
    assert all((typed[name] == inputs[name]).all() for name in inputs)
    assert_same_bits(compute(case, typed), case.expected(typed), case)


@pytest.mark.parametrize("op", WITH_WEIGHTS)
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_rounds_at_every_magnitude(op: str, dtype: str) -> None:
    """Products of arbitrary values, from subnormal to overflowing results, are rounded as the oracle rounds."""
    rng = np.random.default_rng(5)
    src, dst, images = {"Weights": (250, 250, 1), "Data": (250, 1, 250)}.get(op.partition("Backward")[2], (1, 250, 250))
    case = Case(
        op=op, dtype=dtype, src_channels=src, dst_channels=dst, src_spatial=(1, 1), dst_spatial=(1, 1), kernel=(1, 1),
        n=images, weights_format="OIX",
    )  # fmt: skip
    # f32 holds every product of two f16 exactly, and of two bf16 unless it is subnormal in f32
    exponents = {"f16": (-24, 16), "bf16": (-62, 127)}[dtype]
    inputs = {}
    for name, shape in case.input_shapes.items():
        values = rng.choice([-1, 1], shape) * np.ldexp(1 + rng.random(shape), rng.integers(*exponents, shape))
        inputs[name] = case.rounded(values)
    expected = case.expected(inputs)
    assert np.isinf(expected.astype(np.float32)).any()
    assert_same_bits(compute(case, inputs), expected, case)


def test_f16_subnormals() -> None:
    """f16 results below the normal range are rounded to the subnormal grid, once."""
    rng = np.random.default_rng(3)
    for _ in range(60):
        case = random_case(rng, macs=20_000)
        if case.dtype != "f16" or case.bias:
            continue
        inputs = {name: case.rounded(values.astype(np.float64) * 2.0**-13) for name, values in case.inputs().items()}
        assert_same_bits(compute(case, inputs), case.expected(inputs), case)


def test_f32_of_extreme_magnitudes() -> None:
    """Products near the ends of the f32 range keep their bits: no hidden scaling, and nothing is flushed to zero."""
    rng = np.random.default_rng(4)
    for exponent in (-60, -74, 30, 45):
        for _ in range(15):
            case = random_case(rng, macs=20_000)
            if case.dtype != "f32" or case.bias:
                continue
            inputs = {
                name: case.rounded(values.astype(np.float64) * 2.0**exponent) for name, values in case.inputs().items()
            }
            assert_same_bits(compute(case, inputs), case.expected(inputs), case)
