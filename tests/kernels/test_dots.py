"""Products of bf16 pairs: the choice of instructions, the split of f16, and data that zeros may not multiply."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import llvmlite.binding as llvm
import numba
import numpy as np
import pytest

from kernels import ConvProblem, bwd_dots, explain, plan
from kernels.cpu import SETTING, _amx_granted, cpu
from kernels.dot_schedule import dot_schedule
from kernels.planes import split_f16
from tests.kernels.harness import assert_same_bits, compute, problem_of
from tests.problems import OPS, Case

LAYER = Case(
    dtype="bf16", n=12, src_channels=48, dst_channels=64, src_spatial=(20, 20), dst_spatial=(20, 20), kernel=(3, 3),
    pads_begin=(1, 1), pads_end=(1, 1),
)  # fmt: skip

FEATURES = "avx2", "fma", "avx512f", "avx512bf16", "amx-tile", "amx-bf16"


@numba.njit("void(int64, int64, int64)")
def _split(place: int, rest: int, count: int) -> None:
    split_f16(place, rest, count)


class _Library:
    """A C library whose kernel gives or refuses the tile registers."""

    answer = 0

    def __init__(self, _: object) -> None:
        self.syscall = lambda *_: self.answer


@pytest.mark.parametrize(
    ("setting", "answer", "expected"),
    [
        (None, 0, "amx"),
        (None, -1, "avx512bf16"),
        ("avx512f,avx512bf16", 0, "avx512bf16"),
        ("avx512f,amx-bf16", 0, ""),
        ("avx512f", 0, ""),
        ("", 0, ""),
    ],
)
def test_choice(monkeypatch: pytest.MonkeyPatch, setting: str | None, answer: int, expected: str) -> None:
    """AMX is taken where processor, kernel and setting allow it, else dot products, else f32."""
    monkeypatch.setattr(llvm, "get_host_cpu_features", lambda: dict.fromkeys(FEATURES, True))
    monkeypatch.setattr(ctypes, "CDLL", _Library)
    monkeypatch.setattr(_Library, "answer", answer)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.delenv("CONVGRAD_CPU_IMITATE", raising=False)
    monkeypatch.delenv(SETTING, raising=False)
    if setting is not None:
        monkeypatch.setenv(SETTING, setting)
    _amx_granted.cache_clear()
    try:
        assert cpu.__wrapped__().dots == expected
    finally:
        _amx_granted.cache_clear()


@pytest.mark.skipif(not cpu().dots, reason="no instruction for pairs of bf16 here, nor imitated")
@pytest.mark.parametrize("op", [op for op in OPS if op != "ConvTranspose"])
def test_layers_are_taken(op: str) -> None:
    """An ordinary bf16 layer runs on these instructions, an f32 one does not."""
    assert plan(problem_of(_of(op))).kernel == f"bwd_weights_{cpu().dots}"
    assert "f32 is no sum of few bf16 products" in explain(problem_of(_of(op, "f32")))


def _of(op: str, dtype: str = "bf16") -> Case:
    return replace(LAYER, op=op, dtype=dtype)


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
def test_special_values_and_workers(dtype: str) -> None:
    """Inf and NaN in two channels give the same bits for any number of workers, and exact sums in the others."""
    case = replace(LAYER, dtype=dtype, n=2, dst_channels=40)
    inputs = case.inputs()
    inputs["src"][1, 20, 0, 5] = np.inf
    inputs["diff_dst"][0, 33, 13, 13] = np.nan
    assert_same_bits(compute(case, inputs), case.expected(inputs), case)
    case = replace(LAYER, dtype=dtype)
    assert plan(problem_of(case), workers=8).stages == 2, "the workers share out the pixels"
    floats = case.floats()
    floats["src"][0, 47, 3, 3] = -np.inf
    one = compute(case, floats)
    assert one.tobytes() == compute(case, floats, workers=8).tobytes()


@pytest.mark.skipif(not cpu().dots, reason="no instruction for pairs of bf16 here, nor imitated")
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
    """Few and many channels, odd lines, strides that pick values, taps that meet nothing: all sums are exact."""
    monkeypatch.setattr(bwd_dots, "LEAST_USE", {(cpu().dots, "bf16"): 0.0})
    case = Case(
        dtype="bf16", n=3, src_channels=wide * groups, dst_channels=narrow * groups, groups=groups,
        src_spatial=(5, stride * (pixels - 1) + 1), dst_spatial=(7, pixels), kernel=(5, 3), strides=(1, stride),
        pads_begin=(3, 1), pads_end=(3, 1), data_format=layout[0], weights_format=layout[1],
    )  # fmt: skip
    try:
        plan.cache_clear()
        assert plan(problem_of(case)).kernel == f"bwd_weights_{cpu().dots}"
        inputs = case.inputs()
        for workers in (1, 3):
            assert_same_bits(compute(case, inputs, workers=workers), case.expected(inputs), case)
    finally:
        plan.cache_clear()


def test_f16_is_the_sum_of_two_bf16() -> None:
    """Every f16 is its nearest bf16 and an exact rest; Inf and NaN have none."""
    values = np.arange(1 << 16, dtype=np.uint16)
    high, rest = values.copy(), np.empty_like(values)
    _split(high.ctypes.data, rest.ctypes.data, values.size // 8)
    wide = [(part.astype(np.uint32) << 16).view(np.float32) for part in (high, rest)]
    expected = values.view(np.float16).astype(np.float32)
    same = (wide[0] + wide[1] == expected) | (np.isnan(expected) & np.isnan(wide[0]))
    assert same.all()
    assert (wide[1][~np.isfinite(expected)] == 0).all()
    assert (np.abs(wide[1][np.isfinite(expected)]) <= np.abs(expected[np.isfinite(expected)]) * 2.0**-8).all()


def test_large_paddings_are_refused() -> None:
    """Pixels between which zeros would take too much room are left to the path that visits real taps only."""
    problem = ConvProblem(
        op="ConvolutionBackwardWeights", dtype="bf16", n=1, src_channels=16, dst_channels=16, groups=1,
        src_spatial=(1 << 40,), dst_spatial=(1,), kernel=(2,), strides=(1,), dilations=((1 << 40) - 1,),
        pads_begin=(0,), data_format="NCX", weights_format="OIX",
    )  # fmt: skip
    assert plan(problem).kernel == "bwd_weights_tiles"


@pytest.mark.parametrize(("channels", "taps", "taken"), [(16, 4096, True), (16, 4097, False), (64, 4096, False)])
def test_very_many_taps_are_refused(channels: int, taps: int, taken: bool) -> None:
    """Laying out each tap of each channel has a bound; beyond it the path of the f32 tiles takes the gradient."""
    case = Case(
        dtype="bf16", src_channels=channels, dst_channels=16, src_spatial=(taps + 99,), dst_spatial=(100,),
        kernel=(taps,),
    )  # fmt: skip
    assert (dot_schedule(problem_of(case)) is not None) == taken
