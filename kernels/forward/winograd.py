"""Convolution and ConvTranspose of 3x3 kernels by Winograd's F(2x2, 3x3): 16 products of channels where direct sums
have 36.

Loops, outermost first: (7) groups; (6) depths of dst; (5) slabs of tiles, between which a worker may stop; (4) the 16
products, a slab being transformed for the four of each vertical one; (3) pairs of vectors of dst channels; (2) tiles as
rows of register tiles, the batch-reduce micro-kernels of the direct sums; (1) src channels of each tap in the first
axis. Loops 1 to 5 are compiled. Weights are transformed once for a call, by the units of a first stage.

Each output is a sum in one order whatever slab, unit or register tile it lies in, so its bits depend on neither.

Sums of integers are exact up to 36 C S G = 2**24 with C products of a tap and S and G the largest magnitudes: V and U
are up to 4 S and 9/4 G, U in quarters, and no sum of the outer transforms exceeds 9 C S G. Inf and NaN reach every
element that direct sums give them to, and others of the same tile, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil, prod

import numpy as np

from kernels.arena import address
from kernels.blocks import STEPS, SUMS
from kernels.cache import cached
from kernels.costs import COSTS
from kernels.emit.brgemm import FLUSH, FLUSH_FIRST, Batch, Element, micro_table
from kernels.emit.compiler import Record, Records, Rows, Vector, jit, row_of
from kernels.emit.intrinsics import address_of, fill_zero, stack_array, stack_record
from kernels.emit.winograd import FACTORS, TAPS, put_outputs, transform_taps
from kernels.forward.operands import Share
from kernels.forward.output import bring_bias, write
from kernels.forward.records import Call, Pass
from kernels.forward.share import LANES
from kernels.forward.tiles import Order, cut_units, way_cycles
from kernels.gradient.roles import lane_blocks
from kernels.gradient.tiles.records import Block
from kernels.pack.panels import PANEL, Values, pack_panels
from kernels.plan import Stop, Storage, Unit
from kernels.problem import ConvProblem, Dims
from kernels.winograd.rules import WinogradKernel, plane_products, plane_tiles
from kernels.winograd.tiles import (
    GAP,
    PAIR,
    PRODUCTS,
    VECTOR,
    WIDTH,
    Side,
    TileSlab,
    cut_slabs,
    multiply,
    side_of,
    tiles_along,
    tiles_of,
    transform_tiles,
)

__all__ = ["ForwardWinograd"]

KERNEL = TAPS * TAPS
BATCH = Batch.dtype


class Tiling(Record):
    """The facts of a unit; sizes are in bytes.

    A group has so many src `channels`, a kernel so many planes (`depths`), whose taps are rotated by 180 degrees if
    `turned`. Outputs are written directly if `in_place`, and otherwise staged first. Sums of a tile's products have
    `c_row`, those of all tiles `c_plane` for each of the 16.
    """

    kind: int
    turned: bool
    channels: int
    depths: int
    in_place: bool
    c_row: int
    c_plane: int


@jit
def transform_filters(
    shares: Rows[Tiling], passes: Rows[Pass], calls: Rows[Call], low: int, high: int, to: int
) -> None:  # fmt: skip
    """Transform the weights of the vectors of dst channels from `low` to `high`, counted through all groups.

    Each becomes a block [product][depth][src channel][lanes]; lanes past the channels hold anything. The call's
    `panels` have room for the taps of a vector as f32, [tap][src channel][lanes].
    """
    share, one, room, panels = shares[0], passes[0], calls[0].panels, stack_array(1, PANEL)
    weights, begin, panel, line = one.weights, calls[0].weights, panels[0], share.channels * VECTOR
    vectors, block = (one.channels + WIDTH - 1) // WIDTH, PRODUCTS * share.depths * line
    counts, steps, places = np.ones(4, np.int64), stack_array(4, np.int64), stack_array(4, np.int64)
    run, other = (3, 2) if weights.tap < weights.src_channel else (2, 3)  # the nearer neighbours are the run
    counts[run], steps[run], places[run] = KERNEL, weights.tap, -line if share.turned else line
    counts[other], steps[other], places[other] = share.channels, weights.src_channel, VECTOR
    for v in range(low, high):
        first = v % vectors * WIDTH
        panel.lanes, panel.valid, panel.source = WIDTH, min(WIDTH, one.channels - first), 0
        panel.unit, panel.address = 1, room + (line * (KERNEL - 1) if share.turned else 0)
        for depth in range(share.depths):
            source = begin + v // vectors * weights.group + first * weights.dst_channel + depth * KERNEL * weights.tap
            src = Values(share.kind, source, steps, weights.dst_channel, begin + weights.nbytes)
            pack_panels(src, panels, counts, places)
            transform_taps(room, line, share.channels, to + (v - low) * block + depth * line, share.depths * line)


@jit
def _put(share: Tiling, call: Call, slab: TileSlab, vector: int, vectors: int, place: Vector) -> None:
    """Turn sums into outputs of some `vectors` of channels.

    `place` has the address of the slab's first output, and the bytes between its frames, lines and columns.
    """
    frames, lines, columns = slab.high[0] - slab.low[0], slab.high[1] - slab.low[1], slab.high[2] - slab.low[2]
    last = tiles_along(slab, 0, FACTORS - 1)
    across, fourth_across = (1, 1) if slab.odd[1] else (columns, columns)
    along, fourth_along = (frames * lines, frames * last) if slab.odd[1] else (1, 1)
    plane, row, source = share.c_plane, share.c_row, call.products + vector * VECTOR
    bias = source + PRODUCTS * plane
    for frame in range(frames):
        for line in range(lines):
            number = (frame * lines + line) * across
            # what the fourth product would add is left out with the line below
            fourth = (frame * last + line) * fourth_across if line < last else 0
            below = line + 1 < lines or slab.odd[0] == 0
            to = place[0] + frame * place[1] + 2 * line * place[2]
            for column in range(columns):
                beside = column + 1 < columns or slab.odd[1] == 0
                other = fourth + (column * fourth_along if line < last else 0)
                put_outputs(
                    source + (number + column * along) * row, source + 12 * plane + other * row, plane, vectors, bias,
                    to + 2 * column * place[3], place[3] if beside else 0, place[2] if below else 0,
                )  # fmt: skip


@jit
def _write(share: Tiling, one: Pass, call: Call, slab: TileSlab) -> None:
    """Turn the sums of a slab into outputs and write them, rounded once."""
    dst, place, counts, buffer = one.dst, stack_array(4, np.int64), stack_array(4, np.int64), stack_array(32, np.int64)
    to, strides, total = call.dst + dst.start, dst.strides, (one.channels + WIDTH - 1) // WIDTH
    to += slab.low[0] * strides[0] + 2 * slab.low[1] * strides[2] + 2 * slab.low[2] * strides[3]
    if share.in_place:
        place[0], place[1], place[2], place[3] = to, strides[0], strides[2], strides[3]
        _put(share, call, slab, 0, total, place)
        return
    counts[0], counts[1] = slab.high[0] - slab.low[0], 1
    counts[2] = 2 * (slab.high[1] - slab.low[1]) - slab.odd[0]
    counts[3] = 2 * (slab.high[2] - slab.low[2]) - slab.odd[1]
    for vector in range(0, total, 2):
        vectors = min(2, total - vector)
        lanes = vectors * WIDTH
        valid = min(lanes, one.channels - vector * WIDTH)
        place[0], place[3] = call.sums, 4 * lanes
        place[2] = counts[3] * place[3]
        place[1] = counts[2] * place[2]
        _put(share, call, slab, vector, vectors, place)
        out = Values(share.kind, to + vector * WIDTH * dst.channel, strides[:], dst.channel, 0)
        write(out, call.sums, lanes, valid, counts, address_of(buffer))


@jit
def add_products(
    table: Vector, sides: Rows[Side], blocks: Rows[Block], slabs: Rows[TileSlab], shares: Rows[Tiling],
    passes: Rows[Pass], calls: Rows[Call], elements: Rows[Element],
) -> None:  # fmt: skip
    """Compute the tiles of some slabs at one depth of dst, in one group.

    `sides` are src for each tap in the first axis that this depth meets, and `elements` what is summed of all panels.
    The call's `weights` are transformed, its `products` hold sums and the bias, its `sums` staged outputs.
    """
    share, one, call, batch, zeros = shares[0], passes[0], calls[0], stack_record(BATCH), stack_array(16, np.int64)
    b_plane, vectors = share.depths * share.channels * VECTOR, (one.channels + WIDTH - 1) // WIDTH
    batch.a_step, batch.b_step, batch.b_vector = 4, VECTOR, PRODUCTS * b_plane
    batch.c_row, batch.totals_row, batch.valid, batch.start = share.c_row, share.c_row, WIDTH, address_of(zeros)
    batch.elements, batch.count = address_of(elements), elements.shape[0]
    bring_bias(share.kind, one, call, 0, 0, vectors * WIDTH, call.products + PRODUCTS * share.c_plane)
    if sides.shape[0] == 0:
        fill_zero(call.products, PRODUCTS * share.c_plane)
    for s in range(slabs.shape[0]):
        slab, frames = slabs[s], slabs[s].high[0] - slabs[s].low[0]
        for product in range(PRODUCTS if sides.shape[0] > 0 else 0):
            y, x = product // FACTORS, product % FACTORS
            for tap in range(sides.shape[0] if x == 0 else 0):
                transform_tiles(sides[tap], blocks, slab, y)
            count = frames * tiles_along(slab, 0, y) * tiles_along(slab, 1, x)
            batch.a_row = sides[0].line
            for vector in range(0, vectors, 2):
                batch.a = sides[0].panels + x * sides[0].plane
                batch.b = call.weights + product * b_plane + vector * batch.b_vector
                batch.c = call.products + product * share.c_plane + vector * VECTOR
                batch.totals = call.products if elements.shape[0] > 1 else 0
                multiply(table, batch, count, min(2, vectors - vector))
        _write(share, one, call, slab)


class ForwardWinograd(WinogradKernel):
    """Convolution and ConvTranspose by Winograd's F(2x2, 3x3)."""

    name = "forward_winograd"
    of = "Convolution", "ConvTranspose"

    def _slower(self, problem: ConvProblem) -> str | None:
        nbytes = problem.groups * _vectors(problem) * _block(problem)
        if nbytes > SUMS.winograd_weights_bytes:
            return (
                f"algorithm is auto; winograd pays up to {SUMS.winograd_weights_bytes} bytes of transformed weights,"
                f" and they have {nbytes}"
            )
        return super()._slower(problem)

    def cycles(self, problem: ConvProblem) -> tuple[float, float]:
        """Estimate the cycles of Winograd and of direct sums, which skip taps in the padding."""
        dims = problem.dims
        src, dst = ceil(dims.src_channels / WIDTH), ceil(dims.dst_channels / WIDTH)
        tiles, products = dims.n * plane_tiles(dims.dst[1:]), dims.n * plane_products(dims.dst[1:])
        frames, filters = dims.met(0), dims.kernel[0] * dims.src_channels * dst
        cycles = frames * products * dims.src_channels * (dst // 2 + COSTS.single * (dst % 2))
        cycles += COSTS.tiled * tiles * (frames * src + dims.dst[0] * dst)
        cycles += COSTS.filtered * filters
        if problem.data_format == "NCX":
            cycles += COSTS.turned * dims.n * (frames * src * prod(dims.src[1:]) + dst * prod(dims.dst))
        met = prod(dims.met(axis) / max(1, dims.kernel[axis] * dims.narrow[axis]) for axis in range(3))
        return dims.groups * cycles, way_cycles(problem) * met + COSTS.packed * dims.groups * filters

    def units(self, problem: ConvProblem, workers: int) -> tuple[list[Unit], int]:
        """Share out the weights by vectors of dst channels, then dst in whole tiles."""
        total = problem.groups * _vectors(problem)
        wanted = max(1, min(workers, total, prod(problem.weights_shape) // STEPS.winograd_unit_weights))
        each = ceil(total / wanted)
        parts = ceil(total / each)  # equal shares of the scratch; the last one may be used in part
        first = [Unit(i, 0, None, None, 0, (i * each, min(total, (i + 1) * each))) for i in range(parts)]
        second = [replace(unit, index=parts + unit.index, stage=1) for unit in _dst_units(problem, workers)]
        return first + second, parts * each * _block(problem)

    def run(
        self, problem: ConvProblem, unit: Unit, inputs: Sequence[Storage], output: Storage,
        scratch: Storage | None, stop: Stop,
    ) -> bool:  # fmt: skip
        """Transform some of the weights, or compute the dst box of one unit."""
        if stop():
            return False
        assert scratch is not None
        return self.share(problem, unit.part).run(inputs, scratch if unit.offset is None else output, stop, scratch)

    @cached
    def share(self, problem: ConvProblem, part: tuple[int, ...]) -> _FilterShare | _Share:
        """Prepare a unit's tables once."""
        return _FilterShare(problem, part) if len(part) == 2 else _Share(problem, part)


def _dst_units(problem: ConvProblem, workers: int) -> list[Unit]:
    """Share out images, groups, then lines of tiles; few tiles by groups and dst channels, for each of which they are
    transformed anew."""
    dims, lines = problem.dims, (3, 4, 5)
    grid = (problem.n, dims.groups, dims.dst_channels, *dims.dst), (1, 1, LANES, 1, 2, 2)
    wanted = int(max(1, min(4 * workers, problem.macs // STEPS.unit_macs)))
    orders: list[Order] = [((0, 1), lines), ((0, 1), (2,), lines)]
    if problem.n * dims.groups * dims.dst[0] * plane_tiles(dims.dst[1:]) < STEPS.winograd_slab_tiles * wanted:
        wanted = min(wanted, workers)
        orders.insert(0, ((1, 2, 0),))
    return cut_units(problem, grid, orders, wanted, workers)


def _vectors(problem: ConvProblem) -> int:
    """Count the vectors of dst channels of a group."""
    return ceil(problem.dims.dst_channels / WIDTH)


def _block(problem: ConvProblem) -> int:
    """Return the bytes of the transformed weights of one vector of dst channels."""
    return PRODUCTS * problem.dims.kernel[0] * problem.dims.src_channels * VECTOR


class _FilterShare(Share):
    """The weights of some vectors of dst channels, which are transformed once for a call."""

    def __init__(self, problem: ConvProblem, part: Sequence[int]) -> None:
        dims = problem.dims
        super().__init__(problem, (0, dims.n, 0, dims.groups, 0, dims.dst_channels, *(0, 0) * 3))
        self.low, self.high = part
        self.floats["panels"] = KERNEL * dims.src_channels * WIDTH
        self.part = self.one_pass(0, dims.groups, dims.dst_channels)
        self.share = _tiling(self, in_place=False, c_row=0, c_plane=0)

    def run(
        self, inputs: Sequence[Storage], output: Storage, stop: Stop, scratch: Storage | None = None
    ) -> bool:  # fmt: skip
        """Transform them to their place in the `output`, which is the scratch of all units."""
        call, block = self.call(inputs, output), _block(self.problem)
        step = max(1, STEPS.unit_sums_bytes // block)
        for first in range(self.low, self.high, step):
            if stop():
                return False
            last, to = min(self.high, first + step), address(output) + first * block
            transform_filters(self.share, self.part, call, first, last, to)
        return True


class _Share(Share):
    """Some images, groups, dst channels and positions of dst."""

    def __init__(self, problem: ConvProblem, part: Sequence[int]) -> None:
        super().__init__(problem, part)
        dims, out = self.dims, self.channels[1] - self.channels[0]
        images, self.depths, *plane = self.spans
        met = [_met(dims, depth) for depth in range(*self.depths)]
        taps = max(1, *map(len, met)) if met else 1

        vectors, dst_vectors = ceil(dims.src_channels / WIDTH), ceil(out / WIDTH)
        a_row, c_row = (count * VECTOR + GAP for count in (vectors, dst_vectors))
        tiles = [(low // 2, ceil(high / 2)) for low, high in plane]
        limit = max(1, STEPS.unit_sums_bytes // (PRODUCTS * (taps * a_row + c_row)))
        self.slabs = cut_slabs([images, *tiles], dims.dst[1:], min(STEPS.winograd_slab_tiles, limit))
        most = int(tiles_of(self.slabs).max(initial=0))

        self.blocks = lane_blocks(dims.src_channels)
        pads = dims.pads[1:] if dims.gathers else tuple(2 - pad for pad in dims.pads[1:])
        side = side_of(
            problem, dims.src_channels, dims.src, self.slabs, wide=True, first=0, step=1, frames=1, pads=pads,
            line=a_row, block=PAIR, plane=most * a_row + GAP,
        )  # fmt: skip
        stage, panels, self._tables = len(self.blocks) * int(side["staged"][0]), FACTORS * int(side["plane"][0]), []
        for some in met:
            sides, number = side.repeat(len(some)), np.arange(len(some))
            sides["start"] += np.array([place for _, place in some], np.int64) * side["strides"][:, 1]
            sides["stage"], sides["panels"] = number * stage, number * panels
            self._tables.append((sides, self._elements([tap for tap, _ in some], panels)))

        c_plane, in_place = most * c_row + GAP, problem.dtype == "f32" and self.near_dst and out % WIDTH == 0
        self.share = _tiling(self, in_place=in_place, c_row=c_row, c_plane=c_plane)
        self.floats["source"], self.floats["panels"] = taps * stage // 4, taps * panels // 4
        self.floats["products"] = PRODUCTS * c_plane // 4 + ceil(out / LANES) * LANES
        self.floats["sums"] = 0 if in_place else most * PAIR
        macs = problem.macs * most * 4 // max(1, problem.groups * prod(dims.dst))
        self._batch = max(1, STEPS.batch_macs // max(1, macs))

    def run(
        self, inputs: Sequence[Storage], output: Storage, stop: Stop, scratch: Storage | None = None
    ) -> bool:  # fmt: skip
        """Compute the share with the transformed weights in `scratch`; False when `stop` ended it early."""
        assert scratch is not None
        call, (low, high) = self.call(inputs, output), self.channels
        for group in range(self.g0, self.g1):
            part = self.one_pass(group - self.g0, 1, high - low, low)
            vector = group * _vectors(self.problem) + low // WIDTH
            call["weights"] = address(scratch) + vector * _block(self.problem)
            part["dst"]["start"] += self.depths[0] * part["dst"]["strides"][:, 1]
            for sides, elements in self._tables:
                sides = sides.copy()
                sides["start"] += call["src"] + part["src"]["start"]
                sides["end"] += call["src"]
                sides["stage"] += call["source"]
                sides["panels"] += call["panels"]
                for first in range(0, len(self.slabs), self._batch):
                    if stop():
                        return False
                    slabs = self.slabs[first : first + self._batch]
                    add_products(micro_table(), sides, self.blocks, slabs, self.share, part, call, elements)
                part["dst"]["start"] += part["dst"]["strides"][:, 1]
        return True

    def _elements(self, taps: Sequence[int], panels: int) -> Records:
        """List what a product sums: the src channels of each tap in the first axis, in parts of `SUMS.flush_steps`.

        `panels` are the bytes of a tap.
        """
        channels = self.problem.dims.src_channels
        parts = ceil(channels / SUMS.flush_steps)
        firsts = [channels * i // parts for i in range(parts + 1)]
        table = np.zeros(len(taps) * parts, Element.dtype)
        for row, (place, part) in zip(table, np.ndindex(len(taps), parts), strict=True):
            first, end = firsts[part], firsts[part + 1]
            row["a"] = place * panels + 4 * first
            row["b"] = (taps[place] * channels + first) * VECTOR
            row["steps"] = end - first
        table["flush"][:-1] = FLUSH
        table["flush"][: len(table) > 1] = FLUSH_FIRST
        return table


def _tiling(share: Share, *, in_place: bool, c_row: int, c_plane: int) -> Records:
    """Return the facts of a share."""
    dims = share.dims
    return row_of(
        Tiling, kind=share.kind, turned=not dims.gathers, channels=dims.src_channels, depths=dims.kernel[0],
        in_place=in_place, c_row=c_row, c_plane=c_plane,
    )  # fmt: skip


def _met(dims: Dims, depth: int) -> list[tuple[int, int]]:
    """Return the taps that a depth of dst meets along the first axis, each with the depth of src."""
    found = []
    for tap in range(dims.kernel[0]):
        shift = tap * dims.dilations[0] - dims.pads[0]
        place, rest = (depth * dims.strides[0] + shift, 0) if dims.gathers else divmod(depth - shift, dims.strides[0])
        if rest == 0 and 0 <= place < dims.src[0]:
            found.append((tap, place))
    return found
