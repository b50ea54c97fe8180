"""Packing of tensors of any layout and dtype as panels of float64, for the sums of the reference.

A panel holds, position after position, `width` lanes: channels of a group, or groups. What is no float64 is packed as
f32 first (`kernels.pack.panels`) and then widened.
"""

from __future__ import annotations

import numpy as np

from kernels.dtypes import KINDS
from kernels.emit.compiler import Record, Rows, Vector, inlined, jit, numbers
from kernels.emit.doubles import widen_run
from kernels.emit.intrinsics import copy_bytes, stack_array
from kernels.pack.panels import PANEL, Values, pack_panels

__all__ = ["F64", "Operand", "pack_doubles", "pack_groups", "packed", "packed_values"]

F64 = KINDS["f64"]

_GAP = 8
"""Values after a panel that packing as f32 may write."""


class Operand(Record):
    """A tensor of the dtype `kind` in bytes, and its panels; `strides` and `steps` are along (n, d, h, w).

    Panels of `width` channels are packed, until all `channels` of a group are, `panel` bytes apart. In a `lanewise`
    operand the lanes of a panel are groups: then `channels` is the number of groups, `group` the distance between
    blocks of `width` groups, and each of the `panels` has another channel of its groups. Packed positions are `steps`
    positions apart, and so many of them (`positions`) is a panel.
    """

    kind: int
    start: int
    nbytes: int
    group: int
    groups: int
    channel: int
    channels: int
    width: int
    panel: int
    panels: int
    lanewise: bool
    strides: Vector = numbers(4)
    steps: Vector = numbers(4)
    positions: int


def packed_values(positions: int, width: int) -> int:
    """Return the values between the beginnings of two panels."""
    return positions * width + _GAP


packed = inlined(packed_values)


@jit
def pack_doubles(side: Operand, base: int, group: int, first: Vector, sizes: Vector, to: int, spare: int) -> None:
    """Pack a box of positions of a group, or block of groups, of an image at the address `base`.

    Lanes past the last channel hold anything. At `spare` there is room for as many f32.
    """
    source, width, count, step, dense = base + side.start, side.width, side.panels, side.steps[3], 1
    source += group * side.group
    panels, to_f32 = np.empty(count, PANEL), stack_array(4, np.int64)
    for axis in range(3, -1, -1):
        source += first[axis] * side.strides[axis]
        to_f32[axis] = dense
        dense *= sizes[axis]
    for p in range(count):
        panel = panels[p]
        panel.lanes, panel.unit = width, 4 * width
        panel.valid = min(width, side.channels - (group if side.lanewise else p) * width)
        panel.source, panel.address = p * side.panel, spare + 4 * p * packed(dense, width)
    if side.kind != F64:
        src = Values(side.kind, source, side.strides[:], side.channel, base + side.nbytes)
        pack_panels(src, panels, sizes, to_f32)
    for p in range(count):
        panel = panels[p]
        for d in range(sizes[1]):
            for h in range(sizes[2]):
                place = to + 8 * p * packed(side.positions, width) + 8 * width * (d * side.steps[1] + h * side.steps[2])
                line = panel.address + 4 * width * (d * to_f32[1] + h * to_f32[2])
                if side.kind == F64:
                    line = source + panel.source + d * side.strides[1] + h * side.strides[2]
                    for c in range(panel.valid):
                        for w in range(sizes[3]):
                            here = line + c * side.channel + w * side.strides[3]
                            copy_bytes(place + 8 * (w * step * width + c), here, 8)
                elif step == 1:
                    widen_run(place, line, width * sizes[3])
                else:
                    for w in range(sizes[3]):
                        widen_run(place + 8 * width * w * step, line + 4 * width * w, width)


@jit
def pack_groups(operands: Rows[Operand], base: int, sizes: Vector, to: int, spare: int) -> None:
    """Pack all positions of all groups of an operand, those of each group after the other's."""
    side, first = operands[0], stack_array(4, np.int64)
    for g in range(side.groups):
        at = to + 8 * g * side.panels * packed(side.positions, side.width)
        pack_doubles(side, base, g, first, sizes, at, spare)
