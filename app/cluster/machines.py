"""The machines of the cluster, each checked before units run there, and functions as Ray tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import cache
from typing import Any

from app.cluster.messages import Node
from app.cluster.node import check, load

__all__ = ["Machines", "submit"]

_LOOK_S = 0.5
"""Seconds between two looks at which machines there are."""

_RETRY_FIRST_S, _RETRY_LAST_S = 2.0, 60.0
"""Seconds until a machine whose check failed is checked again."""


class Machines:
    """The machines that may run units: their `identity` is the server's, and they are not `home`, the server's own."""

    def __init__(self, *, identity: str, home: str) -> None:
        self._identity, self._home = identity, home
        self._checks: dict[str, asyncio.Task[None]] = {}
        self.states: dict[str, Node] = {}
        """By Ray's name."""

    def choose(self, before: Collection[str], most: int, load: Callable[[str], int]) -> set[str]:
        """Return the machines from `before` that are ready, and the least loaded others, `most` in all."""
        ready = {name for name, state in tuple(self.states.items()) if state.ready}
        kept = ready & set(before)
        return kept | set(sorted(ready - kept, key=load)[: most - len(kept)])

    async def watch(self) -> None:
        """Look for machines that have come and gone, for ever."""
        import ray

        while True:
            with suppress(Exception):  # whatever Ray raises: the head is away, and the machines may still work
                nodes = [node for node in await asyncio.to_thread(ray.nodes) if node["Alive"]]
                found = {node["NodeID"]: node for node in nodes if node["Resources"].get("CPU")}
                for name in self.states.keys() - found.keys():
                    del self.states[name]
                    self._checks.pop(name).cancel()
                for name in found.keys() - self.states.keys() - {self._home}:
                    node = found[name]
                    self.states[name] = Node(node["NodeManagerAddress"], 0, int(node["Resources"]["CPU"]))
                    self._checks[name] = asyncio.create_task(self._check(name))
            await asyncio.sleep(_LOOK_S)

    async def _check(self, name: str) -> None:
        """Make a machine ready, or refuse it; try again where the check itself fails."""
        delay, state = _RETRY_FIRST_S, self.states[name]
        while True:
            try:
                self.states[name] = await self._checked(name, state)
                return
            except Exception as error:  # noqa: BLE001 - whatever Ray raises
                failure = str(error).strip().rpartition("\n")[2]
                self.states[name] = state._replace(refused=f"its kernels can't be prepared: {failure}")
            await asyncio.sleep(delay)
            delay = min(2 * delay, _RETRY_LAST_S)

    async def _checked(self, name: str, state: Node) -> Node:
        theirs, unfit = await _run(check, name, self._identity)
        if theirs != self._identity:
            return state._replace(refused=f"its kernels are {theirs}; the server's are {self._identity}")
        if unfit is not None:
            return state._replace(refused=f"the kernels do not work on its processor: {unfit}")
        # As many tasks at a time as there are processors, so that each is in a process of its own.
        await asyncio.gather(*(_run(load, name) for _ in range(state.wanted)))
        return state._replace(ready=state.wanted)


def submit(function: Callable[..., Any], machines: Collection[str], *arguments: Any) -> Any:
    """Run a function as a Ray task on one of the machines, and return the reference to its result."""
    selector = {"ray.io/node-id": f"in({','.join(machines)})"}
    return _task(function).options(label_selector=selector).remote(*arguments)


async def _run(function: Callable[..., Any], machine: str, *arguments: Any) -> Any:
    reference = await asyncio.to_thread(submit, function, {machine}, *arguments)
    return await asyncio.wrap_future(reference.future())


@cache
def _task(function: Callable[..., Any]) -> Any:
    import ray

    # Retries by Ray are not counted in its public interface (`test_killed_worker`): the server gives the unit again.
    return ray.remote(num_cpus=1, max_retries=0, scheduling_strategy="SPREAD")(function)
