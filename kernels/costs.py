"""Cycles that the choice between paths reckons with.

`python -m benchmarks.fit` fits them to what `python -m benchmarks.regret` measured, which lies in benchmarks/data.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["COSTS", "Costs"]


@dataclass(frozen=True)
class Costs:
    """Cycles on a processor that does two multiply-adds of whole vectors in each.

    Of a weight gradient: `latency` of a multiply-add, which a register tile with few sums waits for, `tile` for a
    position of a tile besides, and `grouped` for a multiply-add where lanes are groups, whose factors are both loaded.

    Of ConvTranspose: `single` for a multiply-add of tiles with one vector a row, where tiles of two take 1, and for
    a dst pixel `gathered`, or `gathered_lanes` where lanes are groups; each src value is `copied` to every lane of a
    group with several dst channels; where there are as many src channels, lanes are `exchanged` for a multiply-add.
    Where products are scattered, `scattered_pixel` for a dst pixel, `scattered_line` for a line of taps and
    `scattered_sum` for a product that is added.

    Of Winograd: a vector of a tile is `transformed`, a vector of a position is `turned` where channels come first, and
    for a vector of one row of the gradient its 16 sums are `summed` for each slab and `tapped` once. It is chosen where
    it is estimated at less than `winograd_share` of direct sums. The first four are least squares over the layers of
    benchmarks/shapes_3x3.json (`python -m benchmarks.regret --algorithms`) on an AMD EPYC (Zen 4, AVX-512). Of forward
    operations, a vector of a tile of src or dst is `tiled`, and one of all taps of a src channel `filtered`, or
    where direct sums are formed `packed`: least squares over the same layers on an AMD EPYC (Zen 5, AVX-512).
    """

    latency: float = 4.0
    tile: float = 0.3
    grouped: float = 0.6
    single: float = 0.56
    gathered: float = 12.0
    gathered_lanes: float = 16.0
    copied: float = 3.0
    exchanged: float = 0.8
    scattered_pixel: float = 12.0
    scattered_line: float = 8.0
    scattered_sum: float = 0.75
    transformed: float = 54.0
    turned: float = 2.0
    summed: float = 26.0
    tapped: float = 225.0
    tiled: float = 116.0
    filtered: float = 490.0
    packed: float = 149.0
    winograd_share: float = 0.8


COSTS = Costs()
