"""Compiler flags in one place, and the list of everything that warming up must compile.

No `parallel`: parallelism is units over processes. No fast-math: sums are formed in the order that is written, and
Inf and NaN carry meaning. `error_model="numpy"` leaves out the checks for division by zero.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import llvmlite.binding as llvm
import numba
import numpy as np
import numpy.typing as npt
from numba.core import config

from kernels.target import target

__all__ = ["LAZY", "Floats", "Halves", "Table", "Vector", "callback", "jit"]

F = TypeVar("F", bound=Callable[..., Any])

LAZY: list[Callable[[], object]] = []
"""One call for each compiled function of the package: compiles it, or loads it from the cache."""


def _cache_folder() -> str:
    """Give the folder of the compile cache for exactly these sources and this code path.

    Numba looks only at the file that a function stands in, not at the intrinsics that it calls, so the folder's name
    carries a digest of the whole package. It lies under `NUMBA_CACHE_DIR`, the user's cache folder, or the temporary
    one, whichever can be written.
    """
    digest = hashlib.sha256(target().tag.encode())
    for source in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(source.read_bytes())
    candidates = [Path(value) for value in (os.environ.get("NUMBA_CACHE_DIR"),) if value]
    with contextlib.suppress(RuntimeError):  # a user without a home
        candidates.append(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "convgrad")
    candidates.append(Path(tempfile.gettempdir()) / f"convgrad-{os.getuid()}")
    for base in candidates:
        folder = base / digest.hexdigest()[:16]
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError:
            continue
        # what lies here is loaded as code: a folder that somebody else made is not ours
        if os.access(folder, os.W_OK) and base.stat().st_uid in (os.getuid(), 0):
            return str(folder)
    return ""


# Code generation may rewrite the sum that an address is: one summand becomes a pointer, the others its index. Numba
# optimises such code once more where a caller has it inside. A summand that is zero there is null, nothing can lie at
# an index of null, and what is read or written there is left out. So sums stay integers.
llvm.set_option("", "-addr-sink-using-gep=false")

setattr(config, "CACHE_DIR", _cache_folder())  # noqa: B010 -- Numba makes its settings at run time


Vector = npt.NDArray[np.int64]
Table = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Halves = npt.NDArray[np.uint16]

_NUMBA = {
    "None": "void",
    "bool": "boolean",
    "int": "int64",
    "float": "float32",
    "Vector": "int64[::1]",
    "Table": "int64[:, ::1]",
    "Floats": "float32[::1]",
    "Halves": "uint16[::1]",
}
"""What an annotation means to the compiler."""


def jit(function: F) -> F:
    """Compile for the one signature that the annotations say, cached on disk, without the GIL.

    Nothing is ever compiled for a call: addresses, counts and steps are int64, arrays those of `_NUMBA`. An array of
    which only the address is used further on is freed at once: take `array.ctypes.data` where it is used.
    """
    kinds = {name: _NUMBA[annotation] for name, annotation in function.__annotations__.items()}
    result = kinds.pop("return")
    signature = f"{result}({', '.join(kinds.values())})"
    dispatcher: Any = numba.njit(nogil=True, cache=True, error_model="numpy", boundscheck=False)(function)
    LAZY.append(lambda: dispatcher.compile(signature))
    return dispatcher  # type: ignore[no-any-return]


def callback(signature: str, function: Callable[..., Any]) -> Any:
    """Compile a C callback, cached on disk; its `address` can be called from any compiled function."""
    return numba.cfunc(signature, cache=True)(function)
