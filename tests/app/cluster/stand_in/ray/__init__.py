"""A stand-in for Ray: machines are threads of the process that connects, and a file says what is wrong with them.

It has what the engine uses of Ray. The file, named by `STAND_IN`, holds an object: `machines` gives each machine's
number of processors, `broken` what is wrong with some, one of `FAULTS`, and `put` what happens when an input is copied:
``full`` or ``hang``. Beside it are files with a line for each unit that is submitted (``.submitted``), and with the
machine of each that has begun (``.units``).
"""

from __future__ import annotations

import inspect
import json
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ray.exceptions import ObjectLostError, ObjectStoreFullError, RayTaskError, WorkerCrashedError

RAISED: dict[str, type[Exception]] = {
    "raises": ValueError, "no_memory": MemoryError, "full": ObjectStoreFullError, "lost": ObjectLostError,
}  # fmt: skip
FAULTS = ("dies", "silent", *RAISED, "other", "unfit", "does_not_start")
"""A worker ends during a unit or never answers; a unit raises; a machine has another target, or kernels that fail."""


def state() -> dict[str, Any]:
    """Read the file."""
    found: dict[str, Any] = json.loads(Path(os.environ["STAND_IN"]).read_text("utf-8"))
    return found


def init(_address: str = "", **_: object) -> None:
    """Connect, unless there is no cluster."""
    if not state()["machines"]:
        raise ConnectionError("there is no cluster")
    _cluster.thread = threading.Thread(target=_cluster.schedule, daemon=True)
    _cluster.thread.start()


def shutdown() -> None:
    """Disconnect; no task may be running."""
    _cluster.over = True
    _cluster.thread.join()


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


def cancel(task: _Task, *, force: bool) -> None:
    """End a task, and the worker that runs it."""
    assert force
    task.end(WorkerCrashedError())


def remote(*, num_cpus: int, max_retries: int, scheduling_strategy: str) -> Callable[[Callable[..., Any]], _Function]:
    """Return what makes a function one that runs on machines, as they become free, and once."""
    assert (num_cpus, max_retries, scheduling_strategy) == (1, 0, "SPREAD")
    return _Function


class _Function:
    def __init__(self, function: Callable[..., Any]) -> None:
        assert inspect.isfunction(function), "Ray takes no other callable"
        self._function = function
        self._machines: set[str] = set()

    def options(self, *, label_selector: dict[str, str]) -> _Function:
        """Return the function on some of the machines."""
        chosen = _Function(self._function)
        (found,) = re.findall(r"^in\((.+)\)$", label_selector["ray.io/node-id"])
        chosen._machines = set(found.split(","))
        return chosen

    def remote(self, *arguments: Any) -> _Task:
        """Start a task."""
        task = _Task(self._function, arguments, self._machines)
        task.note("submitted", "")
        with _cluster.lock:
            _cluster.waiting.append(task)
        return task


class _Task:
    """A call of a function, and the futures that get its result."""

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...], machines: set[str]) -> None:
        self.function, self.arguments, self.machines = function, arguments, machines
        self._result: Future[Any] = Future()

    @property
    def over(self) -> bool:
        """Whether it has a result, or was cancelled."""
        return self._result.done()

    def future(self) -> Future[Any]:
        """Return another future, which may be cancelled."""
        future: Future[Any] = Future()

        def copy(result: Future[Any]) -> None:
            with suppress(InvalidStateError):
                if (error := result.exception()) is not None:
                    future.set_exception(error)
                else:
                    future.set_result(result.result())

        self._result.add_done_callback(copy)
        return future

    def end(self, error: Exception) -> None:
        """Let it fail, unless it has ended."""
        with suppress(InvalidStateError):
            self._result.set_exception(error)

    def note(self, what: str, line: str) -> None:
        """Add a line to a file, if this is a unit."""
        if self.function.__name__ == "compute":
            with Path(os.environ["STAND_IN"]).with_suffix(f".{what}").open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")

    def run(self, machine: str) -> None:
        """Call the function on a machine."""

        def fault() -> str | None:
            found: str | None = state().get("broken", {}).get(machine)
            return found

        unit = self.function.__name__ == "compute"
        self.note("units", machine)
        while unit and fault() == "silent" and not self.over:
            time.sleep(0.01)
        broken = fault()
        if machine not in state()["machines"] or broken == ("dies" if unit else "does_not_start"):
            self.end(WorkerCrashedError())
            return
        try:
            if unit and (error := RAISED.get(broken or "")) is not None:
                raise RayTaskError(error())
            result = self.function(*self.arguments)
            if self.function.__name__ == "check" and broken == "other":
                result = "other", result[1]
            if self.function.__name__ == "check" and broken == "unfit":
                result = result[0], "it is broken"
        except Exception as error:  # noqa: BLE001 - whatever a unit raises
            self.end(error)
        else:
            with suppress(InvalidStateError):
                self._result.set_result(result)


class _Cluster:
    """Give waiting tasks to machines that have a processor free, in turns."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.waiting: deque[_Task] = deque()
        self.thread = threading.Thread()
        self.over = False
        self._running: list[tuple[str, _Task]] = []

    def schedule(self) -> None:
        """Look for work until the end."""
        while not self.over:
            with self.lock:
                self._running = [(machine, task) for machine, task in self._running if not task.over]
                for task in tuple(self.waiting):
                    self._place(task)
            time.sleep(0.001)

    def _place(self, task: _Task) -> None:
        machines = state()["machines"]
        loads = {name: sum(name == each for each, _ in self._running) for name in task.machines & machines.keys()}
        if not loads or task.over:
            self.waiting.remove(task)
            task.end(WorkerCrashedError())  # as Ray ends a task whose machines are gone
            return
        machine = min(loads, key=lambda name: loads[name] / machines[name])
        if loads[machine] < machines[machine]:
            self.waiting.remove(task)
            self._running.append((machine, task))
            threading.Thread(target=task.run, args=(machine,), daemon=True).start()


_cluster = _Cluster()
