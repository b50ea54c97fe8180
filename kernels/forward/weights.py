"""Packing of weights as f32 panels, or of those of lanes, which may be pairs of bf16."""

from __future__ import annotations

import numpy as np

from kernels.emit.brgemm import MICRO
from kernels.emit.compiler import Rows, Vector, jit
from kernels.emit.intrinsics import (
    F32,
    address_of,
    copy_panel,
    keep_alive,
    load,
    put_value,
    stack_array,
    store_value,
    stored_size,
    touch,
)
from kernels.forward.records import Call, Filter, GatherShare, Pass
from kernels.pack.lines import move16
from kernels.pack.panels import Panel, Values, pack_panels, transpose_run
from kernels.target import target

__all__ = ["pack_weights"]

WIDTH, DOTS_PLACE, PANEL = target().lanes, MICRO["dots"], Panel.dtype

KERNEL_TAPS = 576
"""Taps of the kernels that are transposed at a time: they stay in L1 until each tap is copied to its panel."""


@jit
def _pack_kernels(share: GatherShare, numbers: Vector, valid: int, weights: Filter, source: int, panel: int) -> None:
    """Pack a panel of weights whose taps are adjacent: transpose the kernels of some src channels, then set taps apart.

    Panels of taps are often powers of two apart, where a few lines at a time push each other out of L1.
    """
    line, taps = 4 * WIDTH, numbers.shape[0]
    some, whole = max(1, KERNEL_TAPS // taps), weights.src_channel == taps * weights.tap
    buffer, layout = np.empty(some * taps * WIDTH, np.float32), share.panel
    for first in range(0, share.channels, some):
        place, count = address_of(buffer), min(some, share.channels - first)
        for c in range(1 if whole else count):
            kernels = source + (first + c) * weights.src_channel
            for ahead in range(0, 0 if whole else valid * weights.dst_channel, 64):
                touch(kernels + 2 * weights.src_channel + ahead)  # hardware does not prefetch across pages
            transpose_run(
                share.kind, WIDTH, valid, place + c * taps * line, line, kernels, weights.dst_channel,
                count * taps if whole else taps,
            )  # fmt: skip
        for tap in range(taps):
            to = panel + numbers[tap] * layout.tap_bytes + first * line
            copy_panel(F32, WIDTH, to, line, place + tap * line, taps * line, count)
    keep_alive(buffer)


@jit
def _pack_lanes(share: GatherShare, one: Pass, call: Call, numbers: Vector) -> None:
    """Pack the weights of lanes, a vector of them at a time, which stays in L1: lines of all lanes are far apart."""
    weights, layout, taps, many = one.weights, share.panel, numbers.shape[0], share.lanes.multiplier
    line, words, pairs = 4 * WIDTH, layout.words, share.micro == DOTS_PLACE
    buffer = np.zeros(taps * words * WIDTH, np.float32)
    for first in range(0, one.channels, WIDTH):
        for lane in range(first, min(first + WIDTH, one.channels)):
            source = call.weights + weights.start + lane // many * weights.group + lane % many * weights.dst_channel
            for c in range(share.channels):
                to = address_of(buffer) + 4 * (lane - first) + (c // 2 * line + c % 2 * 2 if pairs else c * line)
                if pairs and layout.order != 0:
                    place = source + c * weights.src_channel
                    move16(to + numbers[0] * words * line, layout.order * words * line, place, weights.tap, taps)
                    continue
                for tap in range(taps):
                    value = load(share.kind, source + c * weights.src_channel + tap * weights.tap)
                    if pairs:
                        put_value(share.kind, to + numbers[tap] * words * line, value)
                    else:
                        store_value(to + numbers[tap] * words * line, value)
        for tap in range(taps):
            panel, place = call.panels + tap * layout.tap_bytes + 4 * first, address_of(buffer) + tap * words * line
            copy_panel(F32, WIDTH, panel, layout.line, place, line, words)
    keep_alive(buffer)


@jit
def pack_weights(shares: Rows[GatherShare], passes: Rows[Pass], calls: Rows[Call], numbers: Vector) -> None:
    """Pack panels [tap number][src channel][lanes] of f32, one for each group and vector of dst channels.

    Where lanes are groups, lines have all lanes of the pass, and with products of bf16 pairs of src channels.
    """
    share, one, call = shares[0], passes[0], calls[0]
    weights, channels, taps, end = one.weights, share.channels, numbers.shape[0], call.weights + one.weights.nbytes
    size, blocks = stored_size(share.kind), (one.channels + WIDTH - 1) // WIDTH
    layout = share.panel
    if share.lanes.lanewise:
        _pack_lanes(share, one, call, numbers)
        return
    if weights.tap == size and (taps >= 8 or (taps > 1 and weights.src_channel == taps * size)):
        for g in range(one.groups):
            for b in range(blocks):
                source = call.weights + weights.start + g * weights.group + b * WIDTH * weights.dst_channel
                panel = call.panels + (g * blocks + b) * layout.block_bytes
                _pack_kernels(share, numbers, min(WIDTH, one.channels - b * WIDTH), weights, source, panel)
        return
    counts, steps, to = np.ones(4, np.int64), stack_array(4, np.int64), stack_array(4, np.int64)
    panels = np.empty(blocks, PANEL)
    counts[2], steps[2], to[2] = taps if layout.order != 0 else 1, weights.tap, layout.order * layout.tap_bytes
    counts[3], steps[3], to[3] = channels, weights.src_channel, 4 * WIDTH
    for g in range(one.groups):
        for tap in range(1 if layout.order != 0 else taps):
            number = 0 if layout.order > 0 else taps - 1 if layout.order < 0 else numbers[tap]
            for b in range(blocks):
                panel = panels[b]
                panel.lanes, panel.valid, panel.unit = WIDTH, min(WIDTH, one.channels - b * WIDTH), 1
                panel.source = b * WIDTH * weights.dst_channel
                panel.address = call.panels + (g * blocks + b) * layout.block_bytes + number * layout.tap_bytes
            source = call.weights + weights.start + g * weights.group + tap * weights.tap
            pack_panels(Values(share.kind, source, steps, weights.dst_channel, end), panels, counts, to)
