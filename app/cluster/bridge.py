"""Isolate the Ray driver in a child process, which runs units of the server's jobs as Ray tasks.

Run as `python -m app.cluster.bridge DESCRIPTOR IDENTITY ADDRESS JOIN`, in a process group of its own. A driver
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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from app.cluster.machines import Machines, submit
from app.cluster.messages import Away, KernelFailed, Lost, Nodes, Reply, Request
from app.cluster.node import compute
from app.cluster.units import Array, Portion, arguments, write
from app.pool.messages import receive, send
from engine.threads import Job
from kernels import Plan

__all__ = ["main"]

_BEAT_S = 0.1
"""Seconds between two signs of life."""

_STUCK_S, _SLOW_RATE = 10.0, 50e6
"""A call to Ray counts as blocked after this many seconds, plus the time to copy its tensors at this rate (bytes/s)."""

_GRACE_S = 5.0
"""Seconds that a worker may go on with an abandoned unit; its processor is given no others meanwhile."""

_INLINE_BYTES = 64 << 10
"""Inputs up to this size are sent with the unit; Ray would fetch them in a round trip of its own."""


@dataclass(eq=False)
class _Job:
    plan: Plan
    nodes: int
    tensors: list[Array]
    """The inputs, the output, and the scratch if there is one."""
    units: set[int] = field(default_factory=set)
    """Those that the server waits for, or has waited for."""
    machines: set[str] = field(default_factory=set)
    references: dict[tuple[int, Portion], Any] = field(default_factory=dict)
    """Inputs in Ray's memory, each put once."""


def main() -> None:
    """Serve one server until it is gone."""
    try:
        asyncio.run(_serve(*sys.argv[1:]))
    except BaseException:  # noqa: BLE001 - whatever it is, the node that was started has to end too
        traceback.print_exc()
    finally:
        _end()


async def _serve(descriptor: str, identity: str, address: str, join: str) -> None:
    import ray

    if int(join):
        _join(address, int(join))
    environment = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    ray.init(address or "auto", namespace="convgrad", runtime_env={"env_vars": environment}, **quiet)
    machines = Machines(identity=identity, home=ray.get_runtime_context().get_node_id())
    await _Bridge(socket.socket(fileno=int(descriptor)), machines).serve()


def _join(address: str, memory: int) -> None:
    """Make this machine a node that only sends tensors; it ends with this process's group.

    Raises `RuntimeError` with Ray's output when that does not succeed.
    """
    options = (f"--address={address}", "--num-cpus=0", f"--object-store-memory={memory}", "--block")
    pipe, ray = subprocess.PIPE, Path(sys.executable).with_name("ray")
    node = subprocess.Popen(  # noqa: S603 - Ray's own command beside our interpreter
        [ray, "start", *options], stdin=subprocess.DEVNULL, stdout=pipe, stderr=subprocess.STDOUT, text=True
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
    """Run the server's units as Ray tasks; the server calls its public methods."""

    def __init__(self, sock: socket.socket, machines: Machines) -> None:
        self._sock, self._machines = sock, machines
        self._jobs: dict[int, _Job] = {}
        self._requests: dict[int, asyncio.Task[None]] = {}
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
        raise RuntimeError("a call to Ray is blocked")

    async def begin(self, number: int, plan: Plan, nodes: int, *descriptors: int) -> None:
        """Take a job for at most `nodes` machines, with the descriptors of its inputs, its output and its scratch."""
        self._jobs[number] = _Job(plan, nodes, _mapped(plan, descriptors))

    async def compute(self, number: int, unit: int) -> float:
        """Compute a unit as a Ray task, and write its result to the job's memory; return the seconds that it took."""
        job = self._jobs[number]
        job.units.add(unit)
        submitted = self._loop.run_in_executor(self._calls, self._submit, job, unit)
        try:
            await asyncio.wait({submitted})
            result, seconds = await asyncio.wrap_future(submitted.result().future())
        except asyncio.CancelledError:
            job.units.discard(unit)
            self._abandoned.add(task := asyncio.create_task(_abandon(submitted)))
            task.add_done_callback(self._abandoned.discard)
            raise
        write(job.plan.units[unit], result, job.tensors[len(job.plan.problem.input_shapes)], job.tensors[-1])
        return float(seconds)

    async def release(self, number: int) -> None:
        """Forget a job, and its memory."""
        if (job := self._jobs.pop(number, None)) is not None:
            await self._loop.run_in_executor(self._calls, job.references.clear)
            job.tensors.clear()

    def _send(self, message: Any) -> None:
        try:
            send(self._sock, message)
        except BrokenPipeError:
            _end()  # the server is gone

    def _listen(self) -> None:
        try:
            while (found := receive(self._sock)) is not None:
                self._loop.call_soon_threadsafe(self._on_request, *found)
        finally:
            _end()

    def _on_request(self, request: Request, descriptors: list[int]) -> None:
        if request.method is not None:
            self._requests[request.number] = asyncio.create_task(self._answer(request, descriptors))
        elif (task := self._requests.get(request.number)) is not None:
            self._loop.call_soon(task.cancel)  # not before it has started, or it would not answer

    async def _answer(self, request: Request, descriptors: list[int]) -> None:
        try:
            result = await getattr(self, str(request.method))(*request.arguments, *descriptors)
        except asyncio.CancelledError:
            result = None
        except Exception as error:  # noqa: BLE001 - whatever Ray or the kernel raises
            result = _reason(error)
        del self._requests[request.number]
        self._send(Reply(request.number, result))

    def _submit(self, job: _Job, unit: int) -> Any:
        self._until = time.monotonic() + _STUCK_S + sum(tensor.nbytes for tensor in job.tensors) / _SLOW_RATE
        try:
            if unit not in job.units:
                raise LookupError("it was cancelled")
            others = [machine for each in tuple(self._jobs.values()) for machine in each.machines]
            job.machines = self._machines.choose(job.machines, job.nodes, others.count)
            plan, read, share = arguments(job.plan, unit)
            parts = [self._reference(job, number, portion) for number, portion in enumerate(read)]
            return submit(compute, job.machines, plan, read, share, *parts)
        finally:
            self._until = math.inf

    def _reference(self, job: _Job, number: int, portion: Portion) -> Any:
        import ray

        key = number, portion
        if key not in job.references:
            # Tasks view the memory of contiguous arrays; of others they get a copy.
            part = np.ascontiguousarray(job.tensors[number][portion.index])
            job.references[key] = part if part.nbytes <= _INLINE_BYTES else ray.put(part)
        return job.references[key]


async def _abandon(submitted: asyncio.Future[Any]) -> None:
    """Let a worker finish its unit, because a new process takes seconds to start; kill it if that takes too long."""
    import ray

    with suppress(Exception):  # it was not submitted
        reference = await submitted
        with suppress(Exception):
            await asyncio.wait_for(asyncio.wrap_future(reference.future()), _GRACE_S)
        ray.cancel(reference, force=True)  # nothing happens to a task that has ended


def _reason(error: Exception) -> Exception:
    """Return `Lost` if the worker died, `KernelFailed` if the unit raised, `Away` if the cluster has no memory left."""
    from ray.exceptions import ObjectStoreFullError, OutOfDiskError, RayError, RayTaskError

    if isinstance(error, RayTaskError):
        return (Away if isinstance(error.cause, RayError | MemoryError) else KernelFailed)(str(error))
    if isinstance(error, RayError) and not isinstance(error, ObjectStoreFullError | OutOfDiskError):
        return Lost(str(error))
    return Away(f"{type(error).__name__}: {error}")


def _mapped(plan: Plan, descriptors: Sequence[int]) -> list[Array]:
    """Map a job's memory; raises `OSError` where this process has no room for a descriptor or a mapping."""
    count = len(plan.problem.input_shapes)
    try:
        if len(descriptors) < count + 1 + bool(plan.scratch_bytes):  # the kernel drops those that it has no room for
            raise OSError("too many files are open")
        inputs = [mmap.mmap(descriptor, 0, prot=mmap.PROT_READ) for descriptor in descriptors[:count]]
        output, *scratch = [mmap.mmap(descriptor, 0) for descriptor in descriptors[count:]]
        job = Job.over(plan, inputs, output, scratch[0] if scratch else None)
        return [*job.inputs, job.output, *([] if job.scratch is None else [job.scratch])]
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


if __name__ == "__main__":
    main()
