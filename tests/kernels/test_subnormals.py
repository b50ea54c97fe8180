"""Numbers so small that products of bf16 pairs treat them as zeros: their sums are computed in f32 instead."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kernels import plan
from kernels.target import target
from tests import naive
from tests.kernels.accuracy import assert_nothing_is_lost, tolerance
from tests.kernels.harness import Tensor, assert_same_bits, compute, problem_of
from tests.kernels.paths import inside
from tests.kernels.workers import small_units
from tests.problems import Case

LAYER = Case(
    dtype="bf16", n=5, src_channels=40, dst_channels=48, src_spatial=(9, 12), dst_spatial=(9, 12), kernel=(3, 3),
    pads_begin=(1, 1), pads_end=(1, 1),
)  # fmt: skip

pytestmark = [
    pytest.mark.path,
    pytest.mark.skipif(inside() and not target().dots, reason="sums in f32 keep small numbers on every path"),
]
FORWARD = replace(LAYER, op="ConvTranspose", n=2, dst_channels=72, groups_axis="O", bias=True)
F32 = [
    replace(FORWARD, dtype="f32", op=op, groups_axis=axis)
    for op, axis in (("ConvTranspose", "O"), ("Convolution", "I"))
]
SCALES = [(-133, 0), (0, -133), (-133, 100), (-133, 133), (-126, 3), (-100, 20), (-90, -36), (-60, -60), (-64, -64)]
"""Powers of two for both tensors: below -126 bf16 has only subnormal numbers, down to -133."""


def _scaled(rng: np.random.Generator, shape: tuple[int, ...], scale: int) -> Tensor:
    """Return bf16 of both signs between 1/2 and 1 (subnormal ones with up to 7 bits), times a power of two."""
    values = rng.uniform(0.5, 1, shape) * rng.choice([-1, 1], shape)
    if scale < -126:
        values = rng.integers(1, 128, shape) * rng.choice([-1, 1], shape)
    return naive.round_to("bf16", np.ldexp(values, max(scale, -133)))


def _of_scales(case: Case, scales: tuple[int, int]) -> dict[str, Tensor]:
    rng = np.random.default_rng(case.seed)
    every = *scales, min(0, sum(scales))  # the bias is about as large as the products
    shapes = case.input_shapes.items()
    return {name: _scaled(rng, shape, min(scale, 126)) for (name, shape), scale in zip(shapes, every, strict=False)}


def _assert_on_dots(case: Case) -> None:
    """Check that the case runs on the path under test, if there is one."""
    if target().dots:
        assert plan(problem_of(case)).kernel.endswith(target().dots)


@pytest.mark.parametrize("case", [LAYER, LAYER.mirrored(), FORWARD], ids=lambda case: case.op)
@pytest.mark.parametrize("scales", SCALES)
def test_tensors(case: Case, scales: tuple[int, int]) -> None:
    """Tensors of subnormal or very small bf16 lose nothing that sums in f32 keep."""
    with small_units():
        _assert_on_dots(case)
        inputs = _of_scales(case, scales)
        assert_nothing_is_lost(case, inputs)
        exact = case.exact(inputs)
        result = compute(case, inputs).astype(np.float64)
        assert (result != 0).mean() > 0.9 * (np.abs(exact) > 2.0**-133).mean()


@pytest.mark.parametrize("scale", [0, 60])
def test_one_channel(scale: int) -> None:
    """A channel of subnormal numbers among ordinary ones is summed in f32, and the other channels' sums are kept."""
    with small_units():
        _assert_on_dots(LAYER)
        inputs = _of_scales(LAYER, (0, scale))
        inputs["src"][:, 20] = _scaled(np.random.default_rng(1), inputs["src"][:, 20].shape, -133)
        assert_nothing_is_lost(LAYER, inputs)
        assert (compute(LAYER, inputs)[:, 20] != 0).all()


@pytest.mark.parametrize("images", [slice(0, 1), slice(4, 5)], ids=["first", "last"])
def test_zeros_do_not_remove_a_small_sum(images: slice) -> None:
    """Sums that are themselves subnormal survive slabs in which one of their channels is all zeros."""
    with small_units(by_channels=True):
        _assert_on_dots(LAYER)
        inputs = _of_scales(LAYER, (-133, 0))
        kept = inputs["src"][images].copy()
        inputs["src"][:] = 0
        inputs["src"][images] = kept
        inputs["src"][:, 1] = 1
        assert_nothing_is_lost(LAYER, inputs)
        assert (compute(LAYER, inputs)[:, 0] != 0).mean() > 0.9


def test_what_may_be_lost() -> None:
    """Beside large numbers, small ones lose at most the documented 2**-40 of the channels' largest product."""
    with small_units():
        _assert_on_dots(LAYER)
        rng = np.random.default_rng(3)
        inputs = {
            name: naive.round_to("bf16", rng.standard_normal(shape) * np.exp2(rng.integers(-150, 1, shape)))
            for name, shape in LAYER.input_shapes.items()
        }
        exact = LAYER.exact(inputs)
        magnitude = LAYER.exact({name: np.abs(values.astype(np.float64)) for name, values in inputs.items()})
        wide, narrow = (np.abs(tensor.astype(np.float64)).max(axis=(0, 2, 3)) for tensor in inputs.values())
        promised = 2 * LAYER.sum_length * 2.0**-40 * (narrow[:, None] * wide)[:, :, None, None]
        error = np.abs(compute(LAYER, inputs).astype(np.float64) - exact)
        assert (error <= tolerance(LAYER, exact, magnitude) + promised).all()


@pytest.mark.parametrize("scales", [(-133, 0), (0, -133)])
def test_small_bias(scales: tuple[int, int]) -> None:
    """ConvTranspose keeps a subnormal bias, next to sums that are zero and next to small ones."""
    with small_units():
        _assert_on_dots(FORWARD)
        inputs = _of_scales(FORWARD, scales)
        inputs["bias"] = _scaled(np.random.default_rng(2), inputs["bias"].shape, -133)
        assert_nothing_is_lost(FORWARD, inputs)
        inputs["src"][:] = 0
        assert_same_bits(compute(FORWARD, inputs), FORWARD.expected(inputs), FORWARD)


@pytest.mark.parametrize(
    "scales", [(-149, 0), (-149, 60), (100, -149), (-139, 20), (-70, -60), (-118, 100), (-66, -60)]
)
@pytest.mark.parametrize("case", F32, ids=lambda case: case.op)
def test_f32(case: Case, scales: tuple[int, int]) -> None:
    """Sums of products that f32 holds are exact, however small the factors, the sums and the bias are."""
    rng = np.random.default_rng(6)
    with small_units():
        inputs = {
            name: np.ldexp(rng.integers(-3, 4, shape) * (1.0 + 2.0**-9 * (place == 0)), scale).astype(np.float32)
            for place, ((name, shape), scale) in enumerate(
                zip(case.input_shapes.items(), (*scales, max(-149, sum(scales))), strict=True)
            )
        }
        assert_same_bits(compute(case, inputs), case.expected(inputs), case)
