"""Threads that run a stage's units together and spin for a while between stages, as OpenMP's teams do.

A sleeping thread takes tens of microseconds to wake, and on virtual processors the host may place it beside its
neighbour on one core for the first milliseconds: a peer whose threads stay awake would then be compared with the
machine's scheduler instead of with the kernels.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

__all__ = ["Team"]

_AWAKE = 3_000_000  # checks of a number before a thread goes to sleep, one to three milliseconds


_typed_intrinsic: Any = intrinsic  # it hides the typing context from the parameters


@_typed_intrinsic  # type: ignore[untyped-decorator]
def _seen(typingctx: Any, address: Any) -> Any:  # noqa: ARG001 -- Numba fixes the parameters
    """Read an int64 that another thread writes."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:  # noqa: ARG001
        pointer = builder.inttoptr(values[0], ir.IntType(64).as_pointer())
        return builder.load_atomic(pointer, "acquire", 8)

    return types.int64(types.int64), codegen


@numba.njit("boolean(int64, int64, int64)", nogil=True, cache=True)
def _reached(address: int, value: int, looks: int) -> bool:
    """Spin until a number is `value` or more; return False if it is still less after this many looks."""
    for _ in range(looks):  # noqa: SIM110 -- compiled
        if _seen(address) >= value:
            return True
    return False


class Team:
    """`threads` threads, including the caller's, each on its own processors."""

    def __init__(self, threads: int) -> None:
        self._numbers = np.zeros(
            (1 + threads, 8), np.int64
        )  # the turn, then what each helper has finished: a cache line each
        self._begun = threading.Condition()
        self._work: Callable[[], None] | None = None
        self._error: BaseException | None = None
        self._own, *others = (_processors(place, threads) for place in range(threads))
        self._helpers = [
            threading.Thread(target=self._help, args=(number, some), daemon=True)
            for number, some in enumerate(others, 1)
        ]
        for helper in self._helpers:
            helper.start()

    def keep(self) -> None:
        """Restrict the calling thread, the one that will call `run`, to its processors."""
        _keep_to(self._own)

    def run(self, work: Callable[[], None]) -> None:
        """Call `work` on every thread; return when all are done, and raise what one of them raised."""
        self._begin(work)
        work()
        for number in range(1, 1 + len(self._helpers)):
            while not _reached(self._address(number), self._turn, _AWAKE):
                pass
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Stop the helper threads."""
        self._begin(None)
        for helper in self._helpers:
            helper.join()

    @property
    def _turn(self) -> int:
        return int(self._numbers[0, 0])

    def _address(self, number: int) -> int:
        return self._numbers.ctypes.data + number * self._numbers.strides[0]

    def _begin(self, work: Callable[[], None] | None) -> None:
        with self._begun:
            self._work = work
            self._numbers[0, 0] += 1
            self._begun.notify_all()

    def _help(self, number: int, some: tuple[int, ...]) -> None:
        _keep_to(some)
        turn = 0
        while True:
            turn += 1
            if not _reached(self._address(0), turn, _AWAKE):
                with self._begun:
                    self._begun.wait_for(lambda turn=turn: self._turn >= turn)  # type: ignore[misc]
            if self._work is None:
                return
            try:
                self._work()
            except BaseException as error:  # noqa: BLE001 -- raised by `run`
                self._error = error
            self._numbers[number, 0] = turn


def _keep_to(some: tuple[int, ...]) -> None:
    if some:
        os.sched_setaffinity(0, some)


def _processors(place: int, threads: int) -> tuple[int, ...]:
    """Return every `threads`-th processor from `place` on; none if there are fewer than threads: any will do."""
    mine = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return tuple(mine[place::threads]) if 1 < threads <= len(mine) else ()
