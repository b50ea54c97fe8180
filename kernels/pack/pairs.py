"""Packing of boxes of positions for products of bf16 pairs: from tensors in any layout to planes or panels of pairs.

Lines, which `kernels.pack.lines` packs, are runs of the last of four axes; they are a common pitch apart.
"""

from __future__ import annotations

import numpy as np

from kernels.emit.compiler import Record, Records, Rows, Vector, jit, numbers
from kernels.pack.lines import Pixels, pack_line, pack_line_pairs
from kernels.problem import ConvProblem

__all__ = ["PackedBox", "Packing", "pack_boxes", "unfolded_boxes", "weight_boxes"]


class PackedBox(Record):
    """A box of positions: the bytes from which on it lies in a channel and in a plane, and its `sizes`."""

    source: int
    place: int
    sizes: Vector = numbers(4)


class Packing(Record):
    """Channels of a tensor, and the planes or panels of `pairs` that boxes of their positions are packed to.

    `source` is the address of the first channel; `channel` leads to the next one, `strides` along (n, d, h, w), all in
    bytes. From `target` on lie so many `planes`, each of `plane` bytes, in which `steps` lead along (n, d, h, w). A
    panel of pairs has 16 channels and counts as a plane: its places and steps are those in a channel's plane.
    """

    channels: int
    source: int
    channel: int
    strides: Vector = numbers(4)
    target: int
    planes: int
    plane: int
    steps: Vector = numbers(4)
    pairs: bool


def weight_boxes(problem: ConvProblem, taps: Vector, places: Vector, step: int) -> Records:
    """Return the boxes of the weights of some taps and their places in a plane, in values.

    A box has a tap, or where taps are adjacent in memory, `step` src channels of one.
    """
    dims, (_, wide, narrow, tap_step) = problem.dims, problem.weights_strides
    channel_step, channels = wide if dims.gathers else narrow, dims.src_channels
    step = step if tap_step < channel_step else channels
    firsts = np.arange(0, channels, step)
    boxes = np.zeros((len(firsts), len(taps)), PackedBox.dtype)
    boxes["source"] = 2 * (taps * tap_step + channel_step * firsts[:, None])
    boxes["place"], boxes["sizes"] = 2 * (places + firsts[:, None]), 1
    boxes["sizes"][..., 3] = np.minimum(step, channels - firsts)[:, None]
    return boxes.reshape(-1)


def unfolded_boxes(channels: int, places: Vector) -> Records:
    """Return a box for each tap of 16-bit weights that lie as [tap][src channel], and its place in bytes."""
    boxes = np.zeros(len(places), PackedBox.dtype)
    boxes["source"], boxes["place"] = 2 * channels * np.arange(len(places)), places
    boxes["sizes"] = 1, 1, 1, channels
    return boxes


@jit
def pack_boxes(packing: Packing, boxes: Rows[PackedBox]) -> None:
    """Pack boxes of positions of a tensor; what lies around them is the caller's.

    Where channels are adjacent, all of a line are packed before the next line, else all lines of a few channels.
    """
    channels, channel, strides, steps = packing.channels, packing.channel, packing.strides, packing.steps
    few = 16 if packing.pairs else 8
    span = channels if channel == 2 else few
    for first in range(0, channels, span):
        some, plane = min(span, channels - first), first // 16 if packing.pairs else first
        to = packing.target + plane * packing.plane
        for b in range(boxes.shape[0]):
            box = boxes[b]
            start, sizes = packing.source + box.source + first * channel, box.sizes
            run = sizes[3]
            for n in range(sizes[0] if run > 0 else 0):
                for d in range(sizes[1]):
                    for h in range(sizes[2]):
                        place = box.place + n * steps[0] + d * steps[1] + h * steps[2]
                        line = start + n * strides[0] + d * strides[1] + h * strides[2]
                        pixels = Pixels(line, strides[3], channel, run)
                        if packing.pairs:
                            pack_line_pairs(some, to, packing.plane, place // 2, pixels)
                        else:
                            pack_line(some, to + place, packing.plane, pixels)
