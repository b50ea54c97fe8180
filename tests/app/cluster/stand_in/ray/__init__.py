"""A stand-in for Ray: machines are threads of the process that connects, and a file says what is wrong with them.

It has what the engine uses of Ray. The file, named by `STAND_IN`, holds an object: `machines` gives each machine's
number of processors, `broken` what is wrong with some, one of `FAULTS`, and `put` what happens when an input is copied:
``full`` or ``hang``.
"""

from __future__ import annotations

import json
import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ray.exceptions import ObjectLostError, ObjectStoreFullError, RayActorError, RayTaskError

RAISED: dict[str, type[Exception]] = {
    "raises": ValueError, "no_memory": MemoryError, "full": ObjectStoreFullError, "lost": ObjectLostError,
}  # fmt: skip
FAULTS = ("dies", "silent", *RAISED, "other", "unfit", "does_not_start")
"""A worker ends during a unit or never answers; a unit raises; a machine has another target, or kernels that fail."""


def state() -> dict[str, Any]:
    """Read the file."""
    found: dict[str, Any] = json.loads(Path(os.environ["STAND_IN"]).read_text("utf-8"))
    return found


def init(**_: object) -> None:
    """Connect, unless there is no cluster."""
    if not state()["machines"]:
        raise ConnectionError("there is no cluster")


def get_runtime_context() -> SimpleNamespace:
    """Return what knows the name of the server's node."""
    return SimpleNamespace(get_node_id=lambda: "home")


def nodes() -> list[dict[str, Any]]:
    """Describe the machines, the server's among them."""
    machines = {"home": 1, **state()["machines"]}
    return [
        {"NodeID": name, "NodeManagerAddress": name, "Alive": True, "Resources": {"CPU": processors}}
        for name, processors in machines.items()
    ]


def put(tensor: Any) -> Any:
    """Copy a tensor."""
    fault = state().get("put")
    if fault == "full":
        raise ObjectStoreFullError
    while fault == "hang":
        time.sleep(0.01)
        fault = state().get("put")
    copy = tensor.copy()
    copy.flags.writeable = False
    return copy


def kill(actor: _Actor) -> None:
    """End a worker."""
    actor.end()


def remote(kind: type) -> _Kind:
    """Return what makes workers."""
    return _Kind(kind)


class _Kind:
    def __init__(self, kind: type) -> None:
        self._kind = kind
        self._node, self._told = "", False

    def options(self, *, scheduling_strategy: Any, runtime_env: dict[str, Any], **_: object) -> _Kind:
        """Say on which machine the worker runs, and in which environment."""
        self._node = scheduling_strategy.node_id
        self._told = bool(runtime_env["env_vars"].get("CONVGRAD_TARGET"))
        return self

    def remote(self) -> _Actor:
        """Start a worker."""
        return _Actor(self._kind(), self._node, told=self._told)


class _Actor:
    """A worker: one call after the other, in a thread of its own."""

    def __init__(self, made: Any, node: str, *, told: bool) -> None:
        self._node, self._told = node, told
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._open: set[Future[Any]] = set()
        self.warm = self._method(lambda: self._warm(made))
        self.compute = self._method(made.compute)
        threading.Thread(target=self._run, daemon=True).start()

    def end(self) -> None:
        """Fail all calls as Ray does those of a dead worker."""
        for future in tuple(self._open):
            self._finish(future.set_exception, RayActorError())

    def _method(self, call: Callable[..., Any]) -> SimpleNamespace:
        def submit(*arguments: Any) -> SimpleNamespace:
            future: Future[Any] = Future()
            self._open.add(future)
            future.add_done_callback(self._open.discard)
            self._calls.put((lambda: call(*arguments), future))
            return SimpleNamespace(future=lambda: future)

        return SimpleNamespace(remote=submit)

    def _fault(self) -> str | None:
        fault: str | None = state().get("broken", {}).get(self._node)
        return fault

    def _warm(self, made: Any) -> Any:
        if self._fault() == "does_not_start":
            self.end()
        identity, unfit = made.warm()
        if self._fault() == "other" and not self._told:
            return "other", unfit
        return identity, "it is broken" if self._fault() == "unfit" else unfit

    def _run(self) -> None:
        while True:
            call, future = self._calls.get()
            while self._fault() == "silent":
                time.sleep(0.01)
            if self._fault() == "dies" or self._node not in state()["machines"]:
                self.end()
                return
            try:
                if (error := RAISED.get(self._fault() or "")) is not None:
                    raise RayTaskError(error())
                result = call()
            except Exception as error:  # noqa: BLE001 - whatever a unit raises
                self._finish(future.set_exception, error)
            else:
                self._finish(future.set_result, result)

    @staticmethod
    def _finish(how: Callable[[Any], None], outcome: Any) -> None:
        try:
            how(outcome)
        except InvalidStateError:  # it has ended meanwhile
            return
