"""The cost model sends what is worth the transfer."""

from __future__ import annotations

import dataclasses
from math import prod

from app.cluster.costs import Costs, reads_of
from kernels import Plan, plan
from tests.app.pool.fleet import TINY

LARGE = dataclasses.replace(TINY, n=64, src_channels=256, dst_channels=256, src_spatial=(30, 30), dst_spatial=(28, 28))
THIN = dataclasses.replace(TINY, n=64, src_channels=256, dst_channels=256, src_spatial=(30, 30), dst_spatial=(30, 30),
                           kernel=(1, 1))  # fmt: skip


FAST = Costs(call_s=0.01, unit_s=0.003, put_rate=1e9, send_rate=1e9, mac_rate=1e10, gain=1.2)


def test_small_calls_stay() -> None:
    """A call of a millisecond is never sent."""
    assert not Costs().nodes(plan(TINY, workers=8), here=1, there=64, nodes=8)


def test_large_calls_are_sent() -> None:
    """A call of seconds is computed on all other machines too, unless they add nothing to speak of."""
    chosen = plan(LARGE, workers=8)
    assert FAST.nodes(chosen, here=2, there=2, nodes=2) == 2
    assert not FAST.nodes(chosen, here=8, there=1, nodes=1)
    assert not FAST.nodes(chosen, here=1, there=0, nodes=0)


def test_transfer_counts() -> None:
    """The same tensors are not worth sending for a filter of one tap over a slow network."""
    slow = dataclasses.replace(FAST, send_rate=1e7)
    assert not slow.nodes(plan(THIN, workers=8), here=2, there=8, nodes=4)


def test_images_are_sent_to_one_node() -> None:
    """What one unit reads is sent once, however many nodes there are; what all units read is sent to each node."""
    sending = Costs(call_s=0, unit_s=0, put_rate=1e30, send_rate=1e9, mac_rate=1e30)
    few = plan(dataclasses.replace(LARGE, src_channels=64, dst_channels=64), workers=8)
    all_src = plan(LARGE, workers=8)
    assert few.scratch_bytes
    assert not all_src.scratch_bytes

    def seconds(chosen: Plan, machines: int) -> float:
        return sending.there(chosen, reads_of(chosen), here=0, there=machines, nodes=machines)

    assert seconds(few, 9) < 2 * seconds(few, 2)
    six = 6 * 4 * prod(LARGE.src_shape) / sending.send_rate
    assert 0.99 * six < seconds(all_src, 8) - seconds(all_src, 2) < six + seconds(few, 8)


def test_a_gain_is_asked_for() -> None:
    """What takes about as long here stays here."""
    chosen = plan(LARGE, workers=8)
    free = Costs(call_s=0, unit_s=0, put_rate=1e15, send_rate=1e15)
    assert free.nodes(chosen, here=2, there=2, nodes=2) == 2
    assert not dataclasses.replace(free, gain=2.1).nodes(chosen, here=2, there=2, nodes=2)


def test_more_machines_than_are_fast_are_not_used() -> None:
    """Every machine needs src whole: beyond some number, sending takes longer than computing saves."""
    chosen = plan(LARGE, workers=8)  # by channels
    used = FAST.nodes(chosen, here=1, there=8, nodes=8)
    assert 1 < used < 8
    assert FAST.nodes(chosen, here=1, there=1000, nodes=1000) == used

    def seconds(machines: int) -> float:
        return FAST.there(chosen, reads_of(chosen), here=1, there=machines, nodes=machines)

    assert seconds(used) < min(seconds(used - 1), seconds(used + 1))
