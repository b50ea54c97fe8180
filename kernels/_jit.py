"""Compiler flags in one place.

No `parallel`: parallelism is units over processes. No fast-math: sums are formed in the order that is
written, and Inf and NaN carry meaning. `error_model="numpy"` leaves out the checks for division by zero.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba
from numba.core import config

from kernels.cpu import cpu

__all__ = ["COMPILED", "jit"]

F = TypeVar("F", bound=Callable[..., Any])

COMPILED: list[Any] = []
"""Every compiled function of the package, in the order of definition (read by `warmup`)."""


def _own_cache_folder() -> str:
    """Give the folder for code compiled from these very sources for this code path.

    Numba knows a cached function by its own file and the processor alone. It would answer a change in a
    module that the function calls, or another vector width of the same processor, with the old code.
    """
    here = Path(__file__).parent
    digest = hashlib.sha256()
    for source in sorted(here.glob("*.py")):
        digest.update(source.read_bytes())
    return str(Path(config.CACHE_DIR or here / "__pycache__", f"{cpu().tag}-{digest.hexdigest()[:16]}"))


config.CACHE_DIR = _own_cache_folder()


def jit(signature: str) -> Callable[[F], F]:
    """Compile for exactly one signature, cached on disk, without the GIL: a call never waits for the compiler."""

    def wrap(function: F) -> F:
        dispatcher = numba.njit(nogil=True, cache=True, error_model="numpy", boundscheck=False)(function)
        COMPILED.append((dispatcher, signature))
        return dispatcher  # type: ignore[no-any-return]

    return wrap
