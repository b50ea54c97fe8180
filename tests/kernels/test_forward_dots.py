"""Forward operations from products of bf16: bands, phases, segments, and data that need another path."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from inspect import unwrap
from math import ceil, prod
from typing import Any

import numpy as np
import pytest

from kernels import plan
from kernels.cache import CACHE
from kernels.target import target
from tests.kernels.harness import assert_same_bits, compute, problem_of
from tests.kernels.sizes import resize
from tests.problems import Case, random_case

pytestmark = [pytest.mark.path, pytest.mark.skipif(not target().dots, reason="where bf16 products are, or imitated")]

TILE_REGISTERS = target().dots == "amx"

LAYER = Case(
    op="ConvTranspose", n=3, src_channels=40, dst_channels=72, src_spatial=(9, 20), dst_spatial=(18, 40),
    kernel=(4, 4), strides=(2, 2), pads_begin=(1, 1), pads_end=(1, 1), bias=True,
)  # fmt: skip
LAYERS = {layer.op: layer for layer in (LAYER, replace(LAYER.mirrored(), bias=True))}


@pytest.fixture(autouse=True)
def everything(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let these instructions take every problem that they can lay out."""
    if TILE_REGISTERS:
        monkeypatch.setattr("kernels.forward.amx.MOST_CYCLES", np.inf)
    else:
        monkeypatch.setattr("kernels.forward.tiles._way", lambda _: "gather")
    CACHE.clear()
    yield
    CACHE.clear()


def _random(seed: int, count: int, **limits: Any) -> Iterator[Case]:
    rng = np.random.default_rng([81, seed])
    while count > 0:
        case = random_case(rng, **limits)
        if case.of_bias:
            continue
        op = ("ConvTranspose", "Convolution")[count % 2]
        case = replace(case if case.transposed == (op == "ConvTranspose") else case.mirrored(), op=op)
        case = replace(case, dtype="bf16")
        if plan(problem_of(case)).kernel.endswith(target().dots):
            count -= 1
            yield case


@pytest.mark.parametrize("block", range(4))
def test_every_problem_is_exact(block: int) -> None:
    """For random problems in all layouts, sums of integers are exact."""
    for case in _random(block, 50, macs=60_000):
        inputs = case.inputs()
        assert_same_bits(compute(case, inputs), case.expected(inputs), case)


@pytest.mark.skipif(not TILE_REGISTERS, reason="src is staged for tile registers")
@pytest.mark.parametrize("joined", range(3))
def test_small_bands(monkeypatch: pytest.MonkeyPatch, joined: int) -> None:
    """Split into unequal bands and passes, and among workers, along whichever axes rows go, sums have the same bits."""
    from kernels.forward import amx

    resize(monkeypatch, staged_positions=24, dot_slab_bytes=4096, line_positions=4, unit_macs=2000, batch_macs=10_000)
    small: Any = lru_cache(unwrap(amx.layout))
    monkeypatch.setattr(amx, "layout", small)
    monkeypatch.setattr(amx, "JOINED", amx.JOINED[joined : joined + 1])
    bands = 0
    for case in _random(10 + joined, 20, macs=300_000, longer=3):
        problem, inputs = problem_of(case), case.inputs()
        layout = small(problem)
        sizes = (problem.n, *problem.dims.dst)
        bands += prod(ceil(size / step) for size, step in zip(sizes, layout.steps, strict=True))
        expected = case.expected(inputs)
        for workers in (1, 3):
            assert_same_bits(compute(case, inputs, workers=workers), expected, case)
        with monkeypatch.context() as patch:
            resize(patch, weights_bytes=2 * layout.block_bytes)
            CACHE.clear()
            assert_same_bits(compute(case, inputs, workers=2), expected, case)
        CACHE.clear()
    assert bands > 300


@pytest.mark.skipif(not TILE_REGISTERS, reason="src is staged for tile registers")
@pytest.mark.parametrize(
    ("size", "kernel", "least"), [(7, 3, 12.2), (7, 1, 16), (14, 3, 14), (28, 3, 14.7), (56, 1, 16)]
)
@pytest.mark.parametrize("op", LAYERS)
def test_short_lines_fill_tiles(op: str, size: int, kernel: int, least: float) -> None:
    """Rows go along lines, planes or images, so that most of the 16 rows of a tile are dst positions."""
    from kernels.forward import amx

    case = Case(
        op=op, dtype="bf16", n=32, src_channels=64, dst_channels=64, src_spatial=(size,) * 2, dst_spatial=(size,) * 2,
        kernel=(kernel,) * 2, strides=(1, 1), pads_begin=(kernel // 2,) * 2, pads_end=(kernel // 2,) * 2,
    )  # fmt: skip
    layout = amx.layout(problem_of(case))
    assert layout is not None
    tiles = amx._rows(layout.steps, layout.axes, layout.joined)[0]
    assert prod(layout.steps) * kernel**2 / tiles >= least


@pytest.mark.parametrize("data_format", ["NCX", "NXC"])
@pytest.mark.parametrize("channels", [1, 2, 3, 5])
def test_few_channels(channels: int, data_format: str) -> None:
    """Lines of src with few channels, short and long, are packed as they are: all sums are exact."""
    for width, stride, dst_channels in ((31, 1, 20), (32, 2, 33), (45, 1, 16), (70, 2, 7)):
        case = Case(
            op="Convolution", dtype="bf16", n=2, src_channels=channels, dst_channels=dst_channels,
            src_spatial=(3, width), dst_spatial=(ceil(3 / stride), ceil(width / stride)), kernel=(3, 3),
            strides=(stride, stride), pads_begin=(1, 1), pads_end=(1, 1), data_format=data_format,
        )  # fmt: skip
        inputs = case.inputs()
        assert_same_bits(compute(case, inputs), case.expected(inputs), case)


@pytest.mark.parametrize("op", LAYERS)
def test_special_values_and_workers(op: str) -> None:
    """Inf and NaN reach only the sums that they are part of, and any number of workers gives the same bits."""
    for data_format, name, place in (
        ("NCX", "src", (1, 3, 0, 5)),
        ("NXC", "weights", (0, 0, 7, 1)),
        ("NCX", "weights", (3, 3, 39, 70)),
    ):
        case = replace(LAYERS[op], dtype="bf16", data_format=data_format)
        for value in (np.inf, np.nan):
            inputs = case.inputs()
            inputs[name][tuple(at % size for at, size in zip(place, inputs[name].shape, strict=True))] = value
            expected = case.expected(inputs)
            for workers in (1, 8):
                assert_same_bits(compute(case, inputs, workers=workers), expected, case)


@pytest.mark.parametrize("channels", [1, 5, 21, 31, 37])
@pytest.mark.parametrize("weights_format", ["OIX", "XIO", "XOI"])
@pytest.mark.parametrize("op", LAYERS)
def test_the_last_channel_is_the_last(op: str, weights_format: str, channels: int) -> None:
    """Where Inf in its weights takes it to register tiles, no channel behind it is written."""
    case = replace(LAYERS[op], dtype="bf16", data_format="NXC", dst_channels=channels, weights_format=weights_format)
    assert plan(problem_of(case)).kernel.endswith(target().dots)
    inputs = case.inputs()
    channel = {"OIX": (-1, 0, 0, 0), "XIO": (0, 0, 0, -1), "XOI": (0, 0, -1, 0)}[weights_format]
    inputs["weights"][channel] = np.inf
    for workers in (1, 3):
        assert_same_bits(compute(case, inputs, workers=workers), case.expected(inputs), case)


@pytest.mark.parametrize("op", LAYERS)
def test_a_band_that_fails_spoils_no_other(monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    """Bands that fall back to other instructions spoil no weights, pixels and sums of those after them."""
    resize(monkeypatch, batch_macs=1, band_bytes=4096)  # every band has its own call
    CACHE.clear()
    sizes = [(30, 33), (60, 66)]
    src, dst = sizes if op == "ConvTranspose" else reversed(sizes)
    case = replace(LAYERS[op], dtype="bf16", n=9, src_spatial=src, dst_spatial=dst)
    inputs = case.inputs()
    inputs["src"][::2, 3, 0, 0] = np.inf
    expected = case.expected(inputs)
    for workers in (1, 3):
        assert_same_bits(compute(case, inputs, workers=workers), expected, case)
    CACHE.clear()


@pytest.mark.parametrize("op", LAYERS)
def test_workers_get_the_same_bits(op: str) -> None:
    """This also holds for values that are rounded, with some bands whose values are too small."""
    case = replace(LAYERS[op], dtype="bf16", n=8)
    floats = case.floats()
    floats["src"][5] *= floats["src"].dtype.type(2.0**-120)
    one = compute(case, floats)
    for workers in (2, 5):
        assert one.tobytes() == compute(case, floats, workers=workers).tobytes()
