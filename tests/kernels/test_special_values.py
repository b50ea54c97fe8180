"""Inf and NaN spread as far as the formula says, and no further: padding is never multiplied."""

from __future__ import annotations

import numpy as np
import pytest

from kernels import plan
from kernels.target import target
from tests.kernels.accuracy import tolerance
from tests.kernels.bits import DTYPES
from tests.kernels.harness import Tensor, assert_same_bits, compute, problem_of
from tests.kernels.paths import some
from tests.kernels.special import SPECIAL, assert_propagates
from tests.kernels.workers import large_case, rough, small_units
from tests.problems import Case, random_case


@pytest.mark.path
@pytest.mark.parametrize("block", range(some(4)))
def test_random_problems(block: int) -> None:
    """A few Inf and NaN among integers give Inf, NaN and exact integers exactly where the oracle has them."""
    rng = np.random.default_rng([6, block])
    for _ in range(75):
        assert_propagates(rng, random_case(rng, macs=40_000))


@pytest.mark.parametrize(
    ("dtype", "data_format", "channels", "special"),
    [  # every triple of the others with one of the special values; every pair occurs
        (dtype, data_format, channels, SPECIAL[(i + j + k) % 3])
        for i, dtype in enumerate(("f32", "f16", "bf16"))
        for j, data_format in enumerate(("NCX", "NXC"))
        for k, channels in enumerate((1, 3, 8, 16, 33))
    ],
)
def test_every_border_pixel(dtype: str, data_format: str, channels: int, special: float) -> None:
    """A special value in any pixel of a padded image affects only the taps that read it."""
    case = Case(
        dtype=dtype, src_channels=channels, dst_channels=8, src_spatial=(4, 5), dst_spatial=(2, 5), kernel=(3, 3),
        strides=(2, 1), pads_begin=(1, 1), pads_end=(0, 1), data_format=data_format,
    )  # fmt: skip
    clean = case.inputs()
    pixels = case.src_shape[2:] if data_format == "NCX" else case.src_shape[1:3]
    for y, x in np.ndindex(*pixels):
        inputs = {name: values.copy() for name, values in clean.items()}
        inputs["src"][(0, 0, y, x) if data_format == "NCX" else (0, y, x, 0)] = special
        assert_same_bits(compute(case, inputs), case.expected(inputs), case)


PADDED = "conv_transpose_amx", "convolution_amx"
"""Forward operations that multiply zeros, as all weight gradients on products of bf16 pairs do."""


def _spoil_channel(rng: np.random.Generator, case: Case, inputs: dict[str, Tensor]) -> Tensor:
    """Put a special value into one channel; return the mask of the results that do not depend on this channel."""
    name = str(rng.choice([name for name in inputs if name != "src"] if case.forward else list(inputs)))
    tensor = inputs[name]
    if case.forward:
        tensor.reshape(-1)[rng.integers(tensor.size)] = rng.choice(SPECIAL)
        touched = ~np.isfinite(case.exact(inputs))
        channel = 1 if case.data_format == "NCX" else touched.ndim - 1
        touched |= touched.any(axis=tuple(axis for axis in range(touched.ndim) if axis != channel), keepdims=True)
        return ~touched
    channels = np.moveaxis(tensor, 1 if case.data_format == "NCX" else -1, 0)
    number = int(rng.integers(len(channels)))
    kept = channels[number].copy()
    channels[number] = np.nan
    apart = np.isfinite(case.exact(inputs))
    channels[number] = kept
    first = [int(rng.choice([0, size - 1, rng.integers(size)])) for size in kept.shape]  # often in a corner
    channels[number][tuple(first)] = rng.choice(SPECIAL)
    return apart


@pytest.mark.path
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("forward", [False, True], ids=["gradients", "ConvTranspose"])
def test_a_channel_changes_no_other(dtype: str, forward: bool) -> None:
    """Inf or NaN in one channel leaves the bits of all sums without it unchanged, even in its block and unit.

    Where zeros multiply, these sums may be formed in f32 instead.
    """
    rng = np.random.default_rng(8)
    count = some(18)
    taken = 0
    for _ in range(count):
        with small_units():
            case = large_case(rng, dtype, forward=forward)
            inputs = rough(case)
            before, exact = compute(case, inputs), case.exact(inputs)
            allowed = tolerance(case, exact, case.exact({name: np.abs(values) for name, values in inputs.items()}))
            pads = plan(problem_of(case)).kernel in (f"bwd_weights_{target().dots}", *PADDED)
            apart = _spoil_channel(rng, case, inputs)
            with np.errstate(invalid="ignore"):
                expected = case.expected(inputs)
            for workers in (1, 3):
                after = compute(case, inputs, workers=workers)
                if pads:
                    assert (np.abs(after - exact) <= allowed)[apart].all(), case
                else:
                    assert after[apart].tobytes() == before[apart].tobytes(), case
                assert np.array_equal(np.isnan(after), np.isnan(expected)), case
            taken += plan(problem_of(case)).kernel.endswith(target().dots or "tiles")
    if dtype in DTYPES and (target().dots == "amx" or not forward):
        assert taken > 0.75 * count


@pytest.mark.path
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("data_format", ["NCX", "NXC"])
@pytest.mark.parametrize("name", ["src", "diff_dst"])
def test_a_group_changes_no_other(dtype: str, data_format: str, name: str) -> None:
    """The groups of a depthwise gradient are lanes of a vector: Inf at the border of one does not change the others."""
    case = Case(
        dtype=dtype, n=4, groups=20, src_channels=20, dst_channels=20, src_spatial=(28, 28), dst_spatial=(28, 28),
        kernel=(3, 3), pads_begin=(1, 1), pads_end=(1, 1), data_format=data_format,
    )  # fmt: skip
    inputs = case.floats()
    before = compute(case, inputs)
    inputs[name][(1, 3, 0, 0) if data_format == "NCX" else (1, 0, 0, 3)] = np.inf
    after = compute(case, inputs)
    for group in {*range(20)} - {3}:
        assert after[group].tobytes() == before[group].tobytes()
    with np.errstate(invalid="ignore"):
        assert np.array_equal(np.isnan(after), np.isnan(case.expected(inputs)))
