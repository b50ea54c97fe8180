"""The whole engine, from the server to a unit on a machine, with a stand-in for Ray: what breaks is set in a file."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from convgrad._errors import DeadlineExceeded, InternalError, ShuttingDown
from kernels import compute
from tests.app.cluster.site import WIDE, Site, many
from tests.app.pool.fleet import Array

pytestmark = pytest.mark.heavy

LONG = dataclasses.replace(WIDE, n=16, src_channels=64, dst_channels=64)
"""Takes one worker so long that the other side has its say."""
PLAN, INPUTS = many(LONG)
BITS = compute(LONG, *INPUTS).tobytes()


class Machines:
    """The file that the stand-in reads."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.set(one=1)

    def set(self, broken: dict[str, str] | None = None, put: str | None = None, **machines: int) -> None:
        """Say which machines there are, and what is wrong with them."""
        spare = self.file.with_suffix(".new")
        spare.write_text(json.dumps({"machines": machines, "broken": broken or {}, "put": put}), "utf-8")
        spare.replace(self.file)

    def submitted(self) -> int:
        """Count the units that Ray has been given so far."""
        return len(self.file.with_suffix(".submitted").read_text("utf-8"))

    def used(self) -> frozenset[str]:
        """Return the machines that have had units since the last call of this method."""
        units = self.file.with_suffix(".units")
        found = frozenset(units.read_text("utf-8").split() if units.exists() else ())
        units.unlink(missing_ok=True)
        return found


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    """Machines that a bridge finds."""
    file = tmp_path_factory.mktemp("cluster") / "state"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).with_name("stand_in")))
        patch.setenv("STAND_IN", str(file))
        yield Machines(file)


@pytest.fixture(scope="module")
def shared(machines: Machines) -> Iterator[Site]:
    """An engine that all tests use which do not need another one."""
    with Site.open("") as made:
        yield made


@pytest.fixture
def site(shared: Site, machines: Machines) -> Site:
    """The engine, with one machine that is ready and idle, whatever the last test broke."""
    machines.set(one=1)
    shared.whole()
    units = shared.counter("units")
    while shared.counter("units") == units:  # it still has a unit of the last test, which nobody waits for
        shared.there(PLAN, INPUTS)
    return shared


def right(site: Site, result: Array) -> bool:
    """Whether a result has the bits of one processor, and all memory was given back."""
    site.until(lambda: site.fleet.segments.stats().used == 0, 10.0)
    return result.tobytes() == BITS


def falls_back(site: Site) -> bool:
    """Return whether a call falls back to this machine, with the right bits.

    Up to five calls: on a busy machine the service may have computed every unit before it hears of the fault.
    """
    before = site.counter("fallbacks")
    for _ in range(5):
        assert right(site, site.there(PLAN, INPUTS)[0])
        if site.counter("fallbacks") > before:
            return site.counter("fallbacks") == before + 1
    return False


def test_both_compute(site: Site) -> None:
    """The service and the machine compute units of a call, and its bits are those of one processor."""
    before = site.counter("units")
    result, _ = site.there(PLAN, INPUTS)
    assert right(site, result)
    assert 0 < site.counter("units") - before < len(PLAN.units)


def test_a_worker_that_ends_is_counted_and_replaced(site: Site, machines: Machines) -> None:
    """Its unit is computed here, and counts as computed again."""
    before = site.counter("retried_units")
    machines.set({"one": "dies"}, one=1)
    result, _ = site.there(PLAN, INPUTS)
    assert right(site, result)
    assert site.counter("retried_units") > before
    machines.set(one=1)
    site.whole()


def test_a_reader_that_leaves(site: Site) -> None:
    """Its memory is free, and the next call is served."""
    site.fleet.run(site.fleet.leave(site.fleet.job(PLAN, INPUTS)))
    assert right(site, site.there(PLAN, INPUTS)[0])


def test_a_deadline_that_passes(site: Site, machines: Machines) -> None:
    """A call whose machine is silent ends at its deadline, and its memory is free."""
    machines.set({"one": "silent"}, one=1)
    start = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        site.there(PLAN, INPUTS, deadline=start + 0.5)
    assert time.monotonic() - start < 5.0
    site.until(lambda: site.fleet.segments.stats().used == 0, 10.0)


def test_a_silent_machine(site: Site, machines: Machines) -> None:
    """What it has is computed here, and so is the next call, until the machine answers."""
    result, _ = site.there(PLAN, INPUTS, lambda: machines.set({"one": "silent"}, one=1))
    assert right(site, result)
    before = machines.submitted()
    assert right(site, site.there(PLAN, INPUTS)[0])
    # A unit or two may still be sent there before the ones that it holds count as overdue.
    assert machines.submitted() <= before + 2


def test_a_machine_that_joins(site: Site, machines: Machines) -> None:
    """It gets work; one that leaves loses it."""
    machines.set(one=1, two=2)
    site.until(lambda: site.ready() == 3)
    machines.used()
    assert right(site, site.there(PLAN, INPUTS)[0])
    assert machines.used() == {"one", "two"}
    machines.set(two=2)
    site.until(lambda: [(node.name, node.ready) for node in site.ray.nodes] == [("two", 2)])
    assert right(site, site.there(PLAN, INPUTS)[0])


@pytest.mark.parametrize(("fault", "reason"), [("other", "its kernels are other"), ("unfit", "it is broken")])
def test_a_machine_that_is_refused(
    site: Site, machines: Machines, fault: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A machine whose bits may differ gets no work, is not tried again, and the server's log says why."""
    machines.set({"two": fault}, one=1, two=2)
    site.until(lambda: len(site.ray.nodes) == 2 and site.ray.nodes[1].refused)
    assert reason in str(site.ray.nodes[1].refused)
    assert any("two gets no work" in line and reason in line for line in caplog.messages)
    machines.used()
    assert right(site, site.there(PLAN, INPUTS)[0])
    assert site.ready() == 1
    assert machines.used() == {"one"}, "neither the other machine nor the service's own node"


def test_a_worker_that_does_not_start(site: Site, machines: Machines) -> None:
    """It is tried again until it does."""
    machines.set({"two": "does_not_start"}, one=1, two=1)
    site.until(lambda: len(site.ray.nodes) == 2)
    assert right(site, site.there(PLAN, INPUTS)[0])
    machines.set(one=1, two=1)
    site.until(lambda: site.ready() == 2)


def test_no_memory_for_inputs(site: Site, machines: Machines) -> None:
    """A call whose inputs find no room in the memory of Ray is computed here."""
    machines.set(put="full", one=1)
    assert falls_back(site)


@pytest.mark.parametrize("fault", ["no_memory", "full", "lost"])
def test_no_memory_on_a_machine(site: Site, machines: Machines, fault: str) -> None:
    """A call that is too large for a machine, or whose inputs are lost on the way, is computed here."""
    machines.set({"one": fault}, one=1)
    assert falls_back(site)


def test_a_kernel_that_fails(site: Site, machines: Machines) -> None:
    """A unit that raises on a machine ends its call, as it would here."""
    machines.set({"one": "raises"}, one=1)
    with pytest.raises(InternalError):
        site.there(PLAN, INPUTS)
    site.until(lambda: site.fleet.segments.stats().used == 0, 10.0)


def test_the_bridge_is_killed(site: Site, machines: Machines) -> None:
    """The call goes on here, the engine connects again, and the next call is shared."""
    machines.set({"one": "silent"}, one=1)
    link = site.ray.snapshot()["cluster"]
    before = site.counter("fallbacks")
    result, _ = site.there(PLAN, INPUTS, lambda: os.kill(link["bridge"], signal.SIGKILL))
    assert right(site, result)
    assert site.counter("fallbacks") == before + 1
    machines.set(one=1)
    site.until(lambda: site.ready() == 1)
    assert site.ray.snapshot()["cluster"]["bridge_restarts"] == link["bridge_restarts"] + 1
    units = site.counter("units")
    assert right(site, site.there(PLAN, INPUTS)[0])
    assert site.counter("units") > units


def test_copying_hangs(site: Site, machines: Machines) -> None:
    """While an input is copied the bridge lives, other workers compute, and a deadline is kept."""
    machines.set(put="hang", one=1)
    pid = site.ray.snapshot()["cluster"]["bridge"]
    with pytest.raises(DeadlineExceeded):
        site.there(PLAN, INPUTS, deadline=time.monotonic() + 0.5)
    machines.set(one=1)
    assert right(site, site.there(PLAN, INPUTS)[0])
    assert site.ray.snapshot()["cluster"]["bridge"] == pid


def test_shutting_down(machines: Machines) -> None:
    """A call that the cluster computes is rejected at the service's end, and so are later ones."""
    machines.set(one=1)
    with Site.open("") as ending:
        ending.whole()
        machines.set({"one": "silent"}, one=1)

        async def stop() -> None:
            running = ending.fleet.runner.get_loop().create_task(ending.fleet.finish(ending.fleet.job(PLAN, INPUTS)))
            await ending.fleet.until(lambda: ending.ray.snapshot()["cluster"]["jobs"])
            await ending.ray.stop()
            with pytest.raises(ShuttingDown):
                await running
            with pytest.raises(ShuttingDown):
                await ending.fleet.finish(ending.fleet.job(PLAN, INPUTS))

        ending.fleet.run(stop())


def test_a_cluster_that_comes_later(machines: Machines) -> None:
    """Until then the service computes alone."""
    machines.set()
    with Site.open("") as made:
        made.fleet.run(made.fleet.whole())
        made.until(lambda: made.ray.snapshot()["cluster"]["bridge_restarts"] > 0)
        assert made.ray.ready
        assert right(made, made.there(PLAN, INPUTS)[0])
        assert made.counter("jobs") == 0
        machines.set(three=1)
        made.whole()
        assert right(made, made.there(PLAN, INPUTS)[0])
        assert made.counter("units")
