"""One unit's share of a forward operation, as tables for the compiled loops: made once, used for every call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil, prod
from typing import Literal

import numpy as np

from kernels.blocks import STEPS, SUMS
from kernels.emit.brgemm import MASKS, MICRO, ROWS, SKIPS, micro_table
from kernels.emit.compiler import Records, row_of, values_of
from kernels.emit.depthwise import (
    DTYPES_IN_PLACE,
    GROUP_LINES,
    GROUP_PIXELS,
    LINES,
    PIXELS,
    depthwise_entry,
    grouped,
    line_taps,
)
from kernels.forward.axes import AxisTable, axis_tables, is_plain, numbers_of, plain, tables_of
from kernels.forward.gather import gather, pack_bias
from kernels.forward.operands import Share
from kernels.forward.records import (
    GatherShare,
    Grid,
    LaneGroups,
    LineSums,
    SrcReading,
    SumOrder,
    WeightPanel,
)
from kernels.forward.scatter import Scatter
from kernels.forward.weights import pack_weights
from kernels.pack.panels import padded, spread
from kernels.plan import Stop, Storage
from kernels.problem import ConvProblem
from kernels.target import target

DOTS = target().dots == "avx512bf16"

if DOTS:
    from kernels.forward.pairs import exponent_of, pack_pairs, pair_boxes

__all__ = ["LANES", "Way", "share"]

Way = Literal["gather", "lanes", "scatter"]

FEW_WORDS = 32
"""Words of a tap below which it pays to let taps and channels be one run."""

LATENCY = 5
"""Rows of two vectors that hide how long a multiply-add takes."""

WIDTH = target().lanes
LANES = 2 * WIDTH


class _Gather(Share):
    """Every dst pixel gathers its taps; lanes are dst channels or groups."""

    dots = joined = rounds = by_lines = grouped = False

    def __init__(self, problem: ConvProblem, part: Sequence[int], *, lanewise: bool) -> None:
        super().__init__(problem, part)
        dims, channels, self.lanewise = self.dims, self.dims.src_channels, lanewise
        self.many = dims.dst_channels if lanewise else 1
        self.limit = SUMS.flush_steps * (16 if problem.dtype == "bf16" else 1)
        self.numbers, tables = numbers_of(dims), self._tables()
        if lanewise:
            self._read_groups()
        else:
            self._read_channels()
        self.tables = self._merge(tables)
        words, taps = self.words, len(self.numbers)
        self.line = 4 * ceil((self.g1 - self.g0) * self.many / WIDTH) * WIDTH if lanewise else 4 * WIDTH
        self.block_bytes = self.line * words * taps
        kernel = [table.kernel for table in self.tables[1:]]
        row = self._line_row() if self.by_lines else self._row()
        group, within_line = self._flushes(kernel[row - 1 if self.by_lines else 2], words)
        line = 4 * self.lanes // (1 + self.dots) if self.grouped else self.line if lanewise else 4
        pixel_bytes = self.pixel * line
        grid = self._grid(self._band_pixels(pixel_bytes))
        self.bands = prod(ceil((high - low) / step) for (low, high), step in zip(self.spans, grid, strict=True))
        if self.packed:
            self.floats["source"] = self._points(grid) * pixel_bytes // 4 + WIDTH * 4
        self.floats["sums"] = 0 if self.direct else prod(grid) * self.lanes
        self.floats["products"] = LANES * max(ROWS["f32"].values())
        micro = "dots" if self.dots else "lanes" if lanewise else "f32"
        rows, skips = [ROWS[micro][vectors] for vectors in ((1, 1) if lanewise else (1, 2))], SKIPS
        if self.by_lines:
            rows = list(GROUP_PIXELS["dots" if self.dots else "f32"] if self.grouped else PIXELS)
            skips = rows[0]  # pixels that a line does not meet cost nothing
        lows, highs = zip(*self.spans, strict=True)
        order = 1 if (np.diff(self.numbers) == 1).all() else -1 if (np.diff(self.numbers) == -1).all() else 0
        panel = values_of(
            WeightPanel, words=words, line=self.line, tap_bytes=self.line * words, block_bytes=self.block_bytes,
            kernel=kernel, order=order,
        )  # fmt: skip
        src = values_of(
            SrcReading, word=self.line if lanewise else 4, packed=self.packed, joined=self.joined,
            pixel_bytes=pixel_bytes, staged=False,
        )  # fmt: skip
        sums = values_of(
            SumOrder, chunk=ceil(words / ceil(words / self.limit)), group=group, within_line=within_line,
            flushes=problem.dtype != "bf16" and taps * words > self.limit, most=0,
        )  # fmt: skip
        together = STEPS.band_bytes // (2 * self.block_bytes) if self.direct and not lanewise else 1
        lanes = values_of(
            LaneGroups, lanewise=lanewise, grouped=self.grouped, multiplier=self.many,
            step=self.lanes * max(1, together),
        )  # fmt: skip
        lines = values_of(
            LineSums, kernel=self._line_entry(micro) if self.by_lines else 0,
            pairs=self._line_entry("pairs") if self.grouped and self.dots else 0,
            width=self.tables[row].src, ahead=self.by_lines and not self.packed and row == 3,
        )  # fmt: skip
        self.share = row_of(
            GatherShare, kind=self.kind, micro=MICRO[micro], limits=rows,
            loops=[*(axis for axis in range(4) if axis != row), row], channels=channels,
            skips=skips, direct=self.direct, rounds=self.direct or self.rounds,
            covered=all(table.covered for table in tables),
            grid=values_of(Grid, low=lows, high=highs, step=grid),
            panel=panel, src=src, sums=sums, lanes=lanes, lines=lines,
        )  # fmt: skip
        self.axes = tables_of(self.tables)
        self.parts = list(self._passes())
        self.boxes = pair_boxes(problem, self.numbers, words) if self.dots and not lanewise else None
        values = (self.g1 - self.g0) * prod(high - low for low, high in [self.channels, *self.spans])
        macs = problem.macs * values // max(1, problem.dst_channels * problem.n * prod(dims.dst))
        self.batch = max(1, STEPS.batch_macs * self.bands * len(self.parts) // max(1, macs))

    def _tables(self) -> tuple[AxisTable, ...]:
        """Return the tables of the axes; src lines between those that a single tap meets are left out."""
        tables = list(axis_tables(self.dims))
        for axis in (1, 2):
            step = tables[axis].src_step
            if len(tables[axis].taps) == 1 and step > 1:
                tables[axis], first = tables[axis].sparse()
                start, nbytes, group, strides, channel = self.src
                steps = [each * (step if number == axis else 1) for number, each in enumerate(strides)]
                self.src = start + first * strides[axis], nbytes, group, steps, channel
        return tuple(tables)

    def _read_channels(self) -> None:
        """Choose how to read src where lanes are dst channels, and where sums go (see `SrcReading`, `GatherShare`).

        With `dots` a word is two bf16; a packed position has `pixel` words.
        """
        dims, channels, f32 = self.dims, self.dims.src_channels, self.problem.dtype == "f32"
        self.dots = dots = DOTS and self.problem.dtype == "bf16"
        in_place = self.near and (channels % 2 == 0 if dots else f32)
        self.words = words = ceil(channels / 2) if dots else channels
        few, whole = words < FEW_WORDS, MASKS or (self.channels[1] - self.channels[0]) % WIDTH == 0
        self.packed = not in_place or (few and dims.groups > 1)
        self.pixel = spread(words) if dots else padded(channels)
        self.joined = few and (self.pixel == words if self.packed else dims.groups == 1)
        self.direct = self.near_dst and (f32 or dots) and whole
        self.rounds = dots and not self.near_dst

    def _read_groups(self) -> None:
        """Choose the same where lanes are groups, or dst channels of each; a packed position has `pixel` lines."""
        dims, channels, dtype = self.dims, self.dims.src_channels, self.problem.dtype
        dots, whole = DOTS and dtype == "bf16", dims.groups * self.many >= WIDTH
        self.grouped = same = grouped(channels, dims.dst_channels, dots=dots)
        lines = channels == 1 and len(self.numbers) <= self.limit
        read = dots if same else lines and dtype in DTYPES_IN_PLACE
        # the last vector may only be moved back into src where dst has the same lanes
        in_place = self.near and self.near_dst and (dtype == "f32" or read)
        in_place = in_place and (channels * self.many == 1 or same) and whole
        self.packed, self.by_lines = not in_place, same or lines
        self.dots = dots = dots and same
        self.words, self.pixel = channels // 2 if dots else channels, 1 if same else channels
        stored = in_place or (dtype == "f32" and not same)
        self.direct = self.near_dst and stored and whole
        self.rounds = dots and not self.near_dst

    def _line_entry(self, micro: str) -> int:
        """Return the micro-kernel of lines of taps."""
        if not self.grouped:
            return depthwise_entry("pixels", "f32" if self.packed else self.problem.dtype)
        one = micro == "dots" and self.many == WIDTH
        return depthwise_entry("groups", "f32" if micro == "lanes" else "one_dots" if one else micro)

    def _line_row(self) -> int:
        """Choose the axis along which lines of taps are summed, and note in its phases how many at once."""
        row = 3
        while row > 1 and self.tables[row].kernel == 1 and max(table.kernel for table in self.tables) > 1:
            row -= 1
        table = self.tables[row]
        for phase in table.phases:
            some = slice(int(phase["first"]), int(phase["first"] + phase["taps"]))
            begins = table.begins[some]
            follow = (np.diff(begins) == 1).all() and (np.diff(table.taps["number"][some]) == 1).all()
            one = line_taps(int(phase["taps"]), table.src_step, GROUP_LINES if self.grouped else LINES)
            if self.grouped:  # what is summed at once decides bits, so all positions meet some taps of it
                last = (table.dst - 1 - int(phase["dst"])) // table.dst_step * table.src_step
                follow = follow and begins[0] > -one and begins[-one] + last < table.src
            phase["adjacent"] = one if follow else 1
        return row

    @property
    def lanes(self) -> int:
        """The lanes that are done at a time."""
        if not self.lanewise:
            return LANES
        lanes, most = (self.g1 - self.g0) * self.dims.dst_channels, STEPS.together_lanes
        most = LANES if self.grouped and self.packed else most
        return max(1, min(most // WIDTH, ceil(lanes / WIDTH))) * WIDTH

    def _merge(self, tables: tuple[AxisTable, ...]) -> tuple[AxisTable, ...]:
        """Merge adjacent axes that neither the taps nor the memory layout tell apart; update `spans` to match."""
        found, spans = list(tables), self.spans
        for axis in (2, 1, 0):
            size = found[3].dst
            dense = all(data[3][axis] == size * data[3][3] for data in (self.src, self.dst))
            if not (is_plain(found[axis]) and is_plain(found[3]) and dense) or spans[3] != (0, size):
                break
            found[axis], found[3] = plain(1), plain(found[axis].dst * size)
            spans[axis], spans[3] = (0, 1), (spans[axis][0] * size, spans[axis][1] * size)
        return tuple(found)

    def _row(self) -> int:
        """Choose the axis along which tiles have their rows: the last one unless another one fills them better."""

        def cost(axis: int) -> float:
            low, high = self.spans[axis]
            count = max(1, ceil((high - low) / self.tables[axis].dst_step))
            rows = count / ceil(count / ROWS["f32"][2])
            return max(LATENCY, rows) / rows

        best = min(range(3, -1, -1), key=cost)
        return best if cost(best) < 0.9 * cost(3) else 3

    def _flushes(self, columns: int, words: int) -> tuple[int, bool]:
        """Return after how many lines of `columns` taps sums begin anew, or if True, after how many taps of a line."""
        if words > self.limit:
            return 1, False
        if columns * words <= self.limit:
            return self.limit // (columns * words), False
        return self.limit // words, True

    def _band_pixels(self, pixel_bytes: int) -> int:
        """Return the dst pixels of a band: src should stay in L2 while all lanes read it, sums that are not dst too.

        Bands are larger where taps are far apart, because each band packs all the src that it reaches.
        """
        dims = self.dims
        phases = prod(len(table.phases) for table in self.tables)
        if self.direct and self.lanewise and not self.grouped and not self.packed and phases == 1:
            return max(1, prod(dims.dst))  # lines that several taps meet stay in L1, `together_lanes` of them
        groups = 1 if self.lanewise or self.packed else dims.groups
        src, dst = prod(table.src for table in self.tables), prod(table.dst for table in self.tables)
        per_pixel = pixel_bytes * groups * src // max(1, dst)
        least = STEPS.band_pixels if self.block_bytes > STEPS.band_bytes // 4 else STEPS.band_pixels // 8
        pixels = max(least, STEPS.band_bytes // max(1, per_pixel))
        pixels = pixels if self.direct else min(pixels, STEPS.band_bytes // (4 * self.lanes))
        reach = prod(min(table.src, table.spread) for table in self.tables) if self.packed else 1
        return max(pixels, min(STEPS.reach_pixels, reach))

    def _points(self, grid: Sequence[int]) -> int:
        """Count the src positions that the taps of a band reach."""
        found = 1
        for step, table in zip(grid, self.tables, strict=True):
            found *= min(table.src, (step // table.dst_step) * table.src_step + table.spread)
        return found

    def _grid(self, pixels: int) -> list[int]:
        """Cut the dst positions into bands: whole lines where they are short, several images where those are small."""
        grid: list[int] = []
        for low, high in reversed(self.spans):
            parts = ceil((high - low) / max(1, pixels))
            step = max(1, ceil((high - low) / max(1, parts)))
            grid.insert(0, step)
            pixels //= step
        return grid

    def _passes(self) -> Iterator[Records]:
        """Cut the share so that the packed weights of a pass have room; those of lanes have."""
        (low, high), groups = self.channels, self.g1 - self.g0
        if self.lanewise:
            self.floats["panels"] = (self.block_bytes + self.line) // 4
            yield self.one_pass(0, 1, groups * self.many)
            return
        # with one band every weight is read once, and soon: let it be while it is in a cache
        limit = SUMS.weights_bytes if self.bands > 1 else SUMS.weights_bytes // 8
        room = max(2, limit // max(1, self.block_bytes) // 2 * 2)
        together, blocks = max(1, room // ceil((high - low) / WIDTH)), min(room, ceil((high - low) / WIDTH))
        self.floats["panels"] = min(groups, together) * blocks * (self.block_bytes // 4 + WIDTH)
        for g in range(0, groups, together):
            for first in range(low, high, room * WIDTH):
                yield self.one_pass(g, min(groups - g, together), min(high - first, room * WIDTH), first)

    def run(self, inputs: Sequence[Storage], output: Storage, stop: Stop) -> bool:
        """Compute pass by pass and band by band."""
        call = self.call(inputs, output)
        for part in self.parts:
            if self.boxes is None:
                pack_weights(self.share, part, call, self.numbers)
            else:
                pack_pairs(self.share, part, call, *self.boxes)
            kept = pack_bias(self.share, part, call)
            least = exponent_of(self.share, part, call) if self.dots and kept else 0
            for band in range(0, self.bands, self.batch):
                if stop():
                    return False
                end = min(self.bands, band + self.batch)
                gather(micro_table(), self.share, part, call, self.axes, band, end, least)
        return True


def share(problem: ConvProblem, way: Way, part: Sequence[int]) -> Share:
    """Prepare a unit's share."""
    if way == "scatter":
        return Scatter(problem, part)
    return _Gather(problem, part, lanewise=way == "lanes")
