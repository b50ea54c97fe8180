"""Tables for very many taps and slabs: as computed one by one, in few steps and rows, with checks for a stop."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from kernels import cache, plan, run_unit, storage_dtype
from kernels.cache import Cache
from kernels.forward import lists
from kernels.forward.axes import Ints, axis_tables, tap_numbers
from kernels.forward.records import Piece
from kernels.gradient.geometry import Axis, geometry
from kernels.gradient.tiles.driver import MOST_ELEMENTS
from kernels.gradient.tiles.schedule import MOST_SLABS, Schedule, schedule
from kernels.gradient.tiles.tables import MOST_RANGES
from kernels.gradient.tiles.unit import BWD_WEIGHTS
from kernels.problem import Dims
from kernels.target import target
from tests.kernels.harness import check, problem_of
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
    part = BWD_WEIGHTS.part(problem, plan(problem).units[0])
    assert isinstance(part.plan, Schedule)
    assert len(part.plan.slabs) >= 1 << 15
    assert len(calls) <= 8


def taps_one_by_one(dims: Dims, axis: int) -> dict[int, list[tuple[int, int]]]:
    """Return the taps that each dst position of an axis meets, with the src positions, by rising src positions."""
    met: dict[int, list[tuple[int, int]]] = {}
    for tap in range(dims.kernel[axis]):
        for x in range(*dims.tap_range(axis, tap)):
            u = x * dims.strides[axis] + tap * dims.dilations[axis] - dims.pads[axis]
            dst, src = (x, u) if dims.gathers else (u, x)
            met.setdefault(dst, []).append((tap, src))
    return {dst: sorted(taps, key=lambda each: each[1]) for dst, taps in met.items()}


def test_taps_are_those_of_each_position() -> None:
    """The taps and src positions of each dst position, read from the phases of an axis, are those found one by one."""
    rng = np.random.default_rng(23)
    for _ in range(150):
        dims = problem_of(random_case(rng, macs=50_000)).dims
        for axis in range(3):
            table, numbers = axis_tables(dims)[1 + axis], tap_numbers(dims, axis)
            assert sorted(numbers) == [*range(dims.kernel[axis])]
            taps = np.argsort(numbers)
            found: dict[int, list[tuple[int, int]]] = {}
            for dst, first, count, _ in table.phases.tolist():
                for number, low, high, src in table.taps[first : first + count].tolist():
                    for at in range(low, high):
                        place = src + (at - low) * table.src_step
                        found.setdefault(dst + at * table.dst_step, []).append((int(taps[number]), place))
            expected = taps_one_by_one(dims, axis)
            assert found == expected
            assert table.covered == (len(expected) == dims.dst[axis])


@pytest.mark.parametrize("skips", [0, 3])
def test_tiles_sum_the_taps_of_their_rows(skips: int) -> None:
    """Tiles of a line together have every position once, in order, and each row the taps that its position meets."""
    rng = np.random.default_rng(29)
    cut: Any = lists.list_rows.py_func  # type: ignore[attr-defined]  # Numba's
    for _ in range(100):
        dims = problem_of(random_case(rng, macs=50_000)).dims
        table, limit = axis_tables(dims)[3], int(rng.integers(1, 13))
        pieces = np.empty(max(1, len(table.taps)), Piece.dtype)
        found: dict[int, list[tuple[int, int]]] = {}
        for phase in table.phases:
            at, end = 0, -(-(dims.dst[2] - int(phase["dst"])) // table.dst_step)
            while at < end:
                rows, repeat, count = cut(
                    _Fields.rows(table.taps),
                    _Fields(phase),
                    table.src_step,
                    at,
                    end,
                    limit,
                    skips,
                    _Fields.rows(pieces),
                )
                assert rows >= 1
                assert count == 0 or rows <= limit
                for tile in range(repeat):
                    for piece in pieces[:count].tolist():
                        number, src, case = piece
                        first, last = (
                            (0, rows) if case == 0 else (case // 2 + 1, rows) if case % 2 else (0, rows - case // 2)
                        )
                        assert case <= 2 * skips
                        for row in range(first, last):
                            dst = int(phase["dst"]) + (at + tile * rows + row) * table.dst_step
                            found.setdefault(dst, []).append((number, src + (tile * rows + row) * table.src_step))
                at += rows * repeat
            assert at == end
        taps = np.argsort(tap_numbers(dims, 2))
        named = {dst: [(int(taps[number]), src) for number, src in met] for dst, met in found.items()}
        assert named == taps_one_by_one(dims, 2)


class _Fields:
    """A record as the compiled functions see it: fields are attributes."""

    row: Any

    def __init__(self, row: Any) -> None:
        object.__setattr__(self, "row", row)

    def __getattr__(self, name: str) -> int:
        return int(self.row[name])

    def __setattr__(self, name: str, value: int) -> None:
        self.row[name] = value

    @classmethod
    def rows(cls, table: Any) -> list[_Fields]:
        return [cls(table[place : place + 1][0]) for place in range(len(table))]


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


@pytest.mark.parametrize("vector", ["src", "dst"])
def test_a_million_channels_and_sixteen_taps(vector: str) -> None:
    """Each vector of channels has one row, starting where the previous one ends, and the number of walks is bounded."""
    channels, taps = 1 << 20, 16
    src, dst = (channels, 1) if vector == "src" else (1, channels)
    case = Case(src_channels=src, dst_channels=dst, src_spatial=(taps,), dst_spatial=(1,), kernel=(taps,))
    plan = schedule(problem_of(case))
    tables = (*plan.tables, plan.blocks, plan.scalar_lines)
    assert len(plan.slabs) + sum(map(len, tables)) < channels
    assert len(plan.tables[0]) <= MOST_RANGES
    lanes = target().lanes * plan.blocks["vectors"].astype(int)
    assert (plan.blocks["lane"] == np.cumsum(lanes) - lanes).all()


def test_tables_of_very_many_tiles_and_slabs() -> None:
    """The number of tiles times taps is unbounded, but their table is not, nor are there too many slabs."""
    many = Case(src_channels=1 << 15, dst_channels=1 << 10, src_spatial=(64,), dst_spatial=(1,), kernel=(64,))
    assert len(schedule(problem_of(many)).tables[0]) <= MOST_RANGES
    long = Case(src_spatial=(1 << 17,), dst_spatial=(1,), kernel=(1 << 17,))
    assert len(schedule(problem_of(long)).tables[0]) == 1 << 17
    size = 1 << 28
    padded = replace(long, dtype="bf16", src_channels=512, src_spatial=(1,), dst_spatial=(size,), kernel=(1,),
                     pads_begin=(size - 1,))  # fmt: skip
    assert len(schedule(problem_of(padded)).slabs) <= 2 * MOST_SLABS


def test_long_walks_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """If there would be too many walks, all tiles share one, and the sums are exact."""
    monkeypatch.setattr("kernels.gradient.tiles.tables.MOST_RANGES", 1)
    case = Case(src_channels=3000, dst_channels=40, src_spatial=(13, 13), dst_spatial=(9, 9), kernel=(5, 5))
    assert len(schedule(problem_of(case)).tables[0]) == 25
    check(case)


@pytest.mark.parametrize("channels", [(40, 24), (3, 48), (24, 1)])
def test_taps_of_short_lines_are_visited_in_turns(channels: tuple[int, int]) -> None:
    """If the lines of a block are so many that there is no room to list them for all taps, the sums are exact."""
    case = Case(
        src_channels=channels[0], dst_channels=channels[1], src_spatial=(400, 2), dst_spatial=(400, 2), kernel=(5, 5),
        pads_begin=(2, 2), pads_end=(2, 2),
    )  # fmt: skip
    plan = schedule(problem_of(case))
    assert len(plan.tables[0]) * np.prod(plan.block[:3]) > MOST_ELEMENTS
    check(case)
    check(case, workers=3)
