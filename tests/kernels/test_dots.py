"""Products of bf16 pairs: the choice of instructions, and data that must not meet zeros."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from inspect import unwrap
from typing import Any

import numpy as np
import pytest

from kernels import ConvProblem, explain, plan
from kernels.cache import CACHE
from kernels.gradient.dots import unit as bwd_dots
from kernels.gradient.dots.schedule import dot_schedule
from kernels.target import target
from tests.kernels.harness import assert_same_bits, compute, problem_of
from tests.kernels.sizes import resize
from tests.problems import OPS, Case, random_case

LAYER = Case(
    dtype="bf16", n=12, src_channels=48, dst_channels=64, src_spatial=(20, 20), dst_spatial=(20, 20), kernel=(3, 3),
    pads_begin=(1, 1), pads_end=(1, 1),
)  # fmt: skip

pytestmark = pytest.mark.path


@pytest.mark.skipif(not target().dots, reason="no instruction for pairs of bf16 here, nor imitated")
@pytest.mark.parametrize("op", [op for op in OPS if op.endswith("Weights")])
def test_layers_are_taken(op: str) -> None:
    """An ordinary bf16 layer uses these instructions, those of other dtypes do not."""
    assert plan(problem_of(_of(op))).kernel == f"bwd_weights_{target().dots}"
    for dtype in ("f16", "f32"):
        assert "dot products take bf16 only" in explain(problem_of(_of(op, dtype)))


def _of(op: str, dtype: str = "bf16") -> Case:
    return replace(LAYER, op=op, dtype=dtype)


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
def test_special_values_and_workers(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    """Inf and NaN in two channels give the same bits for any number of workers, and exact sums in the others."""
    resize(monkeypatch, unit_macs=1_000_000)
    case = replace(LAYER, dtype=dtype, n=2, dst_channels=40)
    inputs = case.inputs()
    inputs["src"][1, 20, 0, 5] = np.inf
    inputs["diff_dst"][0, 33, 13, 13] = np.nan
    assert_same_bits(compute(case, inputs), case.expected(inputs), case)
    case = replace(LAYER, dtype=dtype)
    CACHE.clear()
    assert plan(problem_of(case), workers=8).stages == 2, "the workers share out the pixels"
    floats = case.floats()
    floats["src"][0, 47, 3, 3] = -np.inf
    one = compute(case, floats)
    assert one.tobytes() == compute(case, floats, workers=8).tobytes()
    CACHE.clear()


@pytest.mark.skipif(not target().dots, reason="no instruction for pairs of bf16 here, nor imitated")
@pytest.mark.parametrize("layout", [("NCX", "OIX"), ("NXC", "XIO")], ids="-".join)
@pytest.mark.parametrize(
    ("groups", "wide", "narrow", "stride", "pixels"),
    [
        (1, 1, 16, 2, 41), (1, 2, 24, 1, 37), (1, 3, 40, 1, 50), (1, 3, 20, 2, 39), (1, 4, 33, 1, 18), (1, 4, 7, 3, 35),
        (1, 6, 16, 6, 23), (1, 17, 1, 2, 20), (3, 8, 9, 1, 34), (12, 16, 16, 2, 17), (1, 20, 70, 1, 15),
        (2, 33, 12, 1, 1),
    ],
)  # fmt: skip
def test_packing(
    monkeypatch: pytest.MonkeyPatch, layout: tuple[str, str], groups: int, wide: int, narrow: int, stride: int,
    pixels: int,
) -> None:  # fmt: skip
    """Few and many channels, odd lines, strided reads, taps that meet nothing: all sums are exact."""
    monkeypatch.setattr(bwd_dots, "LEAST_USE", 0.0)
    case = Case(
        dtype="bf16", n=3, src_channels=wide * groups, dst_channels=narrow * groups, groups=groups,
        src_spatial=(5, stride * (pixels - 1) + 1), dst_spatial=(7, pixels), kernel=(5, 3), strides=(1, stride),
        pads_begin=(3, 1), pads_end=(3, 1), data_format=layout[0], weights_format=layout[1],
    )  # fmt: skip
    try:
        CACHE.clear()
        assert plan(problem_of(case)).kernel == f"bwd_weights_{target().dots}"
        inputs = case.inputs()
        for workers in (1, 3):
            assert_same_bits(compute(case, inputs, workers=workers), case.expected(inputs), case)
    finally:
        CACHE.clear()


@pytest.fixture
def everything(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let these instructions take every problem that they can, however many zeros they multiply."""
    monkeypatch.setattr(bwd_dots, "LEAST_USE", 0.0)
    CACHE.clear()
    yield
    CACHE.clear()


@pytest.mark.skipif(not target().dots, reason="no instruction for pairs of bf16 here, nor imitated")
@pytest.mark.usefixtures("everything")
@pytest.mark.parametrize("block", range(4))
def test_small_slabs(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    """With many slabs of unequal sizes along every axis, data left by one slab does not reach the next one."""
    resize(monkeypatch, dot_slab_bytes=2048)
    small: Any = lru_cache(unwrap(dot_schedule))
    monkeypatch.setattr(bwd_dots, "dot_schedule", small)
    rng = np.random.default_rng([74, block])
    slabs = 0
    while slabs < 400:
        case = replace(random_case(rng, macs=200_000, longer=4), dtype="bf16")
        problem = problem_of(case)
        if plan(problem).kernel != bwd_dots.BWD_DOTS.name:
            continue
        slabs += len(small(problem).slabs) - 1
        inputs = case.inputs()
        for _ in range(2):  # the second time, memory holds what the first one packed
            assert_same_bits(compute(case, inputs), case.expected(inputs), case)


def test_large_paddings_are_refused() -> None:
    """Pixels with too many padding zeros between them are left to the path that visits only real taps."""
    problem = ConvProblem(
        op="ConvolutionBackwardWeights", dtype="bf16", n=1, src_channels=16, dst_channels=16, groups=1,
        src_spatial=(1 << 40,), dst_spatial=(1,), kernel=(2,), strides=(1,), dilations=((1 << 40) - 1,),
        pads_begin=(0,), data_format="NCX", weights_format="OIX",
    )  # fmt: skip
    assert plan(problem).kernel == "bwd_weights_tiles"


def test_very_many_groups_are_laid_out() -> None:
    """Millions of groups side by side, which leave none of the bytes that all of them may use together, get a plan."""
    many = 1 << 23
    case = Case(dtype="bf16", groups=many, src_channels=many, dst_channels=many, data_format="NXC",
                src_spatial=(3,), dst_spatial=(3,), kernel=(1,))  # fmt: skip
    assert plan(problem_of(case)).kernel.startswith("bwd_weights")


@pytest.mark.parametrize(("channels", "taps", "taken"), [(16, 4096, True), (16, 4097, False), (64, 4096, False)])
def test_very_many_taps_are_refused(channels: int, taps: int, taken: bool) -> None:
    """The table of each channel's taps is bounded; beyond that the path of the f32 tiles computes the gradient."""
    case = Case(
        dtype="bf16", src_channels=channels, dst_channels=16, src_spatial=(taps + 99,), dst_spatial=(100,),
        kernel=(taps,),
    )  # fmt: skip
    assert (dot_schedule(problem_of(case)) is not None) == taken
