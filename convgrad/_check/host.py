"""The process that runs the kernel: it reads calls from a pipe, and may crash or hang.

Each message is a line of JSON and the bytes that it announces. Tensors lie between pages that can't be read or
written, and each call says what the memory of the result holds before.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import mmap
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from convgrad._check.adapters import Adapter, CrashedError, KernelCall, Unsupported, adapter
from convgrad._check.problems import Problem
from convgrad._check.process import signal_name
from convgrad._check.projected import draw, project
from convgrad._dtypes import dtype as dtype_of
from convgrad._dtypes import dtype_of_array
from convgrad._errors import ConvgradError
from convgrad._tensors import array_of

__all__ = ["Guarded", "main"]

Array = npt.NDArray[Any]


class Guarded:
    """A tensor in memory of its own, which ends (or begins) at a page that can't be touched.

    It is aligned to 64 bytes, or with `aligned` false to its elements and no more. Where pages can't be protected,
    writes beyond the tensor are still seen by `intact`.
    """

    around = 0xA5
    """What the bytes around the tensor hold."""

    def __init__(self, shape: Sequence[int], dtype: np.dtype[Any], fill: int, *, at_end: bool, aligned: bool) -> None:
        size = prod(shape) * dtype.itemsize
        page = mmap.PAGESIZE
        pages = max(1, -(-(size + 128) // page))
        self._map = mmap.mmap(-1, (pages + 2) * page)
        first, last = page, (pages + 1) * page
        raw = np.frombuffer(self._map, np.uint8)
        raw[first:last] = self.around
        start = last - size if at_end else first
        if aligned:
            start = start // 64 * 64
        elif start % 64 == 0:
            start += -dtype.itemsize if at_end else dtype.itemsize
        self._inside = (first, start, start + size, last)
        self._raw = raw
        raw[start : start + size] = fill
        self.array: Array = raw[start : start + size].view(dtype).reshape(shape)
        for start in (0, last) if sys.platform != "win32" else ():
            ctypes.CDLL(None).mprotect(ctypes.c_void_p(raw.ctypes.data + start), ctypes.c_size_t(page), 0)

    @property
    def intact(self) -> bool:
        """Whether the bytes around the tensor are unchanged."""
        first, start, stop, last = self._inside
        return bool((self._raw[first:start] == self.around).all() and (self._raw[stop:last] == self.around).all())


_PR_SET_PDEATHSIG = 1
_JUDGES = ("engine", "convgrad._service")
_PACKAGE, _STDLIB = str(Path(__file__).parent), str(Path(os.__file__).parent)


@dataclass
class _Pipe:
    reads: BinaryIO
    writes: BinaryIO

    def receive(self) -> dict[str, Any] | None:
        line = self.reads.readline()
        return json.loads(line) if line else None

    def send(self, head: dict[str, Any], data: bytes = b"") -> None:
        self.writes.write(json.dumps({**head, "bytes": len(data)}).encode() + b"\n" + data)
        self.writes.flush()


def main() -> None:
    """Load the kernel that the first message names, and run the calls that follow."""
    faulthandler.enable()
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    pipe = _Pipe(os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb"))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)  # what the kernel prints must not be read as a message
    first = pipe.receive()
    assert first is not None
    if first["alone"]:  # a kernel must not call the library that judges it; this stops mistakes, not attacks
        sys.modules |= dict.fromkeys(_JUDGES)  # type: ignore[arg-type] # an import of None raises ImportError
    try:
        kernel = adapter(first["kernel"], first["arrays"], first["takes"], first["api_key"])
    except Exception as error:  # noqa: BLE001 - user code is imported
        message = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        pipe.send({"error": " ".join(message.split())[:600]})
        return
    pipe.send({"takes": kernel.takes.as_json()})
    while (head := pipe.receive()) is not None:
        pipe.send(*((_project(kernel, head), b"") if "seed" in head else _run(kernel, head, pipe.reads)))


def _run(kernel: Adapter, head: dict[str, Any], reads: BinaryIO) -> tuple[dict[str, Any], bytes]:
    problem = Problem.from_json(head["problem"])
    dtype = dtype_of(problem.dtype).numpy
    place: dict[str, Any] = {"at_end": head["at_end"], "aligned": head["aligned"]}
    inputs = {name: Guarded(shape, dtype, 0, **place) for name, shape in problem.input_shapes.items()}
    sent = {}
    for name, guarded in inputs.items():
        sent[name] = reads.read(guarded.array.nbytes)
        guarded.array.reshape(-1).view(np.uint8)[:] = np.frombuffer(sent[name], np.uint8)
    output = Guarded(problem.output_shape, dtype, head["poison"], **place)
    call = KernelCall(problem, {name: guarded.array for name, guarded in inputs.items()}, output.array)
    # A result in memory of the kernel's own is likely to get the blocks that were freed last.
    dirty = [np.full(output.array.nbytes, head["poison"], np.uint8) for _ in range(3)]
    del dirty
    begun = time.perf_counter()
    try:
        found: Any = kernel.run(call)
        result = output.array if found is None else array_of(found)
    except Unsupported as error:
        return {"status": "unsupported", "text": str(error)}, b""
    except CrashedError as error:
        return {"status": "crashed", "text": f"the program was ended by {signal_name(error.args[0])}"}, b""
    except BaseException as error:  # noqa: BLE001 - a kernel may raise anything
        return {"status": "raised", "text": _described(error)}, b""
    seconds = time.perf_counter() - begun
    facts = {
        "seconds": seconds,
        "modified": [name for name, each in inputs.items() if each.array.tobytes() != sent[name]],
        "outside": [name for name, each in {**inputs, problem.output: output}.items() if not each.intact],
    }
    if result.dtype != dtype:
        return {"status": "dtype", "text": f"the result has dtype {_name(result)}, not {problem.dtype}", **facts}, b""
    if result.shape != problem.output_shape:
        text = f"the result has shape {list(result.shape)}, not {list(problem.output_shape)}"
        return {"status": "shape", "text": text, **facts}, b""
    return {"status": "done", "text": "", **facts}, np.ascontiguousarray(result).tobytes()


def _project(kernel: Adapter, head: dict[str, Any]) -> dict[str, Any]:
    """Run the kernel on data that are drawn here, and project the result."""
    problem = Problem.from_json(head["problem"])
    dtype, rng = dtype_of(problem.dtype).numpy, np.random.default_rng(head["seed"])
    try:
        like = getattr(kernel, "convert", np.asarray)(np.empty(1, dtype))
        _make_sure_of(problem, dtype.itemsize if isinstance(like, np.ndarray) else 0)
        inputs = {name: draw(rng, shape, like) for name, shape in problem.input_shapes.items()}
        output = np.empty(problem.output_shape, dtype)
        begun = time.perf_counter()
        found: Any = kernel.run(KernelCall(problem, inputs, output))
        seconds = time.perf_counter() - begun
        on_device = type(found).__module__.partition(".")[0] in ("torch", "cupy")
        result: Any = output if found is None else found if on_device else array_of(found)
        if tuple(result.shape) != problem.output_shape or str(result.dtype).removeprefix("torch.") != dtype.name:
            text = (
                f"the result is {result.dtype} {list(result.shape)}, not {problem.dtype} {list(problem.output_shape)}"
            )
            return {"status": "shape", "text": text}
        projected = project(problem, inputs, result, rng)
    except Unsupported as error:
        return {"status": "unsupported", "text": str(error)}
    except BaseException as error:  # noqa: BLE001 - a kernel may raise anything
        short = isinstance(error, MemoryError) or "OutOfMemory" in type(error).__name__
        return {"status": "unsupported" if short else "raised", "text": _described(error)}
    return {"status": "done", "text": str(projected), "seconds": seconds, "projected": projected.as_json()}


def _make_sure_of(problem: Problem, itemsize: int) -> None:
    """Raise `MemoryError` if the tensors of a problem need more than half of the free memory, where that is known."""
    needed = itemsize * sum(map(prod, [*problem.input_shapes.values(), problem.output_shape]))
    with contextlib.suppress(OSError):
        free = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
        if 2 * needed > (available := int(free.split()[1]) << 10):
            raise MemoryError(
                f"the tensors need {needed / 1e9:.3g} GB, more than half of the {available / 1e9:.3g} GB that are free"
            )


def _name(array: Array) -> str:
    try:
        name = dtype_of_array(array).name
    except ConvgradError:
        return str(array.dtype)
    return name if array.dtype.isnative else f"{name} in the other byte order"


def _described(error: BaseException) -> str:
    """Return the error and the innermost line of the kernel's own."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _PACKAGE not in frame.filename]
    own = [frame for frame in frames if "site-packages" not in frame.filename and _STDLIB not in frame.filename]
    where = f", in {own[-1].filename} line {own[-1].lineno}" if own else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}{where}"


if __name__ == "__main__":
    main()
