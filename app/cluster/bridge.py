"""Isolate the Ray driver in a child process, which runs units of the server's jobs as Ray tasks.

Run as `python -m app.cluster.bridge DESCRIPTOR IDENTITY ADDRESS MIXED JOIN`, in a process group of its own. A driver
that has lost its cluster blocks for minutes, and at last Ray ends its process: the server lives on, kills a bridge that
is silent, and starts another. Ray's calls that may block are made in threads.
"""

from __future__ import annotations

import asyncio
import logging
import math
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from app.cluster.machines import Machines, submit
from app.cluster.messages import Answer, Begin, Compute, Nodes, Outcome, Recall, Release, Released
from app.cluster.node import compute
from app.cluster.units import Array, Portion, arguments, write
from app.pool.messages import Decoder, Foreign, receive, send
from kernels import storage_dtype
from kernels.target import NAME, SETTING, target

__all__ = ["main"]

_BEAT_S = 0.1
"""Seconds between two signs of life."""

_STUCK_S, _SLOW_RATE = 10.0, 50e6
"""Seconds after which a call of Ray's is taken to block for good, and bytes a second that it copies at least."""

_GRACE_S = 5.0
"""Seconds that a worker may go on with an abandoned unit; its processor is not given others meanwhile."""

_INLINE_BYTES = 64 << 10
"""Inputs up to this size are sent with the unit; Ray would fetch them in a round trip of its own."""


@dataclass(eq=False)
class _Job:
    begin: Begin
    tensors: list[Array]
    """The inputs, the output, and the scratch if there is one."""
    machines: set[str] = field(default_factory=set)
    units: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    references: dict[tuple[int, Portion], Any] = field(default_factory=dict)
    """Inputs in Ray's memory, each put once."""


def main() -> None:
    """Serve one server until it is gone."""
    try:
        asyncio.run(_serve(int(sys.argv[1]), *sys.argv[2:]))
    except BaseException:  # noqa: BLE001 - whatever it is, the node that was started has to end too
        traceback.print_exc()
    finally:
        _end()


async def _serve(descriptor: int, identity: str, address: str, mixed: str, join: str) -> None:
    import ray

    if int(join):
        _join(address, int(join))
    environment = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    if mixed == "common":
        environment |= _target_settings()
    where, quiet = address or "auto", {"log_to_driver": False, "logging_level": logging.ERROR}
    ray.init(where, namespace="convgrad", runtime_env={"env_vars": environment}, **quiet)
    machines = Machines(identity=identity, home=ray.get_runtime_context().get_node_id())
    await _Bridge(socket.socket(fileno=descriptor), machines).serve()


def _target_settings() -> dict[str, str]:
    """Return the environment in which a machine chooses this process's target, if it can run it."""
    names = (NAME, SETTING, "NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES")
    given = {name: os.environ[name] for name in names if os.environ.get(name)} or {NAME: target().name}
    return {NAME: "", SETTING: "", **given}  # not what the machine itself has set


def _join(address: str, memory: int) -> None:
    """Make this machine a node that only sends tensors; it ends with this process's group.

    Raises `RuntimeError` with Ray's output when that does not succeed.
    """
    ray = Path(sys.executable).with_name("ray")
    options = (f"--address={address}", "--num-cpus=0", f"--object-store-memory={memory}", "--block")
    node = subprocess.Popen(  # noqa: S603 - Ray's own command beside our interpreter
        [ray, "start", *options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert node.stdout is not None
    lines: list[str] = []
    for line in node.stdout:
        lines.append(line)
        if "runtime started" in line:
            # Nobody reads on, and it must not wait for a full pipe.
            threading.Thread(target=node.stdout.read, daemon=True).start()
            return
    raise RuntimeError("this machine can't join the cluster: " + "".join(lines[-5:]).strip())


def _end() -> NoReturn:
    """End this process and the node that it may have started."""
    os.killpg(0, signal.SIGKILL)
    os._exit(1)


class _Bridge:
    """Run the server's units as Ray tasks, and write their results to the memory of their jobs."""

    def __init__(self, sock: socket.socket, machines: Machines) -> None:
        self._sock, self._machines = sock, machines
        self._jobs: dict[int, _Job] = {}
        self._abandoned: set[asyncio.Task[None]] = set()
        self._calls = ThreadPoolExecutor(1)  # in order: a job's memory is released after the last call that reads it
        self._until = math.inf
        self._loop = asyncio.get_running_loop()

    async def serve(self) -> None:
        """Serve until the process ends; raises `RuntimeError` where Ray blocks."""
        threading.Thread(target=self._listen, daemon=True).start()
        watching = asyncio.create_task(self._machines.watch())
        while time.monotonic() < self._until and not watching.done():
            self._send(Nodes(tuple(self._machines.states.values()), len(self._abandoned)))
            await asyncio.sleep(_BEAT_S)
        raise RuntimeError("Ray does not return from a call")

    def _send(self, message: Any) -> None:
        if not send(self._sock, Foreign(message)):
            _end()  # the server is gone

    def _listen(self) -> None:
        decoder = Decoder()
        while (found := receive(self._sock, decoder)) is not None:
            message, descriptors = found
            assert isinstance(message, Foreign)
            self._loop.call_soon_threadsafe(self._on_message, message.content, descriptors)
        _end()

    def _on_message(self, message: Any, descriptors: list[int]) -> None:
        job = self._jobs.get(message.job)
        match message:
            case Begin():
                self._begin(message, descriptors)
            case Compute(unit=unit) if job is not None:
                job.units[unit] = asyncio.create_task(self._compute(job, unit))
            case Recall(number, unit) if job is not None and unit in job.units:
                job.units.pop(unit).cancel()
                self._send(Answer(number, unit, "recalled"))
            case Release(number) if job is not None:
                for task in self._jobs.pop(number).units.values():
                    task.cancel()
                self._calls.submit(self._release, job)

    def _begin(self, begin: Begin, descriptors: list[int]) -> None:
        """Map a job's memory; what units read of it is copied to Ray's when the first of them is submitted."""
        problem, item = begin.plan.problem, storage_dtype(begin.plan.problem.dtype)
        inputs = [(shape, item, mmap.PROT_READ) for shape in problem.input_shapes]
        both = mmap.PROT_READ | mmap.PROT_WRITE
        output, scratch = (problem.output_shape, problem.output_dtype, both), ((begin.plan.scratch_bytes,), np.uint8, both)
        tensors: list[Array] = []
        try:
            for descriptor, (shape, dtype, access) in zip(descriptors, [*inputs, output, scratch], strict=False):
                tensors.append(np.ndarray(shape, dtype, mmap.mmap(descriptor, 0, prot=access)))
        except OSError:
            traceback.print_exc()  # units find that tensors are missing, as where there are too few descriptors
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        self._jobs[begin.job] = _Job(begin, tensors)

    def _release(self, job: _Job) -> None:
        job.references.clear()
        job.tensors.clear()
        self._loop.call_soon_threadsafe(self._send, Released(job.begin.job))

    async def _compute(self, job: _Job, unit: int) -> None:
        """Compute a unit as a Ray task, and write its result."""
        plan, reference, seconds, detail = job.begin.plan, None, 0.0, ""
        outcome: Outcome = "done"
        try:
            reference = await self._loop.run_in_executor(self._calls, self._submit, job, unit)
            result, seconds = await asyncio.wrap_future(reference.future())
            write(plan, plan.units[unit], result, job.tensors[len(plan.problem.input_shapes)], job.tensors[-1])
        except asyncio.CancelledError:
            if reference is not None:
                self._abandoned.add(task := asyncio.create_task(_abandon(reference)))
                task.add_done_callback(self._abandoned.discard)
            raise
        except Exception as error:  # noqa: BLE001 - whatever Ray or the kernel raises
            outcome, detail = _outcome(error), str(error)
        del job.units[unit]
        self._send(Answer(job.begin.job, unit, outcome, seconds, detail))

    def _submit(self, job: _Job, unit: int) -> Any:
        """Submit a unit to Ray, in the thread for calls that may block."""
        self._until = time.monotonic() + _STUCK_S + sum(tensor.nbytes for tensor in job.tensors) / _SLOW_RATE
        try:
            job.machines = self._machines.choose(job.machines, job.begin.nodes, self._load)
            plan, read, share = arguments(job.begin.plan, unit)
            parts = [self._reference(job, number, portion) for number, portion in enumerate(read)]
            return submit(compute, job.machines, plan, read, share, *parts)
        finally:
            self._until = math.inf

    def _load(self, machine: str) -> int:
        return sum(machine in job.machines for job in tuple(self._jobs.values()))

    def _reference(self, job: _Job, number: int, portion: Portion) -> Any:
        import ray

        key = number, portion
        if key not in job.references:
            # Tasks view the memory of contiguous arrays; of others they get a copy.
            part = np.ascontiguousarray(job.tensors[number][portion.index])
            job.references[key] = part if part.nbytes <= _INLINE_BYTES else ray.put(part)
        return job.references[key]


async def _abandon(reference: Any) -> None:
    """Let a worker end its unit; kill it where that takes too long, as another process takes seconds to start."""
    import ray

    with suppress(Exception):
        await asyncio.wait_for(asyncio.wrap_future(reference.future()), _GRACE_S)
    ray.cancel(reference, force=True)  # nothing happens to a task that has ended


def _outcome(error: Exception) -> Outcome:
    """Tell a worker that has ended from a unit that has raised, and from a cluster that lacks memory."""
    from ray.exceptions import ObjectStoreFullError, OutOfDiskError, RayError, RayTaskError

    if isinstance(error, RayTaskError):
        return "away" if isinstance(error.cause, RayError | MemoryError) else "failed"
    return "lost" if isinstance(error, RayError) and not isinstance(error, ObjectStoreFullError | OutOfDiskError) else "away"


if __name__ == "__main__":
    main()
