"""Calls on two machines: the same bits as on one, and an answer whatever breaks."""

from __future__ import annotations

import dataclasses
import os
import signal
import time

import numpy as np
import pytest

from app.pool.buffers import SegmentPool
from convgrad._errors import DeadlineExceeded
from kernels import plan
from kernels.problem import OpName
from tests.app.cluster.site import Site, many
from tests.app.pool.fleet import TINY
from tests.cluster.lab import Lab
from tests.kernels.harness import problem_of, stored
from tests.kernels.sizes import resize
from tests.problems import OPS, random_case

pytestmark = pytest.mark.timeout(600)

MIDDLE = dataclasses.replace(TINY, n=32, src_channels=128, dst_channels=128, src_spatial=(30, 30), dst_spatial=(28, 28))
LARGE = dataclasses.replace(MIDDLE, n=64, src_channels=256, dst_channels=256)
DEEP = dataclasses.replace(LARGE, n=32, src_channels=384, dst_channels=384, kernel=(7, 7), src_spatial=(34, 34))
"""3.7, 29.6 and 181 GMAC: long enough to be interrupted; the last one computes much and sends little."""


def same(one: np.ndarray, other: np.ndarray) -> bool:
    """Compare bit for bit."""
    return one.tobytes() == other.tobytes()


def test_two_hundred_random_problems_give_the_bits_of_one_machine(
    site: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every operation and dtype, cut into more units than there are workers, gives the bits of the local engine."""
    resize(monkeypatch, unit_macs=2_000, bias_chunk=250)
    rng, wanted, done, cut, units = np.random.default_rng(7), 200, 0, 0, site.counter("units")
    seen: set[tuple[str, str]] = set()
    while done < wanted:
        case = random_case(rng, macs=2_000_000, longer=3)
        if done % 5 == 4:
            case = dataclasses.replace(case, dtype="f64")
        chosen = plan(problem_of(case), workers=8)
        if case.op != OPS[done % len(OPS)] or (len(chosen.units) < 3 and rng.random() < 0.8):
            continue
        inputs = [stored(tensor) for tensor in case.inputs().values()]
        result, _ = site.there(chosen, inputs)
        assert same(result, site.here(chosen, inputs)), case
        done, cut = done + 1, cut + (len(chosen.units) > 2)
        seen.add((case.op, case.dtype))
    units = site.counter("units") - units
    with capsys.disabled():
        print(f"\n200 problems, {len(seen)} pairs of operation and dtype: {units} units there, {cut} cut into over 2")
    assert {op for op, _ in seen} == {*OPS}
    assert {dtype for _, dtype in seen} == {"f32", "f16", "bf16", "f64"}
    assert cut >= wanted // 2
    assert units > wanted // 2, "the other machine takes its share"  # how much is a matter of speed


@pytest.mark.parametrize("op", ["ConvolutionBackwardWeights", "Convolution"])
def test_large_problems_give_the_bits_of_one_machine(site: Site, op: OpName) -> None:
    """Partial sums in shared scratch, and boxes of images, come back in their places."""
    chosen, inputs = many(dataclasses.replace(MIDDLE, op=op, src_channels=64, dst_channels=64))
    assert len(chosen.units) > 8
    before = site.counter("units")
    assert same(site.there(chosen, inputs)[0], site.here(chosen, inputs))
    assert 0 < site.counter("units") - before < len(chosen.units), "both machines take their share"


def test_killed_worker(site: Site, lab: Lab) -> None:
    """A worker process killed during a call costs the unit that it had: the call completes with the same bits."""
    chosen, inputs = many(LARGE)
    before = site.counter("retried_units")

    def kill() -> bool:
        """Kill the worker, and the next one, until one had a unit; return whether that is so."""
        if site.counter("retried_units") > before:
            return True
        for pid in lab.workers(2):
            os.kill(pid, signal.SIGKILL)
        return False

    result, _ = site.there(chosen, inputs, kill)
    assert same(result, site.here(chosen, inputs))
    assert site.counter("retried_units") > before
    site.whole()


def test_killed_node(site: Site, lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    """All processes of a node killed during a call: the call completes with the same bits, and the node may rejoin."""
    chosen, inputs = many(LARGE)
    _, undisturbed = site.there(chosen, inputs)
    result, seconds = site.there(chosen, inputs, lambda: lab.kill(2))
    assert same(result, site.here(chosen, inputs))
    noticed = site.until(lambda: site.ready() == 0)
    lab.start(2)
    joined = site.whole()
    with capsys.disabled():
        print(
            f"\nnode killed: the rest of the call took {seconds:.1f} s, {undisturbed:.1f} s with both nodes; "
            f"its worker was forgotten {noticed:.1f} s after the call; warm {joined:.1f} s after joining again"
        )


def test_cut_link(site: Site, lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    """A link that is cut without a word costs a delay: the call completes with the same bits."""
    chosen, inputs = many(LARGE)
    result, seconds = site.there(chosen, inputs, lambda: lab.cut(2))
    assert same(result, site.here(chosen, inputs))
    again, next_s = site.there(chosen, inputs)
    assert same(again, result)
    lab.kill(2)
    lab.mend(2)
    lab.start(2)
    site.until(lambda: len(site.ray.nodes) == 1)
    site.whole()
    with capsys.disabled():
        print(f"\nlink cut: the rest of the call took {seconds:.1f} s, the next call {next_s:.1f} s")


def test_deadline_with_a_cut_link(site: Site, lab: Lab) -> None:
    """A call does not wait beyond its deadline for a machine that is silent."""
    chosen, inputs = many(LARGE)
    start = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        site.there(chosen, inputs, lambda: lab.cut(2), deadline=start + 1.0)
    assert time.monotonic() - start < 3.0
    lab.kill(2)


def test_closing_releases_the_memory(site: Site) -> None:
    """A reader that leaves gets its memory back, and the workers go on with the next call."""
    chosen, inputs = many(LARGE)
    pool: SegmentPool = site.fleet.segments

    async def leave() -> None:
        await site.fleet.leave(site.fleet.job(chosen, inputs))
        await site.fleet.until(lambda: pool.stats().used == 0)

    site.fleet.run(leave())
    result, _ = site.there(*many(MIDDLE))
    assert same(result, site.here(*many(MIDDLE)))


def test_restarted_head(site: Site, lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    """The head killed during a call: the call completes here, and the engine connects to the next head by itself."""
    chosen, inputs = many(LARGE)
    before, bridge = site.counter("fallbacks"), site.ray.snapshot()["cluster"]["bridge"]

    def kill() -> None:
        """Kill the head, and hold the call until the bridge has ended for want of it, however fast the machine."""
        lab.kill(1)
        os.waitid(os.P_PID, bridge, os.WEXITED | os.WNOWAIT)

    result, seconds = site.there(chosen, inputs, kill)
    assert same(result, site.here(chosen, inputs))
    assert site.counter("fallbacks") == before + 1
    assert site.ray.ready
    assert same(site.there(chosen, inputs)[0], result)
    lab.kill(2)
    lab.start(1)
    lab.start(2)
    back = site.whole()
    with capsys.disabled():
        print(
            f"\nhead killed: the rest of the call took {seconds:.1f} s; "
            f"both nodes were in use {back:.1f} s after a restart"
        )
    before = site.counter("jobs")
    assert same(site.there(chosen, inputs)[0], result)
    assert site.counter("jobs") == before + 1


def test_other_target_gets_no_work(site: Site, lab: Lab) -> None:
    """A node whose kernels are compiled for another target is refused, and says why."""
    lab.kill(2)
    site.until(lambda: not site.ray.nodes)
    lab.start(2, CONVGRAD_TARGET="ivybridge")
    site.until(lambda: any(node.refused for node in site.ray.nodes))
    chosen, inputs = many(MIDDLE)
    assert same(site.there(chosen, inputs)[0], site.here(chosen, inputs))
    assert site.ready() == 0
    lab.kill(2)
    site.until(lambda: not site.ray.nodes)
