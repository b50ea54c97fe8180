"""The server's side of one worker: its process and socket, and the units it computes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from app.pool.causes import exit_code
from app.pool.jobs import JobRun
from app.pool.messages import Done, Run, receive, send
from kernels import Unit

__all__ = ["Assignment", "PlanCopy", "WorkerHandle"]

_MOST_SEGMENTS = 64
_MOST_PLANS = 64


@dataclass(frozen=True, slots=True)
class PlanCopy:
    """A plan as it is sent to workers."""

    number: int
    pickled: bytes


@dataclass(frozen=True, eq=False, slots=True)
class Assignment:
    """A unit that was given to a worker."""

    run: JobRun
    unit: Unit
    serial: int


class WorkerHandle:
    """One worker, until its process `pid` is gone, with the descriptors of its socket and of its process.

    `on_ready` is called once, when the process has sent its first message; `on_done` for each unit; `on_death` when the
    process is certainly gone and everything it sent has been delivered. Only then may the memory that it wrote to be
    reused: a pidfd becomes readable when the process has no thread and no memory left.
    """

    def __init__(
        self,
        pid: int,
        sock: int,
        pidfd: int,
        *,
        on_ready: Callable[[WorkerHandle], None],
        on_done: Callable[[WorkerHandle, Assignment, Done], None],
        on_death: Callable[[WorkerHandle, int | None], None],
    ) -> None:
        self.pid = pid
        self.ready = False
        self.assignments: deque[Assignment] = deque()  # of one job: the running unit, and one prefetched at most
        self._on_ready, self._on_done, self._on_death = on_ready, on_done, on_death
        self._serial = 0
        self._segments: OrderedDict[int, None] = OrderedDict()
        self._plans: OrderedDict[int, None] = OrderedDict()
        self._gone: list[int] = []  # segments that the worker has to unmap
        self._sock, self._pidfd = socket.socket(fileno=sock), pidfd
        self._sock.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._sock, self._read)
        self._loop.add_reader(self._pidfd, self._on_exit)

    def run(self, run: JobRun, plan: PlanCopy) -> None:
        """Send the next unit of a job, with descriptors of the segments that the worker has not mapped."""
        unit, job = run.take(), run.job
        self._serial += 1
        self.assignments.append(Assignment(run, unit, self._serial))
        fresh = {segment.id: segment for segment in job.segments if segment.id not in self._segments}
        plan_bytes = None if plan.number in self._plans else plan.pickled
        self._gone += _use(self._segments, [segment.id for segment in job.segments], _MOST_SEGMENTS)
        message = Run(
            serial=self._serial,
            plan=plan.number,
            unit=tuple(vars(unit).values()),
            inputs=tuple([segment.id for segment in job.inputs]),
            output=job.output.id,
            scratch=job.scratch.id if job.scratch else None,
            plan_bytes=plan_bytes,
            attach=tuple([(segment.id, segment.block_size) for segment in fresh.values()]),
            old_segments=tuple(self._gone),
            old_plans=tuple(_use(self._plans, [plan.number], _MOST_PLANS)),
        )
        self._gone.clear()
        self._send(tuple(message), [segment.fd for segment in fresh.values()])

    def stop(self, assignment: Assignment) -> None:
        """Ask the worker to stop this unit and those before it, unless it is done."""
        if assignment in self.assignments:
            self._send(assignment.serial)

    def forget(self, segment: int) -> None:
        """Let the worker unmap a segment that no longer exists, before its next unit."""
        if segment in self._segments:
            del self._segments[segment]
            self._gone.append(segment)

    def kill(self) -> None:
        """Kill the process; `on_death` is called when it is gone."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def snapshot(self) -> dict[str, Any]:
        """Describe the worker."""
        first = self.assignments[0] if self.assignments else None
        unit = first and {"job": first.run.job.id, "index": first.unit.index}
        return {"pid": self.pid, "ready": self.ready, "unit": unit}

    def _send(self, message: object, descriptors: list[int] | None = None) -> None:
        """Send what always fits: two units and two stops at most are on their way."""
        with contextlib.suppress(BrokenPipeError):  # `on_death` follows
            send(self._sock, message, descriptors or ())

    def _read(self) -> bool:
        """Handle one message; return whether there was one."""
        try:
            found = receive(self._sock)
        except BlockingIOError:
            return False
        if found is None:  # it closed its socket
            self._loop.remove_reader(self._sock)
            self.kill()
        elif not found[0]:
            self.ready = True
            self._on_ready(self)
        else:
            done, assignment = Done(*found[0]), self.assignments.popleft()
            assert assignment.serial == done.serial
            if done.outcome in {"failed", "no_memory"}:  # perhaps before the worker has mapped them
                for segment in assignment.run.job.segments:
                    self.forget(segment.id)
            self._on_done(self, assignment, done)
        return found is not None

    def _on_exit(self) -> None:
        while self._read():
            pass
        self._loop.remove_reader(self._pidfd)
        self._loop.remove_reader(self._sock)
        os.close(self._pidfd)
        self._sock.close()
        self._on_death(self, exit_code(self.pid))


def _use(cache: OrderedDict[int, None], numbers: list[int], keep: int) -> list[int]:
    """Note what is used last; return the numbers that are dropped."""
    for number in numbers:
        cache[number] = None
        cache.move_to_end(number)
    return [cache.popitem(last=False)[0] for _ in range(len(cache) - keep)]
