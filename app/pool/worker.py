"""A worker process: map segments, compute one unit at a time, report the outcome.

Forked from the fork server, so its kernels are compiled and loaded. Its one thread blocks on the socket between units
and polls it during them. The process ends when the server's end of the socket closes.
"""

from __future__ import annotations

import mmap
import os
import pickle
import select
import socket
import sys
import time
import traceback
from collections import deque
from typing import NoReturn

import verify.fast  # loaded before workers are forked
import verify.tolerance  # noqa: F401
from app.pool.messages import Done, Run, receive, send
from engine.container import name_process, prefer_for_oom_kill
from engine.threads import Job
from kernels import Plan, Unit, run_unit

__all__ = ["work"]


def work(sock: socket.socket) -> NoReturn:
    """Compute the units that arrive on `sock` until it closes."""
    name_process("convgrad-worker")
    prefer_for_oom_kill()  # rather than the server: a lost unit runs again on another worker
    worker = _Worker(sock)
    send(sock, ())
    while True:
        done = worker.run(*worker.next())
        send(sock, tuple(done))
        if done.outcome == "failed" and "torch" in sys.modules:  # after an error of CUDA no call of this process works
            os._exit(1)


class _Worker:
    """Keep mapped segments and unpickled plans until a message drops them."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._units: deque[tuple[Run, list[int]]] = deque()
        self._stopped = 0  # serial number of the last unit to stop
        self._segments: dict[int, mmap.mmap] = {}
        self._plans: dict[int, Plan] = {}

    def next(self) -> tuple[Run, list[int]]:
        """Wait for the next unit."""
        while not self._units:
            self._listen()
        return self._units.popleft()

    def run(self, message: Run, descriptors: list[int]) -> Done:
        """Compute one unit and return how it ended."""
        start = time.perf_counter()
        detail = ""
        try:
            self._prepare(message, descriptors)
            outcome = "done" if self._compute(message) else "stopped"
        except MemoryError as error:
            outcome, detail = "no_memory", str(error)
        except Exception:  # noqa: BLE001 - whatever it is, it belongs to this unit and is reported with it
            outcome, detail = "failed", traceback.format_exc()[-10_000:]
        seconds = time.perf_counter() - start
        return Done(message.serial, outcome, seconds, detail)  # type: ignore[arg-type]

    def _listen(self) -> None:
        """Receive one message, or end with the server."""
        if (found := receive(self._sock)) is None:
            os._exit(0)
        message, descriptors = found
        if isinstance(message, int):
            self._stopped = message
        else:
            self._units.append((Run(*message), descriptors))

    def _prepare(self, message: Run, descriptors: list[int]) -> None:
        for number in message.old_segments:
            self._segments.pop(number, None)  # no array refers to it, so this unmaps
        for number in message.old_plans:
            self._plans.pop(number, None)
        if message.plan_bytes is not None:
            self._plans[message.plan] = pickle.loads(message.plan_bytes)  # noqa: S301 - from our own server
        try:
            for (number, size), descriptor in zip(message.attach, descriptors, strict=True):
                # All pages at once: cheaper than a fault for each.
                flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
                self._segments[number] = mmap.mmap(descriptor, size, flags=flags)
        except (OSError, ValueError) as error:  # out of descriptors, address space or mappings
            raise MemoryError(str(error)) from error
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _compute(self, message: Run) -> bool:
        plan, memory = self._plans[message.plan], self._segments
        scratch = None if message.scratch is None else memory[message.scratch]
        job = Job.over(plan, [memory[number] for number in message.inputs], memory[message.output], scratch)

        def stop() -> bool:
            while self._poll.poll(0):
                self._listen()
            return message.serial <= self._stopped

        return not stop() and run_unit(plan, Unit(*message.unit), job.inputs, job.output, job.scratch, stop)
