"""Products of bf16 pairs: the choice of instructions, the split of f16, and data that must not meet zeros."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from inspect import unwrap
from typing import Any

import numba
import numpy as np
import pytest

from kernels import ConvProblem, explain, plan
from kernels.arena import arena
from kernels.cache import CACHE
from kernels.gradient.dots import unit as bwd_dots
from kernels.gradient.dots.schedule import dot_schedule
from kernels.pack.lines import Pixels, pack_line, split_f16
from kernels.target import target
from tests.kernels.accuracy import assert_accurate, assert_nothing_is_lost
from tests.kernels.bits import DTYPES
from tests.kernels.harness import assert_same_bits, compute, problem_of
from tests.kernels.sizes import resize
from tests.problems import OPS, Case, random_case

LAYER = Case(
    dtype="bf16", n=12, src_channels=48, dst_channels=64, src_spatial=(20, 20), dst_spatial=(20, 20), kernel=(3, 3),
    pads_begin=(1, 1), pads_end=(1, 1),
)  # fmt: skip

pytestmark = pytest.mark.path


@numba.njit("void(int64, int64, int64, int64)")
def _split_f32(dst: int, part: int, src: int, count: int) -> None:
    pack_line(4, 1, dst, 0, part, Pixels(src, 4, 0, count), 0)


@numba.njit("void(int64, int64, int64)")
def _split(place: int, rest: int, count: int) -> None:
    split_f16(place, rest, count)


@pytest.mark.skipif(not target().dots, reason="no instruction for pairs of bf16 here, nor imitated")
@pytest.mark.parametrize("op", [op for op in OPS if op.endswith("Weights")])
def test_layers_are_taken(op: str) -> None:
    """An ordinary bf16 layer uses these instructions, an f32 one only where they are fast enough for six products."""
    assert plan(problem_of(_of(op))).kernel == f"bwd_weights_{target().dots}"
    f32 = explain(problem_of(_of(op, "f32")))
    assert ("on this processor dot products take bf16 only" in f32) == (target().dots != "amx")


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
    monkeypatch.setattr(bwd_dots, "LEAST_USE", {(target().dots, "bf16"): 0.0})
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


def test_f16_is_the_sum_of_two_bf16() -> None:
    """Every f16 is its first 8 digits and an exact rest; Inf and NaN can be recognised from the first part."""
    values = np.arange(1 << 16, dtype=np.uint16)
    high, rest = values.copy(), np.empty_like(values)
    _split(high.ctypes.data, rest.ctypes.data, values.size // 32)
    wide = [(part.astype(np.uint32) << 16).view(np.float32) for part in (high, rest)]
    expected = values.view(np.float16).astype(np.float32)
    finite = np.isfinite(expected)
    assert (np.isfinite(wide[0]) == finite).all()
    assert (wide[0][finite] + wide[1][finite] == expected[finite]).all()
    assert (np.abs(wide[1][finite]) <= np.abs(expected[finite]) * 2.0**-7).all()
    assert (wide[1][finite] * expected[finite] >= 0).all()


@pytest.fixture
def everything(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let these instructions take every problem that they can, however many zeros they multiply."""
    monkeypatch.setattr(bwd_dots, "LEAST_USE", {(target().dots, dtype): 0.0 for dtype in DTYPES[target().dots]})
    monkeypatch.setattr(bwd_dots, "MOST_CYCLES", np.inf)
    CACHE.clear()
    yield
    CACHE.clear()


def test_f32_is_the_sum_of_three_bf16() -> None:
    """Every f32 is the sum of its parts, except digits below the smallest bf16; Inf has no rest, NaN stays NaN."""
    rng = np.random.default_rng(71)
    bits = rng.integers(1 << 32, size=4096, dtype=np.uint64).astype(np.uint32)
    special = [0x7F800000, 0xFF800000, 0x7F800001, 0xFF80FFFF, 0x7FFFFFFF, 0x7FC00000, 0x7F7FFFFF, 0x80000000, 1]
    bits[: len(special)] = special
    values = bits.view(np.float32)
    for count in (1, 7, 31, 32, 33, 95, values.size):
        parts = np.zeros((3, values.size), np.uint16)
        _split_f32(parts.ctypes.data, parts.strides[0], values.ctypes.data, count)
        assert not parts[:, count:].any()
        wide = (parts[:, :count].astype(np.uint32) << 16).view(np.float32)
        with np.errstate(invalid="ignore"):
            total = wide[0] + (wide[1] + wide[2])
            lost = np.abs(total.astype(np.float64) - values[:count])
        assert (lost[np.isfinite(values[:count])] < 2.0**-133).all()
        ordinary = np.abs(values[:count]) >= 2.0**-110
        assert np.array_equal(total[ordinary], values[:count][ordinary])
        assert np.isnan(total[np.isnan(values[:count])]).all()
        ordinary &= np.isfinite(values[:count])
        assert (np.abs(wide[1][ordinary]) <= np.abs(values[:count][ordinary]) * 2.0**-7).all()
        assert (wide[1:, np.isinf(values[:count])] == 0).all()


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
        case = replace(random_case(rng, macs=200_000, longer=4), dtype=str(rng.choice(DTYPES[target().dots])))
        problem = problem_of(case)
        if plan(problem).kernel != bwd_dots.BWD_DOTS.name:
            continue
        slabs += len(small(problem).slabs) - 1
        inputs = case.inputs()
        for _ in range(2):  # the second time, memory holds what the first one packed
            assert_same_bits(compute(case, inputs), case.expected(inputs), case)


@pytest.mark.skipif(not target().dots, reason="no instruction for pairs of bf16 here, nor imitated")
@pytest.mark.usefixtures("everything")
def test_a_failed_sum_leaves_no_stale_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """If memory runs out in the middle, the next sum does not take what is left there for zeros."""
    inputs = LAYER.inputs()
    compute(LAYER, inputs)
    arena("vector", 1).fill(3.0)

    def fail(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(bwd_dots, "add_dots", fail)
        with pytest.raises(MemoryError):
            compute(LAYER, inputs)
    assert_same_bits(compute(LAYER, inputs), LAYER.expected(inputs), LAYER)


@pytest.mark.skipif(target().dots != "amx", reason="f32 goes this way on AMX alone, or its imitation")
@pytest.mark.usefixtures("everything")
@pytest.mark.parametrize("block", range(4))
def test_f32_is_exact(block: int) -> None:
    """For random problems in all layouts, sums of integers with few or many digits are exact, others close."""
    rng = np.random.default_rng([72, block])
    done = 0
    while done < 40:
        case = replace(random_case(rng, macs=60_000), dtype="f32")
        if plan(problem_of(case)).kernel != bwd_dots.BWD_DOTS.name:
            continue
        inputs = case.inputs()
        assert_same_bits(compute(case, inputs), case.expected(inputs), case)
        # few products, of numbers that have 24 digits together
        some = int(rng.integers(1, 24))
        for (name, shape), digits in zip(case.input_shapes.items(), (some, 24 - some), strict=True):
            values = rng.integers(-(2**digits), 2**digits, shape).astype(np.float32)
            inputs[name] = values * (rng.random(shape) < (0.02 if name == "src" else 1))
        magnitude = case.exact({name: np.abs(values.astype(np.float64)) for name, values in inputs.items()})
        exact, fits = case.exact(inputs), magnitude <= 2**24
        assert (compute(case, inputs)[fits] == exact[fits]).all(), case
        assert_accurate(case)
        done += 1


@pytest.mark.skipif(target().dots != "amx", reason="f32 goes this way on AMX alone, or its imitation")
@pytest.mark.usefixtures("everything")
@pytest.mark.parametrize(
    "scales", [(-60, -60), (-100, 90), (-126, 0), (-149, 127), (-140, 20), (60, 60), (0, 127), (0, 0)]
)
def test_f32_of_all_sizes(scales: tuple[int, int]) -> None:
    """Very large and very small numbers lose nothing that f32 can represent, also beside ordinary ones."""
    rng = np.random.default_rng(73)
    case = replace(LAYER, dtype="f32", n=1, src_channels=40, dst_channels=40)
    assert plan(problem_of(case)).kernel == "bwd_weights_amx"
    inputs = case.floats()
    for tensor, scale in zip(inputs.values(), scales, strict=True):
        tensor[:, 17:] = np.ldexp(np.clip(tensor[:, 17:], -1, 1).astype(np.float64), scale).astype(np.float32)
        tensor[:, 33:] *= rng.integers(2, size=tensor[:, 33:].shape).astype(np.float32)
    assert_nothing_is_lost(case, inputs)


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
