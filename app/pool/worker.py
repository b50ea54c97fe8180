"""A worker process: map segments, compute one unit at a time, report the outcome.

Forked from the fork server, so its kernels are compiled and loaded. Its one thread blocks on the socket between units
and checks the control page during them. The process ends when the server's end of the socket closes.
"""

from __future__ import annotations

import mmap
import os
import pickle
import select
import socket
import time
import traceback

import numpy as np
import numpy.typing as npt

import verify.fast  # noqa: F401 -- loaded before workers are forked
from app.pool.control import ControlPage
from app.pool.messages import Done, Forget, Hello, MessageDecoder, Probe, Run, receive, send
from engine.container import name_process, prefer_for_oom_kill
from kernels import Plan, Unit, run_unit, storage_dtype

__all__ = ["work"]

_HANG_UP = select.POLLHUP | select.POLLRDHUP


def work(sock: socket.socket, control: ControlPage) -> None:
    """Compute the units that arrive on `sock` until it closes."""
    name_process("convgrad-worker")
    prefer_for_oom_kill()  # rather than the server: a lost unit runs again on another worker
    worker = _Worker(sock, control)
    decoder = MessageDecoder()
    while (found := receive(sock, decoder)) is not None:
        message, descriptors = found
        if isinstance(message, Run):
            send(sock, worker.run(message, descriptors))
        elif isinstance(message, Probe):
            control.answer(message.token)
            send(sock, Hello())
        elif isinstance(message, Forget):
            worker.forget(message)


class _Worker:
    """Cache mapped segments and unpickled plans, until the server sends `Forget`."""

    def __init__(self, sock: socket.socket, control: ControlPage) -> None:
        self._control = control
        self._segments: dict[int, mmap.mmap] = {}
        self._plans: dict[int, Plan] = {}
        self._poll = select.poll()
        self._poll.register(sock, _HANG_UP)

    def run(self, message: Run, descriptors: list[int]) -> Done:
        """Compute one unit and return how it ended."""
        start = time.perf_counter()
        detail = ""
        try:
            self._attach(message, descriptors)
            outcome = "done" if self._compute(message) else "stopped"
        except MemoryError as error:
            outcome, detail = "no_memory", str(error)
        except Exception:  # noqa: BLE001 - whatever it is, it belongs to this unit and is reported with it
            outcome, detail = "failed", traceback.format_exc()
        seconds = time.perf_counter() - start
        return Done(message.serial, outcome, seconds, detail)  # type: ignore[arg-type]

    def forget(self, message: Forget) -> None:
        """Unmap segments and drop plans."""
        for number in message.segments:
            self._segments.pop(number, None)  # no array refers to it, so this unmaps
        for number in message.plans:
            self._plans.pop(number, None)

    def _attach(self, message: Run, descriptors: list[int]) -> None:
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
        plan = self._plans[message.plan]
        problem = plan.problem
        dtype = storage_dtype(problem.dtype)
        shapes = zip(message.inputs, problem.input_shapes, strict=True)
        inputs = [self._array(number, shape, dtype) for number, shape in shapes]
        output = self._array(message.output, problem.output_shape, problem.output_dtype)
        scratch = None
        if message.scratch is not None:
            scratch = self._array(message.scratch, (plan.scratch_bytes,), np.dtype(np.uint8))
        control, serial = self._control, message.serial

        def stop() -> bool:
            control.beat()
            if self._poll.poll(0):
                os._exit(0)  # the server is gone
            return control.stops(serial)

        return not stop() and run_unit(plan, Unit(*message.unit), inputs, output, scratch, stop)

    def _array(self, number: int, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> npt.NDArray[np.generic]:
        return np.ndarray(shape, dtype, self._segments[number])
