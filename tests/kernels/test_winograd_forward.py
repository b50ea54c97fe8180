"""Winograd forward operations: exact integers, the same bits for any workers, and what is left to direct sums."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kernels import ConvProblem, plan
from kernels.forward.winograd import unit
from kernels.target import target
from kernels.winograd.rules import refusals
from tests.kernels.sizes import resize
from tests.kernels.winograd import as_floats, as_stored, bits, compute, draw

pytestmark = [pytest.mark.path, pytest.mark.skipif(not target().compiles, reason="nothing is compiled")]

NAME = "forward_winograd"
OPS = ("Convolution", "ConvTranspose")


def _draw(rng: np.random.Generator, **named: Any) -> ConvProblem:
    chosen: dict[str, Any] = {"op": OPS[int(rng.integers(2))], "bias": bool(rng.integers(2))}
    return draw(rng, **{**chosen, **named})


def _plain(**named: Any) -> ConvProblem:
    """Return a problem of 40 to 50 channels and 23 x 19 pixels, or what is `named`."""
    chosen: dict[str, Any] = {
        "dtype": "f32", "op": "Convolution", "n": 2, "groups": 1, "src_channels": 40, "dst_channels": 50,
        "src_spatial": (23, 19), "dst_spatial": (23, 19), "kernel": (3, 3), "strides": (1, 1), "dilations": (1, 1),
        "pads_begin": (1, 1), "data_format": "NCX", "weights_format": "OIX", "bias": True,
    }  # fmt: skip
    return _draw(np.random.default_rng(0), **{**chosen, **named})


def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make units and slabs small, so that there are many."""
    resize(monkeypatch, unit_macs=10_000, winograd_slab_tiles=6, winograd_unit_weights=1000, band_batch_macs=1)


def test_integers_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small integers give the bits of direct sums, for 1, 2, 3 and 7 workers."""
    _small(monkeypatch)
    rng, several = np.random.default_rng(3), 0
    for _ in range(40):
        problem = _draw(rng)
        inputs = [as_stored(rng.integers(-2, 3, shape), problem.dtype) for shape in problem.input_shapes]
        expected = compute(replace(problem, algorithm="direct"), *inputs)
        for workers in (1, 2, 3, 7):
            chosen = plan(problem, workers=workers)
            assert chosen.kernel == NAME
            several += sum(each.stage for each in chosen.units) > 1
            found = compute(problem, *inputs, workers=workers)
            assert np.array_equal(bits(found), bits(expected)), problem
    assert several > 80


def test_bits_do_not_depend_on_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded sums have the same bits for 1, 2, 3 and 7 workers, for slabs of any size and units in any order."""
    rng, cut = np.random.default_rng(4), set()
    for _ in range(20):
        problem = _draw(rng)
        inputs = [as_stored(rng.standard_normal(shape), problem.dtype) for shape in problem.input_shapes]
        first = compute(problem, *inputs)
        with monkeypatch.context() as smaller:
            _small(smaller)
            for workers in (1, 2, 3, 7):
                units = plan(problem, workers=workers).units
                cut |= {i // 2 for u in units if u.stage for v in units if v.stage for i in range(0, 12, 2)
                        if u.part[i] != v.part[i]}  # fmt: skip
                again = compute(problem, *inputs, workers=workers, reverse=workers > 2)
                assert np.array_equal(bits(again), bits(first)), problem
    assert cut >= {0, 1, 2, 4}  # images, groups, dst channels, lines


def test_inf_and_nan_are_where_direct_sums_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elements that are not finite have the bits of direct sums, others have not changed."""
    _small(monkeypatch)
    rng, spoiled, kept = np.random.default_rng(5), 0, 0
    for _ in range(40):
        problem = _draw(rng)
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
        assert np.array_equal(np.isfinite(found), finite), problem
        assert np.array_equal(found, again, equal_nan=True), problem
        assert np.array_equal(found[~finite], direct[~finite], equal_nan=True), problem
        spoiled += not finite.all()
        kept += bool((found == plain)[finite].any())
    assert spoiled > 30
    assert kept > 30


@pytest.mark.skipif(not target().fused, reason="rounds each product")
@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ({}, "90f9dee416e3"),
        ({"data_format": "NXC"}, "98819ab359bb"),
        ({"op": "ConvTranspose"}, "b374506df225"),
        ({"dtype": "f16"}, "b1cddd18af15"),
        ({"n": 20, "src_channels": 192, "dst_channels": 96}, "60a8cf28910e"),
    ],
    ids=["NCX", "NXC", "transposed", "f16", "large"],
)
def test_bits_do_not_depend_on_the_target(named: dict[str, Any], expected: str) -> None:
    """Rounded sums have the same bits on every target whose multiply-add rounds once."""
    problem = _plain(**named)
    rng = np.random.RandomState(7)  # its numbers never change
    inputs = [as_stored(rng.standard_normal(shape), problem.dtype) for shape in problem.input_shapes]
    assert hashlib.sha256(compute(problem, *inputs).tobytes()).hexdigest()[:12] == expected


@pytest.mark.parametrize("layout", ["NCX", "NXC"])
def test_a_transform_that_overflows(layout: str) -> None:
    """Finite sums stay finite where only the sums and differences of the transform overflow."""
    problem = _plain(data_format=layout, bias=False)
    rng = np.random.default_rng(9)
    src, weights = (rng.choice([-1.0, 1.0], shape) for shape in problem.input_shapes)
    inputs = [as_stored(src * 3e38, "f32"), as_stored(weights * 1e-3, "f32")]
    direct = compute(replace(problem, algorithm="direct"), *inputs)
    found = compute(problem, *inputs)
    assert np.isfinite(found).all()
    assert np.isfinite(direct).all()
    assert np.allclose(found, direct, rtol=1e-5, atol=1e32)
    assert (found == direct).mean() > 0.8


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("beyond", [False, True])
def test_integers_are_exact_at_the_limit(monkeypatch: pytest.MonkeyPatch, dtype: str, beyond: bool) -> None:
    """All-integer inputs are exact at 36 C S G = 2**24; an image beyond that is summed directly, and no other."""
    problem = _plain(src_channels=64, dst_channels=32, bias=False, dtype=dtype)
    largest = 2**24 // (36 * 64) // 64
    rng = np.random.default_rng(8)
    src, weights = (rng.integers(0, 2, shape) for shape in problem.input_shapes)
    src[0, :, :4, :4], weights[0] = 1, 1
    src[0], src[1] = 64 * src[0], 2 * src[1]
    inputs = [as_stored(src, dtype), as_stored(weights * (largest + beyond), dtype)]
    decided, exact = [], unit._exact

    def decide(*given: Any) -> Any:
        decided.append(exact(*given))
        return decided[-1]

    monkeypatch.setattr(unit, "_exact", decide)
    direct = compute(replace(problem, algorithm="direct"), *inputs)
    assert np.array_equal(bits(compute(problem, *inputs)), bits(direct))
    assert [each.tolist() for each in decided] == [[not beyond, True]]


def test_refusals_name_attribute_rule_and_numbers() -> None:
    """A problem that breaks a rule is refused with the attribute, the rule and both numbers; direct is the default."""
    problem = _plain(kernel=(3, 5), strides=(2, 1), src_channels=8)
    assert [each.attribute for each in refusals(problem)] == ["kernel", "strides", "src_channels"]
    assert str(refusals(problem)[0]) == "winograd takes kernel of 3 in the last two axes; kernel[1] is 5"
    with pytest.raises(ValueError, match=r"strides\[0\] is 2"):
        plan(problem)
    chosen = plan(replace(problem, algorithm="auto"))
    assert chosen.kernel != NAME
    assert f"{NAME}: {'; '.join(map(str, refusals(problem)))}" in chosen.refusals


def test_auto_takes_winograd_where_it_is_estimated_to_be_faster() -> None:
    """`auto` takes Winograd for many channels and pixels and direct sums for few, and its refusal gives the estimate;
    `direct`, the default, never takes it, nor does `auto` for bf16 where its products are instructions."""
    many = _plain(n=8, src_channels=128, dst_channels=128, src_spatial=(28, 28), dst_spatial=(28, 28), algorithm="auto")
    few = replace(many, n=1, src_channels=512, dst_channels=512, src_spatial=(2, 2), dst_spatial=(2, 2))
    assert plan(many).kernel == NAME
    assert any("winograd pays below 80% of direct sums' cycles" in each for each in plan(few).refusals)
    assert (plan(replace(many, dtype="bf16")).kernel == NAME) == (not target().dots)
    large = replace(many, src_channels=2048, dst_channels=2048)
    assert any("bytes of transformed weights, and they have 268435456" in each for each in plan(large).refusals)
    for problem in (replace(many, algorithm="direct"), few, replace(many, dtype="f64")):
        assert plan(problem).kernel != NAME
