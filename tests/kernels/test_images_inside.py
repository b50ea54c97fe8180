"""Filter gradients on AMX with the images as the innermost axis: a tap meets only whole steps of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from kernels import plan
from kernels.gradient.dots import unit as bwd_dots
from kernels.gradient.dots.schedule import dot_schedule
from kernels.target import target
from tests.kernels.accuracy import assert_accurate
from tests.kernels.harness import assert_same_bits, compute, problem_of, stored
from tests.kernels.poison import check_that_later_images_are_not_read
from tests.kernels.sizes import resize
from tests.problems import Case, random_case

pytestmark = [
    pytest.mark.path,
    pytest.mark.skipif(target().dots != "amx", reason="this is for tile registers, or their imitation"),
]

SMALL_MAPS = Case(
    dtype="bf16", n=64, src_channels=32, dst_channels=64, src_spatial=(14, 14), dst_spatial=(10, 10), kernel=(5, 5),
    data_format="NXC",
)  # fmt: skip
# Odd numbers of everything, including channels; incomplete steps, and phases.
STRIDED = Case(
    n=45, src_channels=75, dst_channels=44, src_spatial=(15, 13), dst_spatial=(8, 7), kernel=(4, 3), strides=(2, 2),
    pads_begin=(2, 1), pads_end=(1, 1),
)  # fmt: skip
LAYERS = {
    "strided": STRIDED,
    "dilated": replace(STRIDED, strides=(1, 1), dilations=(2, 3), dst_spatial=(12, 9)),
    "line": replace(STRIDED, src_spatial=(30,), dst_spatial=(14,), kernel=(5,), strides=(2,), pads_begin=(1,),
                    pads_end=(1,), dilations=(1,), output_padding=(0,)),
    "volume": replace(STRIDED, n=20, src_spatial=(5, 6, 4), dst_spatial=(4, 5, 3), kernel=(2, 2, 2), strides=(1, 1, 1),
                      dilations=(1, 1, 1), pads_begin=(0, 0, 0), pads_end=(0, 0, 0), output_padding=(0, 0, 0)),
    "one image more": replace(STRIDED, n=33),
    "rows of one": replace(STRIDED, src_spatial=(15, 1), dst_spatial=(8, 1), kernel=(4, 1), pads_begin=(2, 0),
                           pads_end=(1, 0)),
    "far taps": replace(
        STRIDED, src_spatial=(15, 3), dst_spatial=(8, 2), kernel=(4, 2), strides=(2, 1 << 61), dilations=(1, 1 << 61),
        pads_begin=(2, 1 << 61), pads_end=(1, 1 << 61),
    ),
    "dead taps": replace(STRIDED, src_spatial=(3, 13), dst_spatial=(4, 7), kernel=(6, 3), pads_begin=(6, 1),
                         pads_end=(3, 1)),
}  # fmt: skip


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make images the innermost axis wherever there are two, and let AMX take every problem that it can."""
    monkeypatch.setattr(bwd_dots, "LEAST_USE", {("amx", dtype): 0.0 for dtype in ("f32", "f16", "bf16")})
    monkeypatch.setattr(bwd_dots, "MOST_CYCLES", np.inf)
    monkeypatch.setattr("kernels.gradient.dots.schedule.INSIDE_COST", np.inf)
    monkeypatch.setattr("kernels.gradient.dots.schedule.LEAST_IMAGES", 2)
    fresh: Any = lru_cache(dot_schedule.__wrapped__)
    monkeypatch.setattr(bwd_dots, "dot_schedule", fresh)
    for cached in (plan, bwd_dots._part):
        cached.cache_clear()
    yield
    for cached in (plan, bwd_dots._part):
        cached.cache_clear()


def _slabs(case: Case) -> int:
    """Return the number of slabs of a case that has images inside and runs on AMX, else 0."""
    problem = problem_of(case)
    schedule = bwd_dots.BWD_DOTS.schedule(problem)
    taken = schedule is not None and schedule.inside and plan(problem).kernel.endswith("amx")
    return len(schedule.slabs) if taken else 0


@pytest.mark.skipif(bool(target().imitated), reason="imitated instructions take everything as it is")
def test_choice() -> None:
    """Many images of small maps become the innermost axis; single ones, large maps and few channels do not."""
    assert _slabs(SMALL_MAPS)
    assert not _slabs(replace(SMALL_MAPS, n=1))
    assert not _slabs(replace(SMALL_MAPS, n=8, src_spatial=(104, 104), dst_spatial=(100, 100)))
    assert not _slabs(replace(SMALL_MAPS, src_channels=3))


@pytest.mark.heavy
@pytest.mark.usefixtures("inside")
@pytest.mark.parametrize(
    ("name", "dtype", "data_format", "slab"),
    [  # each layer in each dtype; every pair of the others occurs
        (name, dtype, ("NCX", "NXC")[(i + j) % 2], (1 << 14, 1 << 23)[(i // 2 + j) % 2])
        for i, name in enumerate(LAYERS)
        for j, dtype in enumerate(("f32", "f16", "bf16"))
    ],
)
def test_layers_are_exact(monkeypatch: pytest.MonkeyPatch, name: str, dtype: str, data_format: str, slab: int) -> None:
    """Sums of integers are exact in whole and in small slabs, also when memory holds data packed for the last sum."""
    resize(monkeypatch, narrow_bytes=slab)
    case = replace(LAYERS[name], dtype=dtype, data_format=data_format)
    assert _slabs(case) == 1 if slab > 1 << 20 else _slabs(case) > 1
    inputs = case.inputs()
    for _ in range(2):
        assert_same_bits(compute(case, inputs), case.expected(inputs), case)
    assert_accurate(case)


def _random(seed: int, count: int) -> Iterator[Case]:
    rng = np.random.default_rng([91, seed])
    while count > 0:
        case, channels = random_case(rng, macs=3000), [int(rng.choice([16, 17, 31, 32, 48, 65])) for _ in range(2)]
        if case.of_bias:
            continue
        src, dst = (case.groups * each for each in channels)
        dtype = str(rng.choice(["f32", "f16", "bf16"]))
        case = replace(case, n=int(rng.integers(2, 70)), src_channels=src, dst_channels=dst, dtype=dtype)
        if case.macs <= 3_000_000 and case.op != "ConvTranspose" and _slabs(case):
            count -= 1
            yield case


@pytest.mark.usefixtures("inside")
@pytest.mark.parametrize("block", range(4))
def test_random_problems(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    """Random problems are exact on integers, and any number of workers gives the same bits, even with Inf and NaN."""
    if block % 2:
        resize(monkeypatch, narrow_bytes=1 << 13)
    resize(monkeypatch, unit_macs=20_000, chunk_macs=10_000, chunk_positions=32)
    rng = np.random.default_rng([92, block])
    for case in _random(block, 25):
        inputs = case.inputs()
        expected = case.expected(inputs)
        assert_same_bits(compute(case, inputs), expected, case)
        for tensor in inputs.values():
            tensor.reshape(-1)[rng.integers(tensor.size, size=2)] = rng.choice([np.inf, np.nan])
        with np.errstate(invalid="ignore"):
            expected = case.expected(inputs)
            for workers in (1, 2, 5):
                assert_same_bits(compute(case, inputs, workers=workers), expected, case)


@pytest.mark.usefixtures("inside")
@pytest.mark.parametrize("data_format", ["NCX", "NXC"])
def test_images_that_come_late_are_not_read(monkeypatch: pytest.MonkeyPatch, data_format: str) -> None:
    """Images are outermost among slabs: a unit gives the same bits whatever comes after the images that it states."""
    resize(monkeypatch, unit_macs=20_000, chunk_macs=10_000, narrow_bytes=1 << 16)
    case = replace(SMALL_MAPS, n=100, data_format=data_format)
    assert _slabs(case)
    check_that_later_images_are_not_read(problem_of(case), [stored(tensor) for tensor in case.floats().values()])
