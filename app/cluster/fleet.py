"""The workers on the machines of the cluster: one for each of Ray's processors, warm before it takes work."""

from __future__ import annotations

import itertools
import logging
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from app.cluster.messages import Node
from app.cluster.node import NodeWorker
from kernels.target import NAME, SETTING, target

__all__ = ["Fleet", "Worker"]

_log = logging.getLogger(__name__)

_LOOK_S = 0.5
"""Seconds between two looks at which machines there are."""

_RETRY_FIRST_S, _MOST_DOUBLINGS = 2.0, 5
"""Seconds until a worker that ended is started again; doubled each time that one on its machine did not start."""


@dataclass(eq=False)
class Worker:
    """One actor, and the units that it has, the running one first."""

    number: int
    node: str
    actor: Any = None
    ready: bool = False
    gone: bool = False
    units: list[Any] = field(default_factory=list)


@dataclass
class _Machine:
    """A machine: how many workers it may have, why it gets no work, and when it is tried next."""

    name: str
    processors: int
    refused: str | None = None
    retry_at: float = 0.0
    failures: int = 0
    workers: list[Worker] = field(default_factory=list)


class Fleet:
    """Keep a worker on every processor of the cluster but those of the node `home`, which the server's workers use.

    Only machines whose workers have the server's `identity` get work; with `common`, all compute for its target.
    `post` puts a function into the queue of the one thread that may call the other methods, except for `watch`; `aside`
    puts one into that of a thread in which Ray may block.
    """

    def __init__(self, *, identity: str, common: bool, home: str) -> None:
        self._identity, self._home = identity, home
        self.post: Callable[[Callable[[], object]], object] = lambda _: None
        self.aside: Callable[[Callable[[], object]], object] = lambda _: None
        self.on_change: Callable[[], None] = lambda: None
        self.on_lost: Callable[[Worker], None] = lambda _: None
        self._numbers = itertools.count(1)
        self._machines: dict[str, _Machine] = {}
        self._environment = _target_settings() if common else {}

    @property
    def workers(self) -> list[Worker]:
        """The workers that are ready for units."""
        return [worker for each in self._machines.values() for worker in each.workers if worker.ready]

    def nodes(self) -> tuple[Node, ...]:
        """Describe the machines."""
        return tuple(
            Node(each.name, sum(w.ready for w in each.workers), each.processors, each.refused)
            for each in self._machines.values()
        )

    def watch(self) -> None:
        """Look for machines that have come and gone, for ever, in a thread of its own: Ray may answer late."""
        import ray

        while True:
            try:
                found = {
                    node["NodeID"]: (node["NodeManagerAddress"], int(node["Resources"].get("CPU", 0)))
                    for node in ray.nodes()
                    if node["Alive"] and node["NodeID"] != self._home
                }
            except Exception:  # noqa: BLE001 - whatever Ray raises: the head is away, and the machines may still work
                _log.warning("its head does not answer")
            else:
                self.post(partial(self.update, found))
            time.sleep(_LOOK_S)

    def update(self, found: dict[str, tuple[str, int]]) -> None:
        """Take note of the machines that there are: by Ray's name, their address and their number of processors."""
        gone = [machine for node, machine in self._machines.items() if node not in found]
        for machine in gone:  # first of all, so that what one worker had does not go to the next one
            for worker in machine.workers:
                worker.ready = False
        for machine in gone:
            for worker in tuple(machine.workers):
                self.lose(worker)
        self._machines = {node: machine for node, machine in self._machines.items() if node in found}
        for node, (name, processors) in found.items():
            machine = self._machines.setdefault(node, _Machine(name, processors))
            if machine.refused is None and time.monotonic() >= machine.retry_at:
                while len(machine.workers) < processors:
                    machine.workers.append(worker := Worker(next(self._numbers), node))
                    self.aside(partial(self._start, worker))

    def lose(self, worker: Worker, *, kill: bool = False) -> None:
        """Forget a worker that has ended, or has to; another one takes its place."""
        if worker.gone:
            return
        worker.gone, worker.ready = True, False
        if (machine := self._machines.get(worker.node)) is not None:
            machine.workers.remove(worker)
            machine.retry_at = time.monotonic() + (0.0 if kill else _RETRY_FIRST_S * (1 << machine.failures))
        if kill:
            self.aside(partial(_kill, worker))
        self.on_lost(worker)

    def _start(self, worker: Worker) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if worker.gone:
            return
        try:
            there = NodeAffinitySchedulingStrategy(worker.node, soft=False)
            kind = ray.remote(NodeWorker).options(
                num_cpus=1,
                max_restarts=0,
                max_task_retries=0,
                scheduling_strategy=there,
                runtime_env={"env_vars": {"OMP_NUM_THREADS": "1", "PYTHONPATH": _path(), **self._environment}},
            )
            worker.actor = kind.remote()
            future = worker.actor.warm.remote().future()
        except Exception as error:  # noqa: BLE001 - whatever Ray raises
            self.post(partial(self._failed, worker, str(error)))
        else:
            future.add_done_callback(lambda done: self.post(lambda: self.warmed(worker, done)))

    def warmed(self, worker: Worker, done: Any) -> None:
        """Use a worker whose `warm` has returned, or refuse its machine."""
        if worker.gone:
            return
        if (error := done.exception()) is not None:
            self._failed(worker, str(error))
            return
        machine = self._machines[worker.node]
        theirs, unfit = done.result()
        if unfit is not None:
            machine.refused = f"the kernels do not work on its processor: {unfit}"
        elif theirs != self._identity:
            machine.refused = f"its kernels are {theirs}; the server's are {self._identity}"
        if machine.refused is not None:
            _log.warning("%s gets no work: %s", machine.name, machine.refused)
            for other in tuple(machine.workers):
                self.lose(other, kill=True)
            return
        machine.failures = 0
        worker.ready = True
        self.on_change()

    def _failed(self, worker: Worker, detail: str) -> None:
        """Start a worker that did not become ready again, later and later."""
        if worker.gone:
            return
        machine = self._machines[worker.node]
        if time.monotonic() >= machine.retry_at:  # the first one of this attempt
            machine.failures = min(machine.failures + 1, _MOST_DOUBLINGS)
        _log.warning("a worker on %s did not start: %s", machine.name, detail.strip().rpartition("\n")[2])
        self.lose(worker)


def _kill(worker: Worker) -> None:
    import ray

    if worker.actor is not None:
        with suppress(Exception):  # its machine may be gone
            ray.kill(worker.actor)


def _target_settings() -> dict[str, str]:
    """Return the environment in which a machine chooses this process's target, if it can run it."""
    names = (NAME, SETTING, "NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES")
    given = {name: os.environ[name] for name in names if os.environ.get(name)} or {NAME: target().name}
    return {NAME: "", SETTING: "", **given}  # not what the machine itself has set


def _path() -> str:
    return os.pathsep.join(path for path in sys.path if path)
