"""The schedule of a weight gradient, from the problem alone: who is the vector, who the scalar, in which order.

One tensor is packed into panels whose lines are vectors of adjacent channels; the other gives scalars that are read
where they lie, one byte offset for each row of a register tile. Rows are (tap, channel) pairs of the scalar tensor.
For each tap only the pixels for which it is inside are visited, so padding is never multiplied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import ceil, prod

import numpy as np
import numpy.typing as npt

from kernels.blocks import CACHES, STEPS, SUMS
from kernels.cache import cached
from kernels.emit.compiler import Records
from kernels.emit.depthwise import DTYPES_IN_PLACE, TAPS
from kernels.gradient.geometry import Axis, Geometry, Tensor, combined, cut, geometry
from kernels.gradient.roles import Roles, Sum, lane_blocks, merges, role_costs, tile_rows
from kernels.gradient.tiles.driver import PAGE
from kernels.gradient.tiles.records import Block, Line, Slab
from kernels.gradient.tiles.tables import (
    Rows,
    Tables,
    firsts_of,
    has_regions,
    merged_tables,
    region_tables,
    split,
    tap_tables,
)
from kernels.problem import ConvProblem, storage_dtype, wrapped
from kernels.reduction import chunks_of
from kernels.target import target

__all__ = ["Operand", "Schedule", "schedule"]

Ints = npt.NDArray[np.int64]
Four = tuple[int, int, int, int]

MOST_SLABS = 1 << 16
"""Slabs up to which laying them out takes no time that is felt."""


NEAR_BYTES = 1 << 10
"""Bytes between positions from which on few sets of the first cache hold a block's scalars where they lie."""


@dataclass(frozen=True)
class Operand:
    """One of the two tensors as the driver reads it.

    `steps` are for one of its own positions along (n, d, h, w), in lines, each of so many units (`unit`): panel lines
    of the vector tensor, bytes of the scalar one, and of both where lanes are groups. `moves` are for one narrow
    position, in units. `points` is the number of positions of a slab's window, `panel` the bytes of one panel of
    scalars, `scratch` the f32 values of all of them.
    """

    tensor: Tensor
    is_wide: bool
    lane: int
    group: int
    steps: Ints
    moves: Ints
    points: int = 0
    unit: int = 1
    panel: int = 0
    scratch: int = 0


@dataclass(frozen=True, kw_only=True)
class Schedule(Sum):
    """Everything that the compiled driver reads, as tables (`kernels.gradient.tiles.records`)."""

    vector: Operand
    scalar: Operand
    packed_groups: int  # that are packed at a time
    lay: Callable[[], Tables]  # makes the tables below
    scalar_lines: Records
    block: Ints
    segment: int  # positions that are summed in registers
    scalar_row: int  # bytes of scalars from one row of a tile to the next

    @cached_property
    def tables(self) -> Tables:
        """Ranges and tiles: large tables, which only computing needs."""
        return self.lay()


def _slabs(axes: Sequence[Axis], cuts: Sequence[Ints], vector: Operand, scalar: Operand) -> Records:
    """Return narrow positions that are packed at a time, and the boxes of both tensors that they need."""
    spans = combined(cuts)
    slabs = np.zeros(len(spans[0]), Slab.dtype)
    slabs["low"], slabs["high"] = np.stack(spans, axis=1).transpose(2, 0, 1)
    for name, operand in (("vector", vector), ("scalar", scalar)):
        columns = []
        for axis, parts in zip(axes, cuts, strict=True):
            low, high = parts.T
            if operand.is_wide:
                low, high = axis.windows(low, high)
            columns.append(np.column_stack([low, high - low]))
        slabs[name]["first"], slabs[name]["sizes"] = np.stack(combined(columns), axis=1).transpose(2, 0, 1)
    return slabs


def _roles(problem: ConvProblem) -> Roles:
    """Choose who is the vector and who the scalar, and how both are read."""
    geo = geometry(problem)
    wide, narrow = geo.wide, geo.narrow
    costs = role_costs(problem, geo)
    if not has_regions(geo.axes[1:], wide.channels):
        del costs["groups"]
    lanes_are = min(costs, key=lambda name: costs[name])
    by_group, vector_is_wide = lanes_are == "groups", lanes_are == "wide"
    vector, scalar = (wide, narrow) if vector_is_wide else (narrow, wide)
    merged = lanes_are == "narrow" and merges(geo)
    direct = by_group and _adjacent_groups(problem, geo)
    # rows of tiles that several taps share are at one step: channels, then taps
    apart = merged and 1 < wide.channels != wide.steps[3]
    channels, taps = scalar.channels, prod(len(axis.shifts) for axis in geo.axes)
    # rows lie as in the output where that is possible, so that writing them is a transposition of whole lines
    taps_inside = problem.weights_strides[3] == 1 and not merged and not by_group
    tap_step, channel_step = (1, taps) if taps_inside else (channels, 1)
    return Roles(
        geo=geo,
        lanes_are_groups=by_group,
        vector_is_wide=vector_is_wide,
        in_place=direct or (not by_group and not vector_is_wide and _whole_lines(problem, vector)),
        scalars_in_place=direct or (not by_group and not apart and _near(problem, scalar, NEAR_BYTES)),
        merged=merged,
        direct=direct,
        channels=channels,
        taps=taps,
        tap_step=tap_step,
        channel_step=channel_step,
    )


def _halve(shape: list[int], position: int) -> None:
    shape[position] = ceil(shape[position] / 2)


def _slab_shape(problem: ConvProblem, roles: Roles, packed: int) -> Four:
    """Cut the pixels so that a slab's panels fit a cache and its work a few milliseconds.

    `packed` is the number of bytes packed for one pixel. Images are cut apart first; inside one image a cut repeats
    the border of the wide tensor, so it is made only where work or scratch asks for it, or the wide one is read
    where it lies.
    """
    axes, by_group = roles.axes, roles.lanes_are_groups
    native = roles.scalars_in_place and not roles.vector_is_wide
    shape = [axis.size for axis in axes]
    least = max(2 * SUMS.block_positions, prod(shape) // MOST_SLABS)
    macs = problem.macs / max(1, prod(shape))
    limit = min(SUMS.slab_macs, max(SUMS.least_slab_macs, problem.macs // (2 * SUMS.large_chunks)))

    def over(byte_limit: int) -> bool:
        points = prod(shape)
        return points > least and (points * packed > byte_limit or points * macs > limit)

    soft = SUMS.lane_slab_bytes if by_group else SUMS.slab_bytes
    hard = 4 * SUMS.lane_slab_bytes // 3 if by_group else SUMS.most_slab_bytes
    while shape[0] > 1 and over(soft):
        _halve(shape, 0)
    for axis in (1, 2, 3):
        trivial = len(axes[axis].shifts) == 1
        floor = 1 if trivial else max(1, ceil(2 * len(axes[axis].shifts) / axes[axis].stride))
        if axis == 3:
            floor = max(floor, SUMS.line_positions)
        while shape[axis] > floor and over(soft if trivial or native else hard):
            _halve(shape, axis)
    while shape[3] > SUMS.line_positions and over(hard):
        _halve(shape, 3)
    return shape[0], shape[1], shape[2], shape[3]


def _block_shape(shape: Four, target: int) -> Four:
    """Return the pixels of one register-tile call: whole lines, then several images or planes of them."""
    n, d, h, w = shape
    width = w if w <= target * 3 // 2 else ceil(w / ceil(w / target))
    lines = max(1, min(h, target // max(1, width)))
    lines = ceil(h / ceil(h / lines)) if h else 1
    outer = max(1, target // max(1, width * lines)) if lines >= h and width >= w else 1
    return (1, min(d, outer), lines, width) if d > 1 else (min(n, outer), 1, lines, width)


@cached
def schedule(problem: ConvProblem) -> Schedule:
    """Lay out the sum for `problem`: roles, register tiles, slabs of pixels and blocks inside them."""
    roles = _roles(problem)
    by_group, channels, taps, vector = roles.lanes_are_groups, roles.channels, roles.taps, roles.lane_tensor
    axes, spatial = roles.axes, roles.axes[1:]
    blocks = lane_blocks(vector.channels)
    heights = {int(blocks[0]["vectors"]), int(blocks[-1]["vectors"])}
    if by_group:  # one for each channel of a group
        blocks = np.zeros(vector.channels, Block.dtype)
        blocks["first"], blocks["vectors"], blocks["valid"] = np.arange(vector.channels), 1, target().lanes
        blocks["lane"] = blocks["first"] * target().lanes
    count = channels * len(axes[3].shifts) if roles.merged else channels
    limit = TAPS if by_group else min(tile_rows(count, vectors) for vectors in heights)
    cuts = [1] * channels if by_group else split(channels, limit)
    lanes = int(blocks["vectors"].sum()) * target().lanes
    packed = 0 if roles.in_place else lanes
    if not roles.scalars_in_place:
        packed += roles.row_tensor.channels * (target().lanes if by_group else 1)
    shape = _slab_shape(problem, roles, 0 if roles.direct else 4 * packed)
    vectors, scalars, offsets = _operands(problem, roles, cuts, shape)
    rows = Rows(roles.tap_step, roles.channel_step, offsets, limit)
    wide = vectors if roles.vector_is_wide else scalars
    steps = wrapped(wide.unit * int(step) for step in wide.steps[1:]).tolist()
    block = _block_shape(shape, _block_positions(problem, roles, taps * channels * lanes))
    if by_group:
        size = storage_dtype(problem.dtype).itemsize
        places = [size * step for step in roles.row_tensor.steps[1:]] if roles.direct else steps
        tables = partial(region_tables, rows, spatial, places, 4 * target().lanes)
    elif roles.merged:
        tables = partial(merged_tables, rows, spatial, steps)
    else:
        tiles_a_walk = STEPS.band_bytes // (4 * limit * max(1, prod(block)))
        tables = partial(tap_tables, rows, spatial, steps, roles.vector_is_wide, tiles_a_walk)
    slab_cuts, points = cut(axes, shape), prod(axis.size for axis in axes)
    sums = 4 * taps * channels * lanes * problem.groups
    least = SUMS.chunk_positions if sums > 2 * CACHES.l2 else SUMS.cached_chunk_positions
    chunks = chunks_of(min(prod(map(len, slab_cuts)), points // least, problem.macs // SUMS.chunk_macs), sums)
    return Schedule(
        **vars(roles),
        vector=vectors,
        scalar=scalars,
        groups=ceil(problem.groups / target().lanes) if by_group else problem.groups,
        rows=channels * taps,
        slabs=_slabs(axes, slab_cuts, vectors, scalars),
        packed_groups=_packed_groups(problem, roles),
        blocks=blocks,
        lanes=lanes,
        lay=tables,
        scalar_lines=_scalar_lines(problem, roles, scalars, cuts),
        block=np.array(block, np.int64),
        chunks=chunks,
        segment=_segment(points // chunks),
        scalar_row=_scalar_row(roles, offsets, steps[2]),
    )


def _scalar_row(roles: Roles, offsets: Ints, position: int) -> int:
    """Return the bytes from one row of a tile to the next; `position` is the bytes between positions of the scalars."""
    if len(offsets) > 1:
        return int(offsets[1] - offsets[0])
    shifts = roles.axes[3].shifts
    return (shifts[1] - shifts[0]) * position if roles.merged else 0


def _block_positions(problem: ConvProblem, roles: Roles, acc: int) -> int:
    """Return the pixels of a block.

    Fewer where strided scalars draw whole cache lines into L1 for one value each; more where the `acc` accumulators of
    a group lie outside L2, so that they are fetched less often.
    """
    scalar, axes, line = roles.row_tensor, roles.axes, 24
    if roles.lanes_are_groups:
        size, lanes = (storage_dtype(problem.dtype).itemsize, problem.groups) if roles.direct else (4, target().lanes)
        strides = prod(axis.stride for axis in axes)
        channels = roles.lane_tensor.channels + scalar.channels * strides
        return max(1, SUMS.slab_bytes // (size * lanes * channels))
    step = 4 * axes[3].stride
    if not roles.scalars_in_place and not roles.vector_is_wide:
        line = min(128, step * min(scalar.channels, 6))
    elif not roles.vector_is_wide:
        line = min(128, step * scalar.steps[3]) if scalar.channel == 1 else min(scalar.channels, 6) * min(64, step)
    most = SUMS.block_positions if 4 * acc < CACHES.l2 // 2 else 2 * SUMS.block_positions
    return max(SUMS.line_positions, min(most, SUMS.strided_block_bytes // (64 + line)))


def _whole_lines(problem: ConvProblem, vector: Tensor) -> bool:
    """Whether channels lie as lines of a panel, and positions not each in a page of its own."""
    line = target().lanes * min(2, ceil(vector.channels / target().lanes))
    return vector.channel == 1 and vector.channels % line == 0 and _near(problem, vector, PAGE)


def _near(problem: ConvProblem, tensor: Tensor, step: int) -> bool:
    """Whether values are f32, and adjacent positions less than so many bytes (`step`) apart."""
    return problem.dtype == "f32" and 4 * tensor.steps[3] < step


def _adjacent_groups(problem: ConvProblem, geo: Geometry) -> bool:
    """Whether groups follow each other in both tensors, and fill whole vectors."""
    single = geo.wide.channels == geo.narrow.channels == geo.wide.group == geo.narrow.group == 1
    return single and problem.groups % target().lanes == 0 and problem.dtype in DTYPES_IN_PLACE


def _in_place(roles: Roles, tensor: Tensor, size: int, line: int, group: int) -> Operand:
    """Return the operand of a tensor that is read in place, with moves of `size` for each `line` values."""
    is_wide = tensor is roles.geo.wide
    moves = (
        size * step // line * (axis.stride if is_wide else 1)
        for step, axis in zip(tensor.steps, roles.axes, strict=True)
    )
    return Operand(tensor, is_wide, 1, group, np.zeros(4, np.int64), wrapped(moves))


def _window_shape(axes: tuple[Axis, ...], shape: Four, is_wide: bool) -> Four:
    """Return the largest box of one tensor that a slab of `shape` needs."""
    if not is_wide:
        return shape
    spans = [
        min(axis.wide, max(0, (size - 1) * axis.stride + axis.shifts[-1] - axis.shifts[0] + 1))
        for axis, size in zip(axes, shape, strict=True)
    ]
    return spans[0], spans[1], spans[2], spans[3]


def _panel_steps(axes: tuple[Axis, ...], shape: Four, is_wide: bool) -> Four:
    """Return the steps of (n, d, h, w), in lines, of a panel that holds one slab's window."""
    _, d, h, w = _window_shape(axes, shape, is_wide)
    return d * h * w, h * w, w, 1


def _operands(problem: ConvProblem, roles: Roles, cuts: list[int], shape: Four) -> tuple[Operand, Operand, Ints]:
    """Return the operands of the vector and of the scalar tensor, and the byte offset of each channel of this one."""
    geo, vector = roles.geo, roles.lane_tensor
    scalars, offsets = _scalar_operand(roles, cuts, shape)
    if roles.direct:
        size = storage_dtype(problem.dtype).itemsize
        vectors, scalars = (_in_place(roles, each, size, 1, target().lanes) for each in (vector, roles.row_tensor))
    elif roles.in_place:
        vectors = _in_place(roles, vector, 1, target().lanes * min(2, vector.channels // target().lanes), vector.group)
    else:
        unit = 4 * target().lanes if roles.lanes_are_groups else 1
        vectors = _operand(roles, vector, _panel_steps(geo.axes, shape, roles.vector_is_wide), shape, unit)
    return vectors, scalars, offsets


def _operand(
    roles: Roles, tensor: Tensor, steps: Four, shape: Four, unit: int, panel: int = 0, count: int = 0
) -> Operand:
    """Return an operand that is packed in lines of so many units, to `count` panels of `panel` bytes."""
    geo = roles.geo
    is_wide = tensor is geo.wide
    moves = [unit * step * axis.stride if is_wide else unit * step for step, axis in zip(steps, geo.axes, strict=True)]
    lane, group = tensor.channel, tensor.group
    if roles.lanes_are_groups:
        lane, group = tensor.group, tensor.group * target().lanes
    points = prod(_window_shape(geo.axes, shape, is_wide))
    return Operand(
        tensor, is_wide, lane, group, wrapped(steps), wrapped(moves), points, unit, panel, panel * count // 4
    )


def _packed_groups(problem: ConvProblem, roles: Roles) -> int:
    """Return how many groups are packed at a time, so that whole cache lines of a position are read."""
    if problem.data_format == "NCX":
        return 1
    channels = target().lanes if roles.lanes_are_groups else max(roles.lane_tensor.channels, roles.row_tensor.channels)
    groups = ceil(problem.groups / channels) if roles.lanes_are_groups else problem.groups
    return max(1, min(groups, STEPS.together_channels // channels))


def _segment(positions: int) -> int:
    """Choose how many positions are summed in registers.

    The error of a sum of sums is least where both are about equally long; each segment costs a pass over the tile.
    """
    return 32 if positions < 1024 else 64 if positions < 8192 else 128


def _scalar_lines(problem: ConvProblem, roles: Roles, scalars: Operand, cuts: list[int]) -> Records:
    """Return the lines of the scalar panels."""
    size = storage_dtype(problem.dtype).itemsize
    lines = np.zeros(len(cuts), Line.dtype)
    lines["valid"] = target().lanes if roles.lanes_are_groups else cuts
    lines["lanes"] = scalars.unit // 4
    lines["source"] = firsts_of(cuts) * roles.row_tensor.channel * size
    lines["place"] = scalars.panel * np.arange(len(lines))
    return lines


def _scalar_operand(roles: Roles, cuts: list[int], shape: Four) -> tuple[Operand, Ints]:
    """Return the scalar tensor's operand and the byte offset of each of its channels."""
    scalar, is_wide = roles.row_tensor, not roles.vector_is_wide
    channels = np.arange(scalar.channels)
    if roles.scalars_in_place:
        return _operand(roles, scalar, scalar.steps, shape, 4), 4 * scalar.channel * channels
    line = target().lanes if roles.lanes_are_groups else max(cuts)
    line = line if line < 8 else 8 * ceil(line / 8)
    # a last line of fewer lanes is written with whole vectors, past its end
    panel = 4 * (prod(_window_shape(roles.axes, shape, is_wide)) * line + -line % 8)
    tiles = np.repeat(np.arange(len(cuts)), cuts)
    offsets = panel * tiles + 4 * (channels - firsts_of(cuts)[tiles])
    return _operand(roles, scalar, _panel_steps(roles.axes, shape, is_wide), shape, 4 * line, panel, len(cuts)), offsets
