"""Units of a job go to the server's workers, and to no more machines than are worth the transfer."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from app.cluster.dispatch import Dispatch
from app.cluster.fleet import Fleet, Worker
from app.cluster.memory import Memory
from app.cluster.messages import Begin, ComputeHere, DoneHere, Ended, Message, UnitDone
from app.cluster.node import NodeWorker
from kernels import compute, plan, run_unit
from tests.app.cluster.site import DEEP
from tests.app.pool.fleet import random_inputs

CALLS, MACHINES = 2, 5
PLAN, INPUTS = plan(DEEP, workers=8), random_inputs(DEEP)
UNITS = len(PLAN.units)


class Site(Fleet):
    """Machines of one worker each, without Ray, and a server: units wait until they are computed here."""

    def __init__(self, own: int = 0) -> None:
        super().__init__(identity="", common=False, home="")
        self.own = own
        self.outputs: dict[int, np.ndarray[Any, Any]] = {}
        self.calls: list[tuple[str, tuple[Any, ...], Future[Any]]] = []
        self.all = [Worker(i, f"machine {i}", self._actor(f"machine {i}"), ready=True) for i in range(MACHINES)]
        self.sent: list[Message] = []
        self.dispatch = Dispatch(self, self.sent.append, lambda work: work(), lambda work, _=0: work())

    @property
    def workers(self) -> list[Worker]:
        """The workers that have not ended."""
        return [worker for worker in self.all if worker.ready]

    def _actor(self, node: str) -> object:
        def remote(*arguments: Any) -> object:
            future: Future[Any] = Future()
            self.calls.append((node, arguments, future))
            return SimpleNamespace(future=lambda: future)

        return SimpleNamespace(compute=SimpleNamespace(remote=remote))

    def begin(self, job: int, nodes: int) -> None:
        """Send a job that may use so many machines."""
        output = self.outputs[job] = np.zeros(DEEP.output_shape, DEEP.output_dtype)
        memory = Memory(tuple(INPUTS), output, None)
        self.dispatch.begin(Begin(job, "", PLAN, nodes, self.own), memory, lambda part: part)

    def finish(self) -> set[str]:
        """Compute the units on machines until none is left; return the machines that had some."""
        used = set()
        while self.calls:
            node, arguments, future = self.calls.pop(0)
            used.add(node)
            future.set_result(NodeWorker().compute(*arguments))
        return used

    def here(self) -> list[ComputeHere]:
        """Take the units that the server's workers have been given."""
        given = [message for message in self.sent if isinstance(message, ComputeHere)]
        self.sent[:] = [message for message in self.sent if not isinstance(message, ComputeHere)]
        return given

    def compute_here(self) -> int:
        """Compute the units that the server's workers are given until none is left; return their number."""
        count = 0
        while given := self.here():
            for job, unit, _ in given:
                run_unit(PLAN, PLAN.units[unit], INPUTS, self.outputs[job], None)
                self.dispatch.done_here(DoneHere(job, unit))
                count += 1
        return count

    def done(self, job: int) -> int:
        """Count the units of a job that have come back from machines."""
        return sum(isinstance(message, UnitDone) and message.job == job for message in self.sent)

    def right(self, job: int) -> bool:
        """Whether the memory of a job has the bits of one processor."""
        return self.outputs[job].tobytes() == compute(DEEP, *INPUTS).tobytes()


@pytest.mark.parametrize("nodes", [1, 2, MACHINES])
def test_a_job_uses_as_many_machines_as_it_may(nodes: int) -> None:
    """All its units are computed, on that many machines."""
    site = Site()
    site.begin(0, nodes)
    assert len(site.finish()) == nodes
    assert site.done(0) == UNITS > MACHINES
    assert site.right(0)


def test_jobs_use_different_machines() -> None:
    """A second job goes to machines that the first one may not use."""
    site = Site()
    for job in range(CALLS):
        site.begin(job, 2)
    assert len({node for node, _, _ in site.calls}) == 2 * CALLS
    site.finish()
    assert all(site.done(job) == UNITS and site.right(job) for job in range(CALLS))


def test_another_machine_takes_the_place_of_a_lost_one() -> None:
    """A job on one machine that is lost is computed on another one."""
    site = Site()
    site.begin(0, 1)
    (lost,) = {node for node, _, _ in site.calls}
    site.calls.clear()
    site.lose(next(worker for worker in site.all if worker.node == lost))
    (used,) = site.finish()
    assert used != lost
    assert site.done(0) == UNITS
    assert site.right(0)


def test_the_server_computes_too() -> None:
    """Each unit is given once, to a worker of the server or to a machine, and the result is whole."""
    site = Site(own=2)
    site.begin(0, 1)
    first = site.compute_here()
    site.finish()
    assert first + site.compute_here() + site.done(0) == UNITS
    assert first
    assert site.done(0)
    assert site.right(0)


def test_the_server_takes_over_from_a_lost_machine() -> None:
    """The units of the last machine are given to the server's workers."""
    site = Site(own=1)
    site.begin(0, 1)
    assert site.calls
    site.calls.clear()
    for worker in site.workers:
        site.lose(worker)
    assert site.compute_here() == UNITS
    assert site.right(0)


def test_workers_of_the_server_are_free_after_a_cancelled_job() -> None:
    """Units that the server has stopped leave its workers to the next job."""
    site = Site(own=2)
    site.begin(0, 0)
    given = site.here()
    assert len(given) == 2 * site.own
    site.dispatch.release(0)
    for unit in given:
        site.dispatch.done_here(DoneHere(unit.job, unit.unit))
    site.begin(1, 0)
    assert site.compute_here() == UNITS
    assert site.right(1)


def test_a_late_unit_is_given_to_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a silent machine has is computed here; its answer, should it still come, changes nothing."""
    monkeypatch.setattr(Dispatch, "_patience", lambda *_: -1.0)
    site = Site(own=2)
    site.begin(0, 1)
    late = list(site.calls)
    computed = site.compute_here()
    assert computed + len(late) == UNITS
    for _ in late:
        site.dispatch.check()
        computed += site.compute_here()
    assert computed == UNITS
    assert site.right(0)
    site.finish()
    assert site.done(0) == 0
    assert site.right(0)


def test_the_servers_own_run_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer for a unit that the server is computing too is not written: it would be written over in parts."""
    monkeypatch.setattr(Dispatch, "_patience", lambda *_: -1.0)
    site = Site(own=2)
    site.begin(0, 1)
    site.compute_here()
    late = len(site.calls)
    assert late
    site.dispatch.check()
    given = site.here()
    assert given
    site.finish()
    assert site.done(0) < late
    for job, unit, _ in given:
        run_unit(PLAN, PLAN.units[unit], INPUTS, site.outputs[job], None)
        site.dispatch.done_here(DoneHere(job, unit))
    assert site.compute_here() + len(given) + site.done(0) >= late
    assert site.right(0)


def test_a_late_unit_comes_before_waiting_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no worker is idle, a late unit is the next one, and another machine takes the place of the silent one."""
    site = Site()
    site.begin(0, 1)
    ((silent, first, _), *_) = site.calls
    monkeypatch.setattr(Dispatch, "_patience", lambda *_: -1.0)
    site.calls.clear()
    site.dispatch.check()
    node, again, _ = site.calls[0]
    assert node != silent
    assert again[0] == first[0]
    monkeypatch.undo()
    site.finish()
    assert site.done(0) == UNITS
    assert site.right(0)


def test_a_unit_that_keeps_losing_workers_ends_its_job() -> None:
    """The fourth loss is an error of the job."""
    site = Site()
    site.begin(0, MACHINES)
    unit = site.all[0].units[0].unit
    for _ in range(4):
        assert not any(isinstance(message, Ended) for message in site.sent)
        while not (having := [each for each in site.workers if each.units and each.units[0].unit == unit]):
            _, arguments, future = site.calls.pop(0)
            future.set_result(NodeWorker().compute(*arguments))
        site.lose(having[0])
    (ended,) = (message for message in site.sent if isinstance(message, Ended))
    assert ended.reason == "lost"


def test_units_of_a_machine_that_is_gone_leave_it_at_once() -> None:
    """The units of its workers go to other machines, and none counts more than one loss."""
    site = Site()
    for worker in site.all[:4]:
        worker.node = "machine 0"
    site.update({"machine 0": ("", 4)})
    (machine,) = site._machines.values()
    machine.workers[:] = site.all[:4]
    site.begin(0, 1)
    site.calls.clear()
    site.update({})
    assert {node for node, _, _ in site.calls} == {"machine 4"}
    site.finish()
    assert site.right(0)
