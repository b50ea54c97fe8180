"""Winograd weight gradients: exact integers, the same bits for any workers, and what is left to direct sums."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from kernels import plan
from kernels.gradient.tiles.schedule import schedule
from kernels.target import target
from kernels.winograd.rules import refusals
from tests.kernels.sizes import resize
from tests.kernels.winograd import as_floats, as_stored, bits, compute, draw

pytestmark = [pytest.mark.path, pytest.mark.skipif(not target().compiles, reason="nothing is compiled")]

NAME = "bwd_weights_winograd"


def test_integers_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small integers give the bits of direct sums, for 1, 2, 3 and 7 workers."""
    resize(monkeypatch, unit_macs=10_000, winograd_tiles=8, winograd_chunk_tiles=8)
    rng, shared, joined = np.random.default_rng(3), 0, 0
    for _ in range(30):
        problem = draw(rng)
        inputs = [as_stored(rng.integers(-2, 3, shape), problem.dtype) for shape in problem.input_shapes]
        expected = compute(replace(problem, algorithm="direct"), *inputs)
        for workers in (1, 2, 3, 7):
            chosen = plan(problem, workers=workers)
            assert chosen.kernel == NAME
            shared += len(chosen.units) > 1
            joined += chosen.stages > 1
            assert np.array_equal(bits(compute(problem, *inputs, workers=workers)), bits(expected)), problem
    assert shared > 20
    assert joined > 10


def test_bits_do_not_depend_on_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded sums have the same bits for 1, 2, 3 and 7 workers, and elements that are not finite are those of direct
    sums."""
    resize(monkeypatch, unit_macs=10_000, winograd_tiles=8, winograd_chunk_tiles=8)
    rng, spoiled = np.random.default_rng(4), 0
    for number in range(30):
        problem = draw(rng)
        values = [rng.standard_normal(shape) for shape in problem.input_shapes]
        for _ in range(number % 3):
            tensor = values[int(rng.integers(2))].reshape(-1)
            tensor[int(rng.integers(tensor.size))] = rng.choice([np.inf, -np.inf, np.nan])
        inputs = [as_stored(each, problem.dtype) for each in values]
        direct = compute(replace(problem, algorithm="direct"), *inputs)
        first = compute(problem, *inputs)
        finite = [np.isfinite(as_floats(each, problem.dtype)) for each in (first, direct)]
        assert np.array_equal(*finite), problem
        spoiled += not finite[0].all()
        for workers in (2, 3, 7):
            again = compute(problem, *inputs, workers=workers)
            assert np.array_equal(bits(again)[finite[0]], bits(first)[finite[0]]), problem
    assert spoiled > 9


@pytest.mark.parametrize("data_format", ["NCX", "NXC"])
def test_direct_sums_whose_lanes_are_groups(data_format: str) -> None:
    """What is left to direct sums is right where these have a group in each lane, and so other units."""
    lanes = target().lanes
    problem = draw(
        np.random.default_rng(5), op="ConvolutionBackwardWeights", dtype="f32", n=2, groups=lanes,
        src_channels=17 * lanes, dst_channels=17 * lanes, src_spatial=(8, 8), dst_spatial=(8, 8), kernel=(3, 3),
        strides=(1, 1), dilations=(1, 1), pads_begin=(1, 1), data_format=data_format,
    )  # fmt: skip
    direct = replace(problem, algorithm="direct")
    assert schedule(direct).lanes_are_groups
    rng = np.random.default_rng(6)
    large = [rng.integers(-3000, 3001, shape).astype(np.float32) for shape in problem.input_shapes]
    assert np.array_equal(compute(problem, *large, workers=3), compute(direct, *large))
    inputs = [rng.standard_normal(shape).astype(np.float32) for shape in problem.input_shapes]
    inputs[0].reshape(-1)[5] = np.inf
    result, expected = compute(problem, *inputs, workers=3), compute(direct, *inputs)
    finite = np.isfinite(expected)
    assert not finite.all()
    assert np.array_equal(bits(result)[~finite], bits(expected)[~finite])
    np.testing.assert_allclose(result[finite], expected[finite], rtol=0, atol=1e-3)


@pytest.mark.parametrize("groups_axis", ["I", "O"])
def test_boxes_of_units_are_disjoint(monkeypatch: pytest.MonkeyPatch, groups_axis: str) -> None:
    """Where sums are cut to be small, each element of the gradient belongs to one unit."""
    resize(monkeypatch, winograd_sums_bytes=1 << 14, winograd_shared_bytes=0)
    for op, sizes in product(("ConvolutionBackwardWeights", "ConvTransposeBackwardWeights"), ((40, 100), (100, 40))):
        src, dst = sizes
        problem = draw(
            np.random.default_rng(7),
            op=op,
            groups=2,
            src_channels=2 * src,
            dst_channels=2 * dst,
            groups_axis=groups_axis,
        )
        for workers in (1, 3):
            covered = np.zeros(problem.weights_shape, np.int64)
            units = plan(problem, workers=workers).units
            for unit in units:
                assert unit.offset is not None
                assert unit.shape is not None
                covered[tuple(slice(low, low + size) for low, size in zip(unit.offset, unit.shape, strict=True))] += 1
            assert len(units) > 2
            assert (covered == 1).all()


@pytest.mark.skipif(not target().fused, reason="rounds each product")
@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ({}, "ba7b6ba1e8bb"),
        ({"data_format": "NXC"}, "56fdeaa9e720"),
        ({"dtype": "f16"}, "002e5b847bf6"),
        ({"n": 40, "src_channels": 128, "dst_channels": 96}, "80308daceb90"),
    ],
)
def test_bits_do_not_depend_on_the_target(named: dict[str, Any], expected: str) -> None:
    """Rounded sums have the same bits on every target whose multiply-add rounds once."""
    chosen: dict[str, Any] = {
        "dtype": "f32", "op": "ConvolutionBackwardWeights", "n": 5, "groups": 1, "src_channels": 40, "dst_channels": 50,
        "src_spatial": (23, 19), "dst_spatial": (23, 19), "kernel": (3, 3), "strides": (1, 1), "dilations": (1, 1),
        "pads_begin": (1, 1), "data_format": "NCX", "weights_format": "OIX",
    }  # fmt: skip
    problem = draw(np.random.default_rng(0), **{**chosen, **named})
    rng = np.random.RandomState(7)  # its numbers never change
    inputs = [as_stored(rng.standard_normal(shape), problem.dtype) for shape in problem.input_shapes]
    assert hashlib.sha256(compute(problem, *inputs).tobytes()).hexdigest()[:12] == expected


@pytest.mark.parametrize("layout", ["NCX", "NXC"])
def test_a_transform_that_overflows(layout: str) -> None:
    """Finite sums stay finite where only the sums and differences of the transform overflow."""
    problem = draw(
        np.random.default_rng(0), op="ConvolutionBackwardWeights", dtype="f32", n=1, groups=1, src_channels=16,
        dst_channels=16, src_spatial=(8, 8), dst_spatial=(8, 8), kernel=(3, 3), strides=(1, 1), dilations=(1, 1),
        pads_begin=(1, 1), data_format=layout,
    )  # fmt: skip
    rng = np.random.default_rng(9)
    src, dst = (rng.choice([-1.0, 1.0], shape) for shape in problem.input_shapes)
    inputs = [as_stored(src * 3e38, "f32"), as_stored(dst * 1e-3, "f32")]
    direct = compute(replace(problem, algorithm="direct"), *inputs)
    assert np.isfinite(direct).all()
    assert np.array_equal(bits(compute(problem, *inputs)), bits(direct))


@pytest.mark.parametrize("beyond", [False, True])
def test_integers_are_exact_at_the_limit(beyond: bool) -> None:
    """All-integer inputs are exact at 16 T S G = 2**24, and beyond it, where they are summed directly."""
    problem = draw(
        np.random.default_rng(0), op="ConvolutionBackwardWeights", dtype="f32", n=4, groups=1, src_channels=32,
        dst_channels=32, src_spatial=(16, 16), dst_spatial=(16, 16), kernel=(3, 3), strides=(1, 1), dilations=(1, 1),
        pads_begin=(1, 1),
    )  # fmt: skip
    rng = np.random.default_rng(8)
    src, dst = (rng.integers(0, 2, shape) for shape in problem.input_shapes)
    inputs = [as_stored(src * 64, "f32"), as_stored(dst * (128 if beyond else 64), "f32")]
    direct = compute(replace(problem, algorithm="direct"), *inputs)
    assert np.array_equal(compute(problem, *inputs), direct)


def test_refusals_name_attribute_rule_and_numbers() -> None:
    """A problem that breaks a rule is refused with the attribute, the rule and both numbers; direct is the default."""
    problem = draw(np.random.default_rng(1), kernel=(3, 5), src_spatial=(8, 8), dst_spatial=(8, 8), strides=(2, 1),
                       dilations=(1, 1), pads_begin=(1, 1), groups=1, src_channels=8, dst_channels=64)  # fmt: skip
    assert [each.attribute for each in refusals(problem)] == ["kernel", "strides", "src_channels"]
    assert str(refusals(problem)[0]) == "winograd takes kernel of 3 in the last two axes; kernel[1] is 5"
    assert str(*refusals(replace(problem, dtype="f64"))) == "winograd takes f32, f16, bf16; dtype is f64"
    deep = replace(problem, kernel=(65, 3, 3), src_spatial=(65, 8, 8), dst_spatial=(1, 8, 8), strides=(1, 1, 1),
                   dilations=(1, 1, 1), pads_begin=(0, 1, 1), src_channels=16)  # fmt: skip
    assert "up to 64 in the first axis; kernel[0] is 65" in str(refusals(deep)[0])
    with pytest.raises(ValueError, match=r"strides\[0\] is 2"):
        plan(problem)
    chosen = plan(replace(problem, algorithm="auto"))
    assert chosen.kernel != NAME
    assert f"{NAME}: {'; '.join(map(str, refusals(problem)))}" in chosen.refusals


def test_auto_takes_winograd_where_it_is_estimated_to_be_faster() -> None:
    """`auto` takes Winograd for many channels and pixels and direct sums for few, and its refusal gives the estimate;
    `direct`, the default, never takes it, nor does `auto` for bf16 where its products are instructions."""
    many = draw(
        np.random.default_rng(0), op="ConvolutionBackwardWeights", dtype="f32", n=8, groups=1, src_channels=128,
        dst_channels=128, src_spatial=(28, 28), dst_spatial=(28, 28), kernel=(3, 3), strides=(1, 1), dilations=(1, 1),
        pads_begin=(1, 1), algorithm="auto",
    )  # fmt: skip
    few = replace(many, n=1, src_channels=512, dst_channels=512, src_spatial=(2, 2), dst_spatial=(2, 2))
    assert plan(many).kernel == NAME
    assert any("winograd pays below 80% of direct sums' cycles" in each for each in plan(few).refusals)
    assert (plan(replace(many, dtype="bf16")).kernel == NAME) == (not target().dots)
    for problem in (replace(many, algorithm="direct"), few, replace(many, dtype="f64")):
        assert plan(problem).kernel != NAME
