"""The server's side of one worker: its process, socket and control page, and the units it computes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from app.pool.buffers import Segment, anonymous_file
from app.pool.channel import Channel
from app.pool.control import ControlPage
from app.pool.jobs import JobRun
from app.pool.messages import Done, Forget, Hello, Message, Probe, Run
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
    """One worker, from the request to fork it until its process is gone.

    `on_ready` is called once, when the process has answered a probe over the socket and on the control page; `on_done`
    for each unit; `on_death` when the process is certainly gone and everything it sent has been delivered. Only then
    may the memory that it wrote to be reused: a pidfd becomes readable when the process has no thread and no memory
    left.
    """

    def __init__(
        self,
        number: int,
        *,
        on_ready: Callable[[WorkerHandle], None],
        on_done: Callable[[WorkerHandle, Assignment, Done], None],
        on_death: Callable[[WorkerHandle], None],
    ) -> None:
        self.number = number
        self.pid: int | None = None
        self.ready = False
        self.parent: int | None = None
        self.exit_code: int | None = None
        self.assignments: deque[Assignment] = deque()  # of one job: the running unit, and one prefetched at most
        self._on_ready, self._on_done, self._on_death = on_ready, on_done, on_death
        self._said_hello = False
        self._serial = 0
        self._segments: OrderedDict[int, None] = OrderedDict()
        self._plans: OrderedDict[int, None] = OrderedDict()
        self._pidfd = -1
        with contextlib.ExitStack() as undo:
            self._page = anonymous_file()
            undo.callback(os.close, self._page)
            self._control = ControlPage.create(self._page)
            # The socket closes when the process dies, or when it could not be forked.
            self._channel = Channel(self._receive, self.kill)
            undo.pop_all()
        self._dead = False

    @property
    def descriptors(self) -> list[int]:
        """Descriptors that the process inherits: its end of the socket, its control page."""
        return [self._channel.peer.fileno(), self._page]

    @property
    def beats(self) -> int:
        """Heartbeats of this worker during units."""
        return self._control.beats

    def handed_over(self) -> None:
        """Close our copies of the descriptors that the fork server received."""
        self._channel.hand_over()
        os.close(self._page)
        self._page = -1
        self._channel.send(Probe(self.number))

    def spawned(self, pid: int, pidfd: int) -> None:
        """Set the process of this worker, now that it is forked."""
        self.pid, self._pidfd = pid, pidfd
        asyncio.get_running_loop().add_reader(pidfd, self._on_process_end)
        self._check_ready()

    def run(self, run: JobRun, plan: PlanCopy) -> None:
        """Send the next unit of a job, with descriptors of the segments that the worker has not mapped."""
        unit, job = run.take(), run.job
        self._serial += 1
        self.assignments.append(Assignment(run, unit, self._serial))
        fresh = self._note_segments(job.segments)
        message = Run(
            serial=self._serial,
            plan=plan.number,
            unit=tuple(vars(unit).values()),
            inputs=tuple(segment.id for segment in job.inputs),
            output=job.output.id,
            scratch=job.scratch.id if job.scratch else None,
            plan_bytes=None if plan.number in self._plans else plan.pickled,
            attach=tuple((segment.id, segment.block_size) for segment in fresh),
        )
        self._plans[plan.number] = None
        self._plans.move_to_end(plan.number)
        self._channel.send(message, [segment.fd for segment in fresh])

    def stop(self, assignment: Assignment) -> None:
        """Ask the worker to stop this unit and those before it, unless it is done."""
        if assignment in self.assignments:
            self._control.stop(assignment.serial)

    def forget(self, segment: int) -> None:
        """Let the worker unmap a segment that no longer exists."""
        if segment in self._segments:
            del self._segments[segment]
            self._channel.send(Forget(segments=(segment,)))

    def kill(self) -> None:
        """Kill the process, if there is one; `on_death` is called when it is gone."""
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        elif self.pid is None:
            self._on_process_end()

    def hang_up(self) -> None:
        """Close the socket: the worker ends by itself after its current unit."""
        self._channel.close()
        if self.pid is None:
            self._on_process_end()

    def snapshot(self) -> dict[str, Any]:
        """Describe the worker."""
        first = self.assignments[0] if self.assignments else None
        unit = first and {"job": first.run.job.id, "index": first.unit.index}
        return {
            "number": self.number,
            "pid": self.pid,
            "ready": self.ready,
            "unit": unit,
            "beats": self.beats,
        }

    def _receive(self, message: Message, _: list[int]) -> None:
        match message:
            case Hello():
                self._said_hello = self._control.answered == self.number
                self._check_ready()
            case Done():
                assignment = self.assignments.popleft()
                assert assignment.serial == message.serial
                if message.outcome in {"failed", "no_memory"}:
                    self._forget_segments_of(assignment.run)
                self._on_done(self, assignment, message)

    def _check_ready(self) -> None:
        if self._said_hello and self._pidfd >= 0 and not self.ready:
            self.ready = True
            self._on_ready(self)

    def _note_segments(self, segments: Iterable[Segment]) -> list[Segment]:
        """Record the segments that the worker maps, return the new ones, drop the least recently used."""
        fresh = []
        for segment in segments:
            if segment.id not in self._segments:
                fresh.append(segment)
            self._segments[segment.id] = None
            self._segments.move_to_end(segment.id)
        if len(self._segments) > _MOST_SEGMENTS or len(self._plans) > _MOST_PLANS:
            old = Forget(_oldest(self._segments, _MOST_SEGMENTS), _oldest(self._plans, _MOST_PLANS))
            self._channel.send(old)
        return fresh

    def _forget_segments_of(self, run: JobRun) -> None:
        """Forget a job's segments: the worker may have failed before it mapped them."""
        for segment in run.job.segments:
            self.forget(segment.id)

    def _on_process_end(self) -> None:
        if self._pidfd >= 0:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            self._channel.drain()
            os.close(self._pidfd)
            self._pidfd = -1
        if self._dead:
            return
        self._dead = True
        self._channel.close()
        self._control.close()
        if self._page >= 0:
            os.close(self._page)
        self._on_death(self)


def _oldest(used: OrderedDict[int, None], keep: int) -> tuple[int, ...]:
    return tuple(used.popitem(last=False)[0] for _ in range(len(used) - keep))
