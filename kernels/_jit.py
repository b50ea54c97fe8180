"""Compiler flags in one place.

No `parallel`: parallelism is units over processes. No fast-math: sums are formed in the order that is written, and
Inf and NaN carry meaning. `error_model="numpy"` leaves out the checks for division by zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba

__all__ = ["COMPILED", "jit"]

F = TypeVar("F", bound=Callable[..., Any])

COMPILED: list[Any] = []
"""Every compiled function of the package, in the order of definition (read by `warmup`)."""


def jit(signature: str) -> Callable[[F], F]:
    """Compile for exactly one signature, cached on disk, without the GIL: nothing is ever compiled in a call."""

    def wrap(function: F) -> F:
        dispatcher = numba.njit(nogil=True, cache=True, error_model="numpy", boundscheck=False)(function)
        COMPILED.append((dispatcher, signature))
        return dispatcher  # type: ignore[no-any-return]

    return wrap
