"""The workers on the machines of the cluster: one for each of Ray's processors, warm before it takes work."""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from app.cluster.messages import Node
from app.cluster.node import NodeWorker, identity
from kernels.target import NAME, target

__all__ = ["Fleet", "Worker"]

_log = logging.getLogger(__name__)

_LOOK_S = 0.5
"""Seconds between two looks at which machines there are."""

_RETRY_S = 2.0
"""Seconds until a worker that ended is started again."""


@dataclass(eq=False)
class Worker:
    """One actor, and the units that it has, the running one first."""

    number: int
    node: str
    actor: Any
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
    workers: list[Worker] = field(default_factory=list)


class Fleet:
    """Keep a worker on every processor of the cluster; with `common`, all compute for the target of the server.

    `post` puts a function into the queue of the one thread that may call the other methods, except for `watch`.
    """

    def __init__(self, *, common: bool) -> None:
        self.post: Callable[[Callable[[], object]], object] = lambda _: None
        self.on_change: Callable[[], None] = lambda: None
        self.on_lost: Callable[[Worker], None] = lambda _: None
        self._numbers = itertools.count(1)
        self._machines: dict[str, _Machine] = {}
        self._environment = {NAME: target().name} if common else {}

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
                    if node["Alive"]
                }
            except Exception:  # noqa: BLE001 - whatever Ray raises: the head is away, and the machines may still work
                _log.warning("the head of the cluster does not answer")
            else:
                self.post(partial(self._update, found))
            time.sleep(_LOOK_S)

    def lose(self, worker: Worker, *, kill: bool = False) -> None:
        """Forget a worker that has ended, or has to; another one takes its place."""
        if worker.gone:
            return
        worker.gone, worker.ready = True, False
        if (machine := self._machines.get(worker.node)) is not None:
            machine.workers.remove(worker)
            machine.retry_at = time.monotonic() + (0.0 if kill else _RETRY_S)
        if kill:
            import ray

            ray.kill(worker.actor)
        self.on_lost(worker)

    def _update(self, found: dict[str, tuple[str, int]]) -> None:
        for node in [node for node in self._machines if node not in found]:
            for worker in tuple(self._machines[node].workers):
                self.lose(worker)
            del self._machines[node]
        for node, (name, processors) in found.items():
            machine = self._machines.setdefault(node, _Machine(name, processors))
            if machine.refused is None and time.monotonic() >= machine.retry_at:
                while len(machine.workers) < processors:
                    machine.workers.append(self._start(node))

    def _start(self, node: str) -> Worker:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        there = NodeAffinitySchedulingStrategy(node, soft=False)
        kind = ray.remote(NodeWorker).options(
            num_cpus=1,
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy=there,
            runtime_env={"env_vars": {"OMP_NUM_THREADS": "1", "PYTHONPATH": _path(), **self._environment}},
        )
        worker = Worker(next(self._numbers), node, kind.remote())
        future = worker.actor.warm.remote().future()
        future.add_done_callback(lambda done: self.post(lambda: self._warmed(worker, done)))
        return worker

    def _warmed(self, worker: Worker, done: Any) -> None:
        if worker.gone:
            return
        machine = self._machines[worker.node]
        error = done.exception()
        if error is not None:
            _log.warning("a worker on %s did not start: %s", machine.name, str(error).strip().rpartition("\n")[2])
            self.lose(worker)
            return
        theirs, _ = done.result()
        if theirs != identity():
            machine.refused = f"its kernels are {theirs}; the server's are {identity()}"
            _log.warning("%s gets no work: %s", machine.name, machine.refused)
            for other in tuple(machine.workers):
                self.lose(other, kill=True)
            return
        worker.ready = True
        self.on_change()


def _path() -> str:
    import sys

    return os.pathsep.join(path for path in sys.path if path)
