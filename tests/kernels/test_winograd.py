"""Winograd's algorithm: exact integers, the same bits for any workers, and when it is chosen."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from importlib import import_module
from itertools import product
from typing import Any

import numpy as np
import pytest

from kernels import ConvProblem, plan, run_unit
from kernels.target import target
from kernels.winograd.rules import refusals
from tests.kernels.harness import assert_partition
from tests.kernels.paths import some
from tests.kernels.sizes import resize
from tests.kernels.winograd import as_floats, as_stored, bits, compute, draw

pytestmark = [pytest.mark.path, pytest.mark.skipif(not target().compiles, reason="nothing is compiled")]

NAMES = {True: "forward_winograd", False: "bwd_weights_winograd"}
OPS = {True: ("Convolution", "ConvTranspose"), False: ("ConvolutionBackwardWeights", "ConvTransposeBackwardWeights")}
each_way = pytest.mark.parametrize("forward", [False, True], ids=["gradients", "forward"])
WORKERS = (1, 2, 3, 7)


def _draw(rng: np.random.Generator, forward: bool, **named: Any) -> ConvProblem:
    chosen: dict[str, Any] = {"op": OPS[forward][int(rng.integers(2))], "bias": forward and bool(rng.integers(2))}
    return draw(rng, **{**chosen, **named})


def _plain(forward: bool = False, **named: Any) -> ConvProblem:
    """Return a problem of 40 to 50 channels and 23 x 19 pixels, or what is `named`."""
    chosen: dict[str, Any] = {
        "dtype": "f32", "op": OPS[forward][0], "n": 2 if forward else 5, "groups": 1, "src_channels": 40,
        "dst_channels": 50, "src_spatial": (23, 19), "dst_spatial": (23, 19), "kernel": (3, 3), "strides": (1, 1),
        "dilations": (1, 1), "pads_begin": (1, 1), "data_format": "NCX", "weights_format": "OIX", "bias": forward,
    }  # fmt: skip
    return draw(np.random.default_rng(0), **{**chosen, **named})


def _small(monkeypatch: pytest.MonkeyPatch, forward: bool) -> None:
    """Make units and slabs small, so that there are many."""
    gradients = {"winograd_tiles": 6}
    others = {"winograd_slab_tiles": 6, "winograd_unit_weights": 1000, "batch_macs": 1}
    resize(monkeypatch, unit_macs=10_000, **(others if forward else gradients))


@each_way
def test_integers_are_exact(monkeypatch: pytest.MonkeyPatch, forward: bool) -> None:
    """Small integers give the bits of direct sums, for 1, 2, 3 and 7 workers."""
    _small(monkeypatch, forward)
    rng, count, several, joined = np.random.default_rng(3), some(30), 0, 0
    for _ in range(count):
        problem = _draw(rng, forward)
        inputs = [as_stored(rng.integers(-2, 3, shape), problem.dtype) for shape in problem.input_shapes]
        expected = compute(replace(problem, algorithm="direct"), *inputs)
        for workers in WORKERS:
            chosen = plan(problem, workers=workers)
            assert chosen.kernel == NAMES[forward]
            several += len([each for each in chosen.units if each.stage or not forward]) > 1
            joined += chosen.stages > 1
            assert np.array_equal(bits(compute(problem, *inputs, workers=workers)), bits(expected)), problem
    assert several > 0.6 * count
    assert joined > 0.3 * count


@each_way
def test_bits_do_not_depend_on_workers(monkeypatch: pytest.MonkeyPatch, forward: bool) -> None:
    """Rounded sums have the same bits for 1, 2, 3 and 7 workers, for slabs of any size and units in any order.

    Gradients of other sizes are cut into other chunks, so they are small from the beginning.
    """
    if not forward:
        _small(monkeypatch, forward)
    rng, cut = np.random.default_rng(4), set()
    for _ in range(some(20)):
        problem = _draw(rng, forward)
        inputs = [as_stored(rng.standard_normal(shape), problem.dtype) for shape in problem.input_shapes]
        first = compute(problem, *inputs)
        with monkeypatch.context() as smaller:
            _small(smaller, forward)
            for workers in WORKERS:
                units = plan(problem, workers=workers).units
                cut |= {i // 2 for u in units if u.stage for v in units if v.stage for i in range(0, 12, 2)
                        if forward and u.part[i] != v.part[i]}  # fmt: skip
                again = compute(problem, *inputs, workers=workers, reverse=workers > 2)
                assert np.array_equal(bits(again), bits(first)), problem
    assert cut >= ({0, 1, 2, 4} if forward else set())  # images, groups, dst channels, lines


@each_way
def test_inf_and_nan_arrive(monkeypatch: pytest.MonkeyPatch, forward: bool) -> None:
    """Elements that are not finite in direct sums are not finite here either, and most others have not changed."""
    _small(monkeypatch, forward)
    rng, count, spoiled, kept = np.random.default_rng(5), some(30), 0, 0
    for _ in range(count):
        problem = _draw(rng, forward)
        values = [rng.standard_normal(shape) for shape in problem.input_shapes]
        plain = compute(problem, *(as_stored(each, problem.dtype) for each in values))
        for _ in range(int(rng.integers(1, 3))):
            tensor = values[int(rng.integers(len(values)))].reshape(-1)
            tensor[int(rng.integers(tensor.size))] = rng.choice([np.inf, -np.inf, np.nan])
        inputs = [as_stored(each, problem.dtype) for each in values]
        direct = compute(replace(problem, algorithm="direct"), *inputs)
        several = compute(problem, *inputs), compute(problem, *inputs, workers=3)
        found, again, direct, plain = (as_floats(each, problem.dtype) for each in (*several, direct, plain))
        finite = np.isfinite(direct)
        assert not np.isfinite(found[~finite]).any(), problem
        assert np.array_equal(found, again, equal_nan=True), problem
        spoiled += not finite.all()
        kept += bool((found == plain)[finite].any())
    assert spoiled > 0.6 * count
    assert kept > 0.6 * count or not forward


@each_way
def test_inf_and_nan_take_no_other_way(monkeypatch: pytest.MonkeyPatch, forward: bool) -> None:
    """Where values are not finite, each unit computes its own part all the same, in as many calls."""
    module = import_module("kernels.forward.winograd" if forward else "kernels.gradient.winograd.unit")
    add_products, calls = module.add_products, list[int]()
    _small(monkeypatch, forward)

    def counted(*given: Any) -> None:
        calls.append(1)
        add_products(*given)

    monkeypatch.setattr(module, "add_products", counted)
    problem, counts = _plain(forward, n=3), []
    for value in (1.0, np.inf, np.nan):
        inputs = [as_stored(np.full(shape, value), problem.dtype) for shape in problem.input_shapes]
        compute(problem, *inputs, workers=3)
        counts.append(len(calls))
    assert counts[0] > 3
    assert counts == [counts[0], 2 * counts[0], 3 * counts[0]]


@pytest.mark.parametrize("groups_axis", ["I", "O"])
def test_boxes_of_units_are_disjoint(monkeypatch: pytest.MonkeyPatch, groups_axis: str) -> None:
    """Where sums are cut to be small, each element of the gradient belongs to one unit."""
    resize(monkeypatch, unit_sums_bytes=1 << 14, shared_sums_bytes=1)
    for op, (src, dst), workers in product(OPS[False], ((40, 100), (100, 40)), (1, 3)):
        channels = {"groups": 2, "src_channels": 2 * src, "dst_channels": 2 * dst}
        problem = draw(np.random.default_rng(7), op=op, groups_axis=groups_axis, **channels)
        chosen = plan(problem, workers=workers)
        assert_partition(chosen)
        assert len(chosen.units) > 2
        assert all(each.offset is not None for each in chosen.units)


@pytest.mark.skipif(not target().fused, reason="rounds each product")
@pytest.mark.parametrize(
    ("forward", "named", "expected"),
    [
        (False, {}, "ba7b6ba1e8bb"),
        (False, {"data_format": "NXC"}, "56fdeaa9e720"),
        (False, {"dtype": "f16"}, "002e5b847bf6"),
        (False, {"n": 40, "src_channels": 128, "dst_channels": 96}, "80308daceb90"),
        (True, {}, "90f9dee416e3"),
        (True, {"data_format": "NXC"}, "98819ab359bb"),
        (True, {"op": "ConvTranspose"}, "b374506df225"),
        (True, {"dtype": "f16"}, "b1cddd18af15"),
        (True, {"n": 20, "src_channels": 192, "dst_channels": 96}, "60a8cf28910e"),
    ],
)
def test_bits_do_not_depend_on_the_target(forward: bool, named: dict[str, Any], expected: str) -> None:
    """Rounded sums have the same bits on every target whose multiply-add rounds once."""
    problem = _plain(forward, **named)
    rng = np.random.RandomState(7)  # its numbers never change
    inputs = [as_stored(rng.standard_normal(shape), problem.dtype) for shape in problem.input_shapes]
    assert hashlib.sha256(compute(problem, *inputs).tobytes()).hexdigest()[:12] == expected


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_integers_are_exact_at_the_limit(dtype: str) -> None:
    """All-integer inputs are exact at 16 T S G = 2**24, and forward at 36 C S G = 2**24."""
    rng = np.random.default_rng(8)
    problem = _plain(n=4, src_channels=32, dst_channels=32, src_spatial=(16, 16), dst_spatial=(16, 16), dtype=dtype)
    src, dst = (64 * rng.integers(0, 2, shape) for shape in problem.input_shapes)
    inputs = [as_stored(src, dtype), as_stored(dst, dtype)]
    assert np.array_equal(bits(compute(problem, *inputs)), bits(compute(replace(problem, algorithm="direct"), *inputs)))
    problem = _plain(True, src_channels=64, dst_channels=32, bias=False, dtype=dtype)
    src, weights = (rng.integers(0, 2, shape) for shape in problem.input_shapes)
    src[0, :, :4, :4], weights[0] = 1, 1
    inputs = [as_stored(64 * src, dtype), as_stored(2**24 // (36 * 64) // 64 * weights, dtype)]
    assert np.array_equal(bits(compute(problem, *inputs)), bits(compute(replace(problem, algorithm="direct"), *inputs)))


def test_transforming_weights_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit that transforms many weights asks whether to stop several times, and stops."""
    resize(monkeypatch, unit_sums_bytes=8 << 20)
    problem = _plain(True, n=1, src_channels=512, dst_channels=512, src_spatial=(2, 2), dst_spatial=(2, 2), bias=False)
    chosen, asked = plan(problem), 0
    inputs = [np.zeros(shape, np.float32) for shape in problem.input_shapes]
    output, scratch = np.empty(problem.output_shape, np.float32), np.empty(chosen.scratch_bytes, np.uint8)

    def stop() -> bool:
        nonlocal asked
        asked += 1
        return asked == 3

    assert not run_unit(chosen, chosen.units[0], inputs, output, scratch, stop)
    assert asked == 3


@each_way
def test_refusals_name_attribute_rule_and_numbers(forward: bool) -> None:
    """A problem that breaks a rule is refused with the attribute, the rule and both numbers; direct is the default."""
    problem = _plain(forward, kernel=(3, 5), strides=(2, 1), src_channels=8)
    assert [each.attribute for each in refusals(problem)] == ["kernel", "strides", "src_channels"]
    assert str(refusals(problem)[0]) == "winograd takes kernel of 3 in the last two axes; kernel[1] is 5"
    with pytest.raises(ValueError, match=r"strides\[0\] is 2"):
        plan(problem)
    chosen = plan(replace(problem, algorithm="auto"))
    assert chosen.kernel != NAMES[forward]
    assert f"{NAMES[forward]}: {'; '.join(map(str, refusals(problem)))}" in chosen.refusals
    if not forward:
        assert "dtype is f64" in str(refusals(replace(problem, dtype="f64"))[0])
        deep = replace(problem, kernel=(65, 3, 3), src_spatial=(65, 8, 8), dst_spatial=(1, 8, 8), strides=(1, 1, 1),
                       dilations=(1, 1, 1), pads_begin=(0, 1, 1), src_channels=16)  # fmt: skip
        assert "up to 64 in the first axis; kernel[0] is 65" in str(refusals(deep)[0])


@each_way
def test_auto_takes_winograd_where_it_is_estimated_to_be_faster(forward: bool) -> None:
    """`auto` takes Winograd for many channels and pixels and direct sums for few, and its refusal gives the estimate;
    `direct`, the default, never takes it, nor does `auto` for bf16 where its products are instructions."""
    many = _plain(forward, n=8, src_channels=128, dst_channels=128, src_spatial=(28, 28), dst_spatial=(28, 28),
                  algorithm="auto")  # fmt: skip
    few = replace(many, n=1, src_channels=512, dst_channels=512, src_spatial=(2, 2), dst_spatial=(2, 2))
    assert plan(many).kernel == NAMES[forward]
    assert any("winograd pays below 80% of direct sums' cycles" in each for each in plan(few).refusals)
    assert (plan(replace(many, dtype="bf16")).kernel == NAMES[forward]) == (not target().dots)
    if forward:
        large = replace(many, src_channels=2048, dst_channels=2048)
        assert any("bytes of transformed weights, and they have 268435456" in each for each in plan(large).refusals)
    for problem in (replace(many, algorithm="direct"), few, replace(many, dtype="f64")):
        assert plan(problem).kernel != NAMES[forward]
