"""The forward operations: their ways, bands and passes, and their units when there is one image."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import cycle, product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kernels import ConvProblem, plan, storage_dtype
from kernels.forward.share import Way, share
from tests import naive
from tests.kernels.harness import assert_same_bits, check, compute, problem_of, stored
from tests.kernels.paths import inside
from tests.kernels.sizes import resize
from tests.problems import Case, random_case

WAYS: tuple[Way, ...] = ("gather", "lanes", "scatter")

FAR = Case(  # three taps per line, far apart, on a map that no band holds
    op="ConvTranspose", src_channels=20, dst_channels=12, src_spatial=(40, 30), dst_spatial=(40, 30), kernel=(3, 3),
    dilations=(9, 7), pads_begin=(9, 7), pads_end=(9, 7),
)  # fmt: skip
WIDE = Case(
    op="ConvTranspose", n=2, src_channels=6, dst_channels=70, src_spatial=(20, 31), dst_spatial=(40, 62),
    kernel=(4, 4), strides=(2, 2), pads_begin=(1, 1), pads_end=(1, 1), bias=True,
)  # fmt: skip
DEPTHWISE = Case(
    op="ConvTranspose", src_channels=48, dst_channels=48, groups=48, src_spatial=(25, 19), dst_spatial=(51, 39),
    kernel=(3, 3), strides=(2, 2), data_format="NXC", bias=True,
)  # fmt: skip
LONG = Case(
    op="ConvTranspose", src_channels=5, dst_channels=9, src_spatial=(3000,), dst_spatial=(8996,), kernel=(2,),
    strides=(3,), pads_begin=(3,),
)  # fmt: skip


CONVOLUTIONS = {
    case: Case(
        op="Convolution", n=case.n, src_channels=case.dst_channels, dst_channels=case.src_channels, groups=case.groups,
        src_spatial=case.dst_spatial, dst_spatial=case.src_spatial, kernel=case.kernel, strides=case.strides,
        dilations=case.dilations, pads_begin=case.pads_begin, pads_end=case.pads_end, bias=case.bias,
    )
    for case in (FAR, WIDE, DEPTHWISE, LONG)
}  # fmt: skip


def _random(seed: int, count: int, way: Way) -> Iterator[Case]:
    rng = np.random.default_rng([20, seed])
    for number in range(count):
        case = random_case(rng, macs=40_000)
        if case.of_bias:
            continue
        if case.data_gradient:
            case = case.adjoint()
        elif not case.forward:
            case = replace(case, op=case.op.removesuffix("BackwardWeights"))
        if way == "scatter" and not case.transposed:
            continue
        yield replace(case, bias=number % 2 == 0)


def _whole(problem: ConvProblem) -> tuple[int, ...]:
    """Return the share that covers everything."""
    dims = problem.dims
    part: list[int] = []
    for size in (dims.n, dims.groups, dims.dst_channels, *dims.dst):
        part += 0, size
    return tuple(part)


def _check(case: Case, way: Way) -> None:
    problem, inputs = problem_of(case), case.inputs()
    output = np.full(problem.output_shape, 0xFFFF, np.uint16)
    if case.dtype == "f32":
        output = np.full(problem.output_shape, np.nan, storage_dtype(case.dtype))
    tensors = [stored(tensor) for tensor in inputs.values()]
    assert share(problem, way, _whole(problem)).run(tensors, output, lambda: False)
    assert_same_bits(output.view(naive.DTYPES[case.dtype]), case.expected(inputs), case)


@pytest.mark.path
@pytest.mark.parametrize("way", WAYS)
def test_every_way_computes_every_problem(way: Way) -> None:
    """Each way gives the oracle's bits, whichever would be chosen."""
    for case in _random(1, 120, way):
        _check(case, way)


@pytest.fixture
def overrun(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """What tells which scratch was written behind its end, and behind the line there that every arena has."""
    made: list[tuple[str, npt.NDArray[np.float32], int]] = []

    def guarded(name: str, floats: int) -> int:
        buffer = np.full(floats + 1024, 7.25, np.float32)
        start = -buffer.ctypes.data % 64 // 4
        made.append((name, buffer, start + floats + 16))
        return int(buffer.ctypes.data) + 4 * start

    def found() -> list[str]:
        names = [name for name, buffer, end in made if (buffer[end:] != 7.25).any()]
        made.clear()
        return names

    monkeypatch.setattr("kernels.forward.operands.arena_address", guarded)
    return found


@pytest.mark.path
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("data_format", ["NCX", "NXC"])
def test_small_caches(
    way: Way, dtype: str, data_format: str, monkeypatch: pytest.MonkeyPatch, overrun: Callable[[], list[str]]
) -> None:
    """Many bands, several passes of weights and many checks of `stop` change no bit."""
    limits = {"band_bytes": 1024, "band_pixels": 24, "reach_pixels": 1}
    resize(monkeypatch, **limits, weights_bytes=8192, batch_macs=100_000)
    for case in (*CONVOLUTIONS, *(CONVOLUTIONS.values() if way != "scatter" else ())):
        _check(replace(case, dtype=dtype, data_format=data_format), way)
        assert not overrun(), case


@pytest.mark.path
@pytest.mark.parametrize("way", WAYS)
def test_scratch_is_not_overrun(way: Way, overrun: Callable[[], list[str]]) -> None:
    """No more scratch is written than was asked for."""
    for case in (*_random(3, 40, way), *CONVOLUTIONS, *(CONVOLUTIONS.values() if way != "scatter" else ())):
        _check(case, way)
        assert not overrun(), case


def test_one_image_is_shared_out() -> None:
    """Two workers share one image with few dst channels, and any number of workers gives the same bits."""
    for channels in (1, 3, 8):
        case = Case(
            op="ConvTranspose", src_channels=64, dst_channels=channels, src_spatial=(250, 250),
            dst_spatial=(500, 500), kernel=(4, 4), strides=(2, 2), pads_begin=(1, 1), pads_end=(1, 1), bias=True,
        )  # fmt: skip
        units = plan(problem_of(case), workers=2).units
        assert len(units) > 1
        assert max(unit.macs for unit in units) <= case.macs // 2
        inputs = case.floats()
        first = compute(case, inputs)
        for workers in (2, 3, 8):
            assert_same_bits(compute(case, inputs, workers=workers), first, case)


@pytest.mark.parametrize("op", ["Convolution", "ConvTranspose", "ConvolutionBackwardData", "ConvTransposeBackwardData"])
@pytest.mark.parametrize("data_format", ["NCX", "NXC"])
@pytest.mark.parametrize("padding", [0, 1])
def test_depthwise_on_maps_of_one_pixel(op: str, data_format: str, padding: int) -> None:
    """Several vectors of groups get the oracle's bits on one pixel, whose channels follow each other in any format."""
    for groups in (16, 32, 96):
        for dtype in ("f32", "bf16"):
            case = Case(
                op="ConvolutionBackwardWeights", dtype=dtype, n=2, groups=groups, src_channels=groups,
                dst_channels=groups, src_spatial=(1, 1), dst_spatial=(1, 1 + padding), kernel=(1, 1 + padding),
                pads_begin=(0, padding), pads_end=(0, padding), data_format=data_format,
            )  # fmt: skip
            for geometry in (case, case.mirrored()):
                if geometry.transposed == op.startswith("ConvTranspose"):
                    check(replace(geometry, op=op), workers=2)


@pytest.mark.path
@pytest.mark.parametrize("taps", (1, 3, 8) if inside() else range(1, 10))
def test_depthwise_lines_of_any_length(taps: int) -> None:
    """Lines of taps along any axis give the oracle's bits, whatever the stride and the padding leave out of them."""
    dtypes, lasts = cycle(("f32", "bf16", "f16")), cycle((False, True, True, False))
    for stride, dilation, positions in product((1, 2, 3), (1, 2), (1, 7, 21)):
        extent = (taps - 1) * dilation + 1
        for low, high in ((0, 0), (taps // 2, taps // 2), (extent - 1, 0), (0, extent - 1)):
            size = (positions - 1) * stride + extent - low - high
            if size < 1:
                continue
            axes: dict[str, Any] = {
                "src_spatial": (size, 3), "dst_spatial": (positions, 3), "kernel": (taps, 1),
                "strides": (stride, 1), "dilations": (dilation, 1), "pads_begin": (low, 0), "pads_end": (high, 0),
            }  # fmt: skip
            order = -1 if next(lasts) else 1
            case = Case(
                op="ConvolutionBackwardWeights", dtype=next(dtypes), n=2, groups=24, src_channels=24, dst_channels=24,
                data_format="NXC", **{name: each[::order] for name, each in axes.items()},
            )  # fmt: skip
            check(replace(case, op="Convolution"), workers=2)
            check(replace(case.mirrored(), op="ConvTranspose"), workers=2)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("spatial", [(64, 64), (512, 8), (1024, 4), (1366, 3)])
def test_planes_of_whole_pages(spatial: tuple[int, int], dtype: str) -> None:
    """Planes of a power of two, whose lines meet in few sets of the caches, are written right, and those next to it."""
    case = Case(op="Convolution", dtype=dtype, n=2, src_channels=3, dst_channels=21, src_spatial=spatial,
                dst_spatial=spatial, kernel=(3, 3), pads_begin=(1, 1), pads_end=(1, 1))  # fmt: skip
    check(case, workers=2)
    check(replace(case, groups=21, src_channels=21), workers=2)


def test_large_kernels_on_small_maps() -> None:
    """If every dst pixel has its own set of taps, the sums are still exact."""
    for groups, channels in ((1, 3), (1, 40), (24, 24)):
        case = Case(
            op="ConvTranspose", src_channels=channels, dst_channels=channels, groups=groups, src_spatial=(11, 9),
            dst_spatial=(11, 9), kernel=(11, 9), pads_begin=(5, 4), pads_end=(5, 4),
        )  # fmt: skip
        for data_format in ("NCX", "NXC"):
            for way in WAYS:
                _check(replace(case, data_format=data_format), way)
