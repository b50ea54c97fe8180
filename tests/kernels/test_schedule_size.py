"""Tables for hostile shapes stay small, and building them takes no more steps than they have rows."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest

from kernels.gradient.geometry import Axis
from kernels.gradient.tiles.schedule import MOST_SLABS, Schedule, schedule
from kernels.gradient.tiles.tables import MOST_RANGES
from kernels.target import target
from tests.kernels.harness import check, problem_of
from tests.problems import Case


def _rows(plan: Schedule) -> int:
    tables = (*chain.from_iterable(each or () for each in plan.tables), plan.blocks, plan.scalar_lines)
    return len(plan.slabs) + sum(len(table) for table in tables)


@pytest.mark.parametrize("vector", ["src", "dst"])
def test_a_million_channels_and_sixteen_taps(vector: str) -> None:
    """Each vector of channels has one row, starting where the previous one ends, and the number of walks is bounded."""
    channels, taps = 1 << 20, 16
    src, dst = (channels, 1) if vector == "src" else (1, channels)
    case = Case(src_channels=src, dst_channels=dst, src_spatial=(taps,), dst_spatial=(1,), kernel=(taps,))
    plan = schedule(problem_of(case))
    assert _rows(plan) < channels
    assert len(plan.tables[0][0]) <= MOST_RANGES
    lanes = target().lanes * plan.blocks["vectors"].astype(int)
    assert (plan.blocks["lane"] == np.cumsum(lanes) - lanes).all()


def test_walks_over_very_many_tiles_are_long() -> None:
    """The number of tiles times taps is unbounded, but their table is not."""
    plan = schedule(
        problem_of(Case(src_channels=1 << 15, dst_channels=1 << 10, src_spatial=(64,), dst_spatial=(1,), kernel=(64,)))
    )
    assert len(plan.tables[0][0]) <= MOST_RANGES
    plan = schedule(problem_of(Case(src_spatial=(1 << 17,), dst_spatial=(1,), kernel=(1 << 17,))))
    assert len(plan.tables[0][0]) == 1 << 17


def test_slabs_of_very_many_positions_are_large() -> None:
    """There are no more slabs than can be listed at once."""
    size = 1 << 28
    plan = schedule(
        problem_of(
            Case(
                dtype="bf16", src_channels=512, src_spatial=(1,), dst_spatial=(size,), kernel=(1,),
                pads_begin=(size - 1,),
            )
        )
    )  # fmt: skip
    assert len(plan.slabs) <= 2 * MOST_SLABS


@pytest.mark.parametrize("stride", [1, 3])
def test_tables_match_single_taps(stride: int) -> None:
    """Ranges and windows of a long filter, found with tables, are the same as for each tap by itself."""
    taps, dilation, pad, size = 201, 2, 350, 40
    case = Case(
        src_spatial=(stride * (size - 1) + (taps - 1) * dilation + 1 - pad - 30,), dst_spatial=(size,), kernel=(taps,),
        strides=(stride,), dilations=(dilation,), pads_begin=(pad,), pads_end=(30,), src_channels=3, dst_channels=5,
    )  # fmt: skip
    problem = problem_of(case)
    axis = schedule(problem).axes[3]
    assert axis.ranges == tuple(problem.dims.tap_range(2, tap) for tap in range(taps))
    for low in range(0, size, 7):
        parts = [
            Axis(axis.size, axis.wide, stride, (shift,), np.array([span]))
            for shift, span in zip(axis.shifts, axis.ranges, strict=True)
        ]
        spans = [span for part in parts if (span := part.window(low, low + 5)) != (0, 0)]
        assert axis.window(low, low + 5) == (min(a for a, _ in spans), max(b for _, b in spans))
    check(case)


def test_long_walks_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """If there would be too many walks, all tiles share one, and the sums are exact."""
    monkeypatch.setattr("kernels.gradient.tiles.tables.MOST_RANGES", 1)
    case = Case(src_channels=3000, dst_channels=40, src_spatial=(13, 13), dst_spatial=(9, 9), kernel=(5, 5))
    assert len(schedule(problem_of(case)).tables[0][0]) == 25
    check(case)
