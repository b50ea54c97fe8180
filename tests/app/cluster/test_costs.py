"""The cost model sends what is worth the transfer."""

from __future__ import annotations

import dataclasses
from math import prod

from app.cluster.costs import Costs
from kernels import plan
from tests.app.pool.fleet import TINY

LARGE = dataclasses.replace(TINY, n=64, src_channels=256, dst_channels=256, src_spatial=(30, 30), dst_spatial=(28, 28))
THIN = dataclasses.replace(TINY, n=64, src_channels=256, dst_channels=256, src_spatial=(30, 30), dst_spatial=(30, 30),
                           kernel=(1, 1))  # fmt: skip


FAST = Costs(call_s=0.01, unit_s=0.003, put_rate=1e9, send_rate=1e9, mac_rate=1e10, gain=1.2)


def test_small_calls_stay() -> None:
    """A call of a millisecond is never sent."""
    assert not Costs().nodes(plan(TINY, workers=8), here=1, there=64, nodes=8)


def test_large_calls_are_sent_where_there_are_more_workers() -> None:
    """A call of seconds is sent to more workers than there are here, not to as many."""
    chosen = plan(LARGE, workers=8)
    assert FAST.nodes(chosen, here=2, there=8, nodes=4) == 4
    assert not FAST.nodes(chosen, here=2, there=2, nodes=2)
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
    assert sending.there(few, 9, 9) < 2 * sending.there(few, 2, 2)
    six = 6 * 4 * prod(LARGE.src_shape) / sending.send_rate
    assert six < sending.there(all_src, 8, 8) - sending.there(all_src, 2, 2) < six + sending.there(few, 8, 8)
    assert sending.there(few, 2, 1) < 1e-9


def test_a_gain_is_asked_for() -> None:
    """What takes about as long here stays here."""
    chosen = plan(LARGE, workers=8)
    free = Costs(call_s=0, unit_s=0, put_rate=1e15, send_rate=1e15)
    assert free.nodes(chosen, here=2, there=3, nodes=2) == 2
    assert not dataclasses.replace(free, gain=1.6).nodes(chosen, here=2, there=3, nodes=2)


def test_more_machines_than_are_fast_are_not_used() -> None:
    """Every machine needs src whole: beyond some number, sending takes longer than computing saves."""
    chosen = plan(LARGE, workers=1000)
    used = FAST.nodes(chosen, here=1, there=8, nodes=8)
    assert 1 < used < 8
    assert FAST.nodes(chosen, here=1, there=1000, nodes=1000) == used
    assert FAST.there(chosen, used, used) < min(FAST.there(chosen, n, n) for n in (used - 1, used + 1))
