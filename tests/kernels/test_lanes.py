"""Channels-last tensors that are read in place, as vectors of groups or of channels."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kernels import plan
from kernels.emit.depthwise import DTYPES_IN_PLACE
from kernels.forward.tiles import way_costs
from kernels.gradient.tiles.schedule import schedule
from kernels.target import target
from tests.kernels.harness import Tensor, assert_same_bits, check, compute, problem_of
from tests.kernels.paths import inside
from tests.kernels.workers import small_units
from tests.problems import Case

pytestmark = pytest.mark.path


def _case(kernel: tuple[int, ...], stride: int = 1, dilation: int = 1, pads: int = 1, groups: int = 48) -> Case:
    rank = len(kernel)
    src = (6, 11, 13)[-rank:]
    dst = tuple((s + 2 * pads - (k - 1) * dilation - 1) // stride + 1 for s, k in zip(src, kernel, strict=True))
    return Case(
        n=2, groups=groups, src_channels=groups, dst_channels=groups, src_spatial=src, dst_spatial=dst, kernel=kernel,
        strides=(stride,) * rank, dilations=(dilation,) * rank, pads_begin=(pads,) * rank, pads_end=(pads,) * rank,
        data_format="NXC",
    )  # fmt: skip


CASES = {
    "3x3": _case((3, 3)), "3x3, one vector": _case((3, 3), groups=16), "3x3, no padding": _case((3, 3), pads=0),
    "3x3 stride 2": _case((3, 3), stride=2), "3x3 dilation 2": _case((3, 3), dilation=2, pads=2),
    "3x3 far outside": _case((3, 3), pads=4), "5x5": _case((5, 5), pads=2), "2x3": _case((2, 3)),
    "1x1": _case((1, 1), pads=0), "1x1 stride 3, padding": _case((1, 1), stride=3), "3": _case((3,)),
    "3x3x3": _case((3, 3, 3)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", DTYPES_IN_PLACE)
def test_reads_in_place(name: str, dtype: str) -> None:
    """Both operations give the oracle's bits without packing, for one worker and for three."""
    case = replace(CASES[name], dtype=dtype)
    for each in (case, case.mirrored()):
        assert schedule(problem_of(each)).direct
        for workers in (1, 3):
            check(each, workers=workers)


@pytest.mark.parametrize("name", CASES)
def test_special_values(name: str) -> None:
    """Inf and NaN at the ends of both tensors meet only real taps."""
    case = CASES[name]
    inputs: dict[str, Tensor] = case.inputs()
    for tensor, special in zip(inputs.values(), (np.inf, np.nan), strict=True):
        tensor.reshape(-1)[[0, -1]] = special
    assert_same_bits(compute(case, inputs), case.expected(inputs), case)


def test_packs_others() -> None:
    """Groups that do not fill whole vectors, and kernels with very many borders, are still packed."""
    assert not schedule(problem_of(_case((3, 3), groups=20))).direct
    assert not schedule(problem_of(replace(_case((3, 3)), data_format="NCX"))).direct
    many = replace(_case((90,), pads=45), src_spatial=(100,), dst_spatial=(101,))
    assert not schedule(problem_of(many)).direct
    check(many)


@pytest.mark.parametrize("channels", [16, 32])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("stride", [1, 2])
def test_few_channels_in_place(channels: int, groups: int, stride: int) -> None:
    """The gradient of a stem whose channels fill lines gives the oracle's bits without packing."""
    case = replace(_case((3, 3), stride=stride), groups=groups, src_channels=3 * groups, dst_channels=channels * groups)
    assert schedule(problem_of(case)).in_place
    for workers in (1, 3):
        check(case, workers=workers)
    inputs: dict[str, Tensor] = case.inputs()
    inputs["diff_dst"].reshape(-1)[[0, -1]] = np.nan
    assert_same_bits(compute(case, inputs), case.expected(inputs), case)


@pytest.mark.parametrize("weights_format", ["XIO", "OIX", "IOX", "XOI"])
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_writes_every_layout(weights_format: str, dtype: str) -> None:
    """Sums with the channels of either tensor as lanes are written correctly to every layout of the weights."""
    for src, dst in ((40, 19), (19, 40)):
        case = replace(_case((2, 3), groups=1), src_channels=src, dst_channels=dst, dtype=dtype)
        check(replace(case, weights_format=weights_format))


@pytest.mark.parametrize("channels", [4] if inside() else [2, 4, 8])
@pytest.mark.parametrize(("groups", "data_format"), [(3, "NXC"), (21, "NXC"), (16, "NCX")])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_groups_of_few_channels(dtype: str, groups: int, channels: int, data_format: str) -> None:
    """Groups with as many src as dst channels, of which vectors hold several, give the oracle's bits however cut."""
    case = replace(_case((3, 3), stride=2, groups=groups * channels), groups=groups, dtype=dtype)
    case = replace(case, data_format=data_format)
    for op in ("Convolution", "ConvolutionBackwardData", "ConvTranspose", "ConvTransposeBackwardData"):
        each = replace(case, op=op) if op.startswith("Convolution") else replace(case.mirrored(), op=op)
        if dtype == "f32" and channels < target().lanes:
            assert min(costs := way_costs(problem_of(each).dims), key=lambda way: costs[way]) == "lanes"
        check(each)
        with small_units(by_channels=True):
            assert groups * channels < 42 or len(plan(problem_of(each), workers=3).units) > 1
            check(each, workers=3)


@pytest.mark.parametrize(
    ("kernel", "stride", "dilation", "pads", "channels"),
    [((3, 3), 1, 1, 1, 8), ((3, 3), 1, 1, 1, 16), ((3, 3), 2, 1, 1, 3), ((3, 3), 2, 1, 1, 8), ((3, 3), 1, 2, 2, 4),
     ((3, 3), 2, 2, 2, 2), ((3, 3), 2, 2, 2, 16), ((2, 5), 1, 1, 2, 3), ((2, 5), 1, 1, 2, 8), ((1, 9), 1, 1, 4, 4),
     ((1, 9), 1, 1, 4, 16), ((3, 3), 1, 1, 4, 2), ((3, 3), 1, 1, 4, 8), ((3, 1), 2, 1, 0, 4), ((2, 2, 3), 1, 1, 1, 2)],
)  # fmt: skip
def test_lines_of_taps_of_groups(kernel: tuple[int, ...], stride: int, dilation: int, pads: int, channels: int) -> None:
    """Groups give the oracle's bits for lines of any length, and the same ones for random data however cut."""
    for groups, dtype, data_format in ((5, "f32", "NXC"), (7, "bf16", "NXC"), (16, "bf16", "NCX"), (1, "f32", "NCX")):
        case = _case(kernel, stride, dilation, pads, groups * channels)
        case = replace(case, op="Convolution", groups=groups, dtype=dtype, data_format=data_format, bias=True)
        for each in (case, replace(case.mirrored(), op="ConvTranspose")):
            check(each)
            inputs = each.floats()
            whole = compute(each, inputs)
            with small_units(by_channels=True):
                assert_same_bits(compute(each, inputs, workers=3), whole, each)


@pytest.mark.parametrize("channels", [2, 4, 8])
def test_groups_do_not_meet(channels: int) -> None:
    """Inf and NaN in one channel change only the results of its group."""
    case = replace(_case((3, 3), groups=8 * channels), groups=8, op="Convolution")
    inputs = case.inputs()
    inputs["src"][0, 3, 4, 1], inputs["src"][1, 5, 5, -1] = np.inf, np.nan
    assert_same_bits(compute(case, inputs), case.expected(inputs), case)


@pytest.mark.parametrize("data_format", ["NCX", "NXC"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_a_tap_that_begins_and_ends_inside_a_line(dtype: str, data_format: str) -> None:
    """Where a line is cut for a tap, its parts have rows that there are tiles for."""
    for width in range(1, 13):
        case = Case(
            op="ConvTranspose", dtype=dtype, src_channels=8, dst_channels=8, src_spatial=(3, width),
            dst_spatial=(3, 14), kernel=(3, 15 - width), pads_begin=(1, 0), pads_end=(1, 0),
            data_format=data_format, weights_format="XIO",
        )  # fmt: skip
        check(case)
        check(replace(case, groups=4, src_channels=32, dst_channels=32))
