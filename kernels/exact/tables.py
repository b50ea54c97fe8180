"""Which positions of an axis meet which taps: as progressions for forward operations, as spans for weight gradients."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kernels.cache import cached
from kernels.emit.compiler import Records
from kernels.exact.records import Segment, Span
from kernels.forward.axes import reached
from kernels.problem import Dims

__all__ = ["Meeting", "Pair", "axis_spans", "clipped", "plain", "reach", "segment_rows", "segments", "span_rows"]

Ints = npt.NDArray[np.int64]
Pair = tuple[int, int]


@dataclass(frozen=True)
class Meeting:
    """Runs of dst positions that meet the same taps: one value of each column for each run.

    Position i of a run, `dst + i * dst_step`, meets its j-th tap, `tap + j * tap_step`, at src position
    `src + i * src_step + j * src_tap`.
    """

    dst: Ints
    dst_step: int
    count: Ints
    src: Ints
    src_step: int
    tap: Ints
    tap_step: Ints
    taps: Ints
    src_tap: Ints


def plain(size: int) -> Meeting:
    """Return the meeting of an axis, as that of images, whose positions meet one tap each, at their own."""
    zero, one = np.zeros(1, np.int64), np.ones(1, np.int64)
    return Meeting(zero, 1, one * size, zero, 1, zero, zero, one, zero)


@cached
def segments(dims: Dims, axis: int) -> Meeting:
    """Return the runs of a spatial axis of a forward operation; positions that meet no tap are in none."""
    taps, low, start, length = reached(dims, axis)
    stride = min(dims.strides[axis], max(1, dims.wide[axis]))
    lanes, first, src, dst_step, src_step = 0 * low, low, start, 1, stride
    if not dims.gathers:
        lanes, first, src, dst_step, src_step = start % stride, start // stride, low, stride, 1
    rows: list[Ints] = []
    order = np.argsort(lanes, kind="stable")
    cuts = np.flatnonzero(np.diff(lanes[order], prepend=-1))
    for members in np.split(order, cuts[1:]) if len(order) else ():
        begins, ends = first[members], first[members] + length[members]
        edges = np.unique(np.concatenate([begins, ends]))
        at, until = edges[:-1], edges[1:]
        if dims.gathers:  # both ends fall as taps rise
            one = len(members) - np.searchsorted(begins[::-1], at, "right")
            end = len(members) - np.searchsorted(ends[::-1], at, "right")
        else:
            one, end = np.searchsorted(ends, at, "right"), np.searchsorted(begins, at, "right")
        some = end > one
        at, until, one, end = at[some], until[some], one[some], end[some]
        here, following = members[one], members[np.minimum(one + 1, end - 1)]
        place, after = (src[each] + (at - first[each]) * src_step for each in (here, following))
        rows.append(
            np.stack([
                lanes[here] + at * dst_step, until - at, place, taps[here], taps[following] - taps[here], end - one,
                after - place,
            ])
        )  # fmt: skip
    columns: npt.NDArray[np.int64] = np.concatenate([np.zeros((7, 0), np.int64), *rows], 1)
    dst, count, place, tap, tap_step, many, src_tap = (column.copy() for column in columns)
    return Meeting(dst, dst_step, count, place, src_step, tap, tap_step, many, src_tap)


def clipped(meeting: Meeting, dst: Pair, taps: Pair) -> Meeting:
    """Return what is left of a meeting between two dst positions and two taps."""
    first = np.maximum(0, -(-(dst[0] - meeting.dst) // meeting.dst_step))
    last = np.minimum(meeting.count, -(-(dst[1] - meeting.dst) // meeting.dst_step))
    step = np.maximum(1, meeting.tap_step)
    low = np.maximum(0, -(-(taps[0] - meeting.tap) // step))
    high = np.minimum(meeting.taps, -(-(taps[1] - meeting.tap) // step))
    some = (first < last) & (low < high)
    moved = (
        meeting.dst + first * meeting.dst_step,
        last - first,
        meeting.src + first * meeting.src_step + low * meeting.src_tap,
        meeting.tap + low * meeting.tap_step,
        meeting.tap_step,
        high - low,
        meeting.src_tap,
    )
    dst_, count, src, tap, tap_step, many, src_tap = (each[some] for each in moved)
    return Meeting(dst_, meeting.dst_step, count, src, meeting.src_step, tap, tap_step, many, src_tap)


def reach(meeting: Meeting) -> Pair:
    """Return the span of src positions that a meeting, which has runs, reaches."""
    ends = meeting.src, meeting.src + (meeting.taps - 1) * meeting.src_tap
    return int(np.minimum(*ends).min()), int((np.maximum(*ends) + (meeting.count - 1) * meeting.src_step).max()) + 1


def segment_rows(
    meeting: Meeting, origin: Pair, hop: int, src_bytes: int, dst_bytes: int, tap_origin: int, tap_weight: int
) -> Records:
    """Return a meeting for compiled code: src packed from the first position of `origin` on, every `hop`th one."""
    rows = np.empty(len(meeting.dst), Segment.dtype)
    rows["a"] = (meeting.src - origin[0]) // hop * src_bytes
    rows["a_row"] = meeting.src_step // hop * src_bytes
    rows["a_tap"] = meeting.src_tap // hop * src_bytes
    rows["c"], rows["c_row"] = (meeting.dst - origin[1]) * dst_bytes, meeting.dst_step * dst_bytes
    rows["count"], rows["taps"] = meeting.count, meeting.taps
    rows["tap"], rows["tap_step"] = (meeting.tap - tap_origin) * tap_weight, meeting.tap_step * tap_weight
    return rows


@cached
def axis_spans(dims: Dims, axis: int) -> tuple[Ints, Ints, Ints]:
    """Return low and high narrow position of each tap of an axis, and the wide position of the low one."""
    low, high = dims.tap_ranges(axis).T
    taps, first, start, _ = reached(dims, axis)
    wide = np.zeros_like(low)
    wide[taps] = start - first * min(dims.strides[axis], max(1, dims.wide[axis]))
    return low, high, wide


def span_rows(
    spans: tuple[Ints, Ints, Ints], taps: Pair, slab: Pair, stride: int, hop: int | None
) -> tuple[Records, Pair]:
    """Return the spans of some taps in a slab, offsets counted in packed positions, wide ones in `a`.

    With them comes the span of wide positions that they reach, of which every `hop`th one is packed.
    """
    low, high, shift = (each[taps[0] : taps[1]] for each in spans)
    low, high = np.maximum(low, slab[0]), np.minimum(high, slab[1])
    rows = np.zeros(len(low), Span.dtype)
    rows["count"] = count = np.maximum(0, high - low)
    start = shift + low * stride
    some = count > 0
    begin = int(start[some].min()) if some.any() else 0
    end = int((start + (count - 1) * stride)[some].max()) + 1 if some.any() else 1
    rows["a"][some] = (start[some] - begin) // (hop or 1)
    rows["b"], rows["at"] = low - slab[0], low
    return rows, (begin, end)
