"""Tables for very many taps and slabs: the same as computed one by one, in few steps, with checks for a stop."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import pairwise

import numpy as np
import pytest

from kernels import cache, plan, run_unit, storage_dtype
from kernels.cache import Cache
from kernels.forward.classes import Ints, _classes, tap_numbers, tap_runs
from kernels.gradient.geometry import Axis, geometry
from kernels.gradient.tiles.schedule import Schedule, schedule
from kernels.gradient.tiles.unit import _part
from kernels.problem import Dims
from tests.kernels.harness import problem_of
from tests.problems import WITH_WEIGHTS, Case, random_case


def axes() -> Iterator[Axis]:
    """Yield many kinds of axes: random ones, and those whose taps are far outside."""
    rng = np.random.default_rng(17)
    for _ in range(150):
        yield from geometry(problem_of(random_case(rng, macs=50_000))).axes
    for _ in range(40):
        stride, dilation, taps = (int(rng.integers(1, most)) for most in (9, 7, 90))
        size, pad = int(rng.integers(1, 60)), int(rng.integers(0, 200))
        reach = stride * (size - 1) + (taps - 1) * dilation + 1
        end = int(rng.integers(0, reach))
        if reach > pad + end:
            case = Case(
                src_spatial=(reach - pad - end,), dst_spatial=(size,), kernel=(taps,), strides=(stride,),
                dilations=(dilation,), pads_begin=(pad,), pads_end=(end,),
            )  # fmt: skip
            yield geometry(problem_of(case)).axes[3]


def window(axis: Axis, low: int, high: int) -> tuple[int, int]:
    """Return the window that a range of narrow positions meets, found one by one."""
    met = [
        x * axis.stride + shift
        for shift, (first, last) in zip(axis.shifts, axis.ranges, strict=True)
        for x in range(max(low, first), min(high, last))
    ]
    return (min(met), max(met) + 1) if met else (0, 0)


def test_windows_of_many_parts_are_those_of_each() -> None:
    """However an axis is split, the window of each part is the one found one by one."""
    rng = np.random.default_rng(3)
    for axis in axes():
        inside = rng.integers(1, max(2, axis.size), 5)
        parts = np.array(list(pairwise(sorted({0, axis.size, *inside.tolist()}))), np.int64)
        parts = parts[parts[:, 1] <= axis.size]
        if len(parts):
            begin, end = axis.windows(*parts.T)
            found = list(zip(begin.tolist(), end.tolist(), strict=True))
            assert found == [window(axis, low, high) for low, high in parts.tolist()], axis


def test_no_step_for_each_slab(monkeypatch: pytest.MonkeyPatch) -> None:
    """65,536 taps and at least 32,768 slabs, whose windows one by one would take minutes, are laid out in one step."""
    case = Case(n=1 << 9, src_spatial=(3 << 16,), dst_spatial=((1 << 17) + 1,), kernel=(1 << 16,))
    problem = problem_of(case)
    calls, windows = [], Axis.windows

    def counted(axis: Axis, low: Ints, high: Ints) -> tuple[Ints, Ints]:
        calls.append(axis)
        return windows(axis, low, high)

    monkeypatch.setattr(Axis, "windows", counted)
    monkeypatch.setattr(Axis, "window", lambda *_: pytest.fail("one by one"))
    part = _part(problem, plan(problem).units[0])
    assert isinstance(part.plan, Schedule)
    assert len(part.slabs) >= 1 << 15
    assert len(calls) <= 8


def classes_one_by_one(dims: Dims, axis: int, numbers: Ints) -> list[tuple[int, ...]]:
    """Return the classes of an axis, found from the taps of each dst position."""
    if dims.gathers:
        return _runs_one_by_one(dims, axis)
    stride = min(dims.strides[axis], dims.wide[axis])
    met: dict[int, list[tuple[int, int]]] = {}
    for tap in range(dims.kernel[axis]):
        for x in range(*dims.tap_range(axis, tap)):
            u = x * dims.strides[axis] + tap * dims.dilations[axis] - dims.pads[axis]
            met.setdefault(u, []).append((tap, x))
    rows: list[list[int]] = []
    for u in sorted(met, key=lambda u: (u % stride, u)):
        first, x = max(met[u])
        before = met.get(u - stride)
        if before and [tap for tap, _ in before] == [tap for tap, _ in met[u]]:
            rows[-1][3] += 1
        else:
            rows.append([int(numbers[first]), len(met[u]), u, 1, x])
    return [(*row, False) for row in rows]


def _runs_one_by_one(dims: Dims, axis: int) -> list[tuple[int, ...]]:
    stride, dilation, pad = dims.strides[axis], dims.dilations[axis], dims.pads[axis]
    rows: list[list[int]] = []
    before: list[int] = []
    for x in range(dims.narrow[axis]):
        taps = [tap for tap in range(dims.kernel[axis]) if 0 <= x * stride + tap * dilation - pad < dims.wide[axis]]
        if taps and taps == before:
            rows[-1][3] += 1
        elif taps:
            rows.append([taps[0], len(taps), x, 1, x * stride + taps[0] * dilation - pad])
        before = taps
    return [(*row, False) for row in rows]


def test_classes_are_those_of_each_position() -> None:
    """The classes of positions with the same taps, found from the taps' ranges, are those found one by one."""
    rng = np.random.default_rng(23)
    for _ in range(150):
        dims = problem_of(random_case(rng, macs=50_000)).dims
        for axis in range(3):
            numbers = tap_numbers(dims, axis, bool(rng.integers(2)))
            assert _classes(dims, axis, numbers).tolist() == classes_one_by_one(dims, axis, numbers)
            reached = sum(high - low for low, high in dims.tap_ranges(axis).tolist())
            assert tap_runs(dims, axis, numbers)["count"].sum() == reached


@pytest.mark.parametrize("op", WITH_WEIGHTS)
def test_nothing_is_laid_out_for_a_call_that_is_over(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit checks for a stop before its schedule, before its own tables, and before it computes."""
    case = Case(src_spatial=(4096,), dst_spatial=(1,), kernel=(4096,))
    problem = problem_of(case if op == case.op else case.mirrored() if op != "ConvTranspose" else _forward(case))
    chosen, dtype = plan(problem), storage_dtype(problem.dtype)
    inputs = [np.zeros(shape, dtype) for shape in problem.input_shapes]
    output, scratch = np.zeros(problem.output_shape, dtype), np.zeros(chosen.scratch_bytes, np.uint8)
    laid_out = []
    for looks in range(2 if problem.forward else 3):
        fresh = Cache(64 << 20)
        monkeypatch.setattr(cache, "CACHE", fresh)
        left = [False] * looks
        assert not run_unit(chosen, chosen.units[0], inputs, output, scratch, partial(_next, left))
        laid_out.append(len(fresh))
    assert laid_out[0] == 0
    assert laid_out == sorted(laid_out)
    assert laid_out[-1] > 0


def _next(left: list[bool]) -> bool:
    """Return False as long as `left` has one, then True."""
    return left.pop() if left else True


def _forward(case: Case) -> Case:
    return Case(op="ConvTranspose", src_spatial=case.dst_spatial, dst_spatial=case.src_spatial, kernel=case.kernel)


def test_extreme_taps_are_listed_without_overflow() -> None:
    """If shifts exceed 64 bits, taps outside have no positions, and all ranges are within the bounds of the axis."""
    far = 1 << 60
    case = Case(
        src_spatial=(9,), dst_spatial=(5,), kernel=(70,), dilations=(far,), pads_begin=(2,), pads_end=(69 * far - 2,),
        strides=(2,),
    )  # fmt: skip
    axis = schedule(problem_of(case)).axes[3]
    assert axis.ranges[0] == (1, 5)
    assert set(axis.ranges[1:]) == {(0, 0)}
    assert axis.window(0, 5) == (0, 7)
