"""Units of a job go to no more machines than are worth the transfer."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from app.cluster.dispatch import Dispatch
from app.cluster.fleet import Fleet, Worker
from app.cluster.messages import Begin, Message, UnitDone
from app.cluster.node import NodeWorker
from kernels import plan
from tests.app.cluster.test_units import DEEP
from tests.app.pool.fleet import random_inputs

CALLS, UNITS, MACHINES = 2, 8, 5


class Site(Fleet):
    """Machines of one worker each, without Ray: units wait until they are computed here."""

    def __init__(self) -> None:
        super().__init__(common=False)
        self.calls: list[tuple[str, tuple[Any, ...], Future[Any]]] = []
        self.all = [Worker(i, f"machine {i}", self._actor(f"machine {i}"), ready=True) for i in range(MACHINES)]
        self.sent: list[Message] = []
        self.dispatch = Dispatch(self, self.sent.append, lambda event: event())

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
        chosen = plan(DEEP, workers=8)
        assert len(chosen.units) >= UNITS
        self.dispatch.begin(Begin(job, "", chosen, nodes), random_inputs(DEEP), lambda part: part)

    def finish(self) -> set[str]:
        """Compute units until none is left; return the machines that had some."""
        used = set()
        while self.calls:
            node, arguments, future = self.calls.pop(0)
            used.add(node)
            future.set_result(NodeWorker().compute(*arguments))
        return used

    def done(self, job: int) -> int:
        """Count the units of a job that have come back."""
        return sum(isinstance(message, UnitDone) and message.job == job for message in self.sent)


@pytest.mark.parametrize("nodes", [1, 2, MACHINES])
def test_a_job_uses_as_many_machines_as_it_may(nodes: int) -> None:
    """All its units are computed, on that many machines."""
    site = Site()
    site.begin(0, nodes)
    assert len(site.finish()) == nodes
    assert site.done(0) >= UNITS


def test_jobs_use_different_machines() -> None:
    """A second job goes to machines that the first one may not use."""
    site = Site()
    for job in range(CALLS):
        site.begin(job, 2)
    assert len({node for node, _, _ in site.calls}) == 2 * CALLS
    site.finish()
    assert all(site.done(job) >= UNITS for job in range(CALLS))


def test_another_machine_takes_the_place_of_a_lost_one() -> None:
    """A job on one machine that is lost is computed on another one."""
    site = Site()
    site.begin(0, 1)
    (lost,) = {node for node, _, _ in site.calls}
    site.calls.clear()
    site.lose(next(worker for worker in site.all if worker.node == lost))
    (used,) = site.finish()
    assert used != lost
    assert site.done(0) >= UNITS
