"""Kernels of all kinds behind one interface. They are loaded and called in the process of `host`, not in the command.

A kernel is named as

* ``module:function`` or ``file.py:function``: a Python function, see `PythonKernel`
* ``library.so`` or ``library.so:function``: a shared library with the function of `convgrad/kernel.h`
* ``command: ./program --flag``: a program that reads and writes `.npy` files, see `CommandKernel`
* ``http://host:port``: a server of the Open Inference Protocol; with the path ``/rpc`` one of JSON-RPC
* ``torch``, ``torch:cuda``, ``jax``, ``onnxruntime``: the operations of a framework that is installed
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import inspect
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from convgrad._check.frameworks import FRAMEWORKS, converter, framework
from convgrad._check.problems import DATA_FORMATS, DTYPES, OPS, WEIGHTS_FORMATS, Problem, Takes
from convgrad._dtypes import dtype as dtype_of

__all__ = ["Adapter", "CrashedError", "KernelCall", "Unsupported", "adapter"]

Array = npt.NDArray[Any]


class Unsupported(Exception):  # noqa: N818 - a kernel that takes fewer problems is no error
    """The kernel does not take the problem."""


class CrashedError(Exception):
    """The program was ended by a signal."""


@dataclass(frozen=True)
class KernelCall:
    """A problem with its inputs, and memory for the result, filled with other data."""

    problem: Problem
    inputs: dict[str, Array]
    output: Array


class Adapter(Protocol):
    """A kernel that can be called; `takes` is what is known of what it takes."""

    takes: Takes

    def run(self, call: KernelCall) -> Any:
        """Return the result, or None if it was written to `call.output`. Raises `Unsupported`, and anything else."""


def adapter(kernel: str, arrays: str, takes: Mapping[str, Any], api_key: str | None = None) -> Adapter:
    """Load a kernel by its name; `takes` overrides its own. Raises `ValueError` if it can't be used."""
    name, _, rest = kernel.partition(":")
    if kernel.startswith(("http://", "https://")):
        from convgrad._check.remote import remote  # only this kind needs httpx

        found: Adapter = remote(kernel, api_key)
    elif name == "command":
        found = CommandKernel(rest)
    elif name in FRAMEWORKS:
        found = PythonKernel(framework(name), kernel, takes)
    elif ".so" in Path(name).suffixes or Path(name).suffix in (".dylib", ".dll"):
        found = LibraryKernel(name, rest or "convgrad_kernel")
    elif name and rest:
        found = PythonKernel(_function(name, rest), arrays, takes)
    else:
        known = ", ".join(FRAMEWORKS)
        raise ValueError(f"a kernel must be module:function, library.so, command:program, a URL, or one of {known}")
    if not isinstance(found, PythonKernel):
        found.takes = Takes.from_json(dict(takes))
    return found


def _function(module: str, name: str) -> Callable[..., Any]:
    """Import a function; raises `ValueError` with what is missing and where."""
    try:
        if module.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(module).stem, module)
            assert spec is not None
            assert spec.loader is not None
            found: Any = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = found
            spec.loader.exec_module(found)
        else:
            found = importlib.import_module(module)
    except BaseException as error:
        raise ValueError(f"{module} can't be imported: {_one_line(error)}") from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{module} has no {name}")
        found = getattr(found, part)
    if not callable(found):
        raise ValueError(f"{module}:{name} is not a function")
    function: Callable[..., Any] = found
    return function


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


class PythonKernel:
    """A function that is called with what its parameters are named after.

    These are the operation's inputs (`src`, `diff_dst`, `weights`, `bias`), its attributes (`strides`, ..), `op`,
    `dtype`, `inputs` and `attributes` (dicts), `output_shape`, and `out`, an array to write the result to; otherwise
    the result is returned. Arrays are NumPy's, or those of `arrays`: torch, torch:DEVICE, jax, jax:DEVICE.

    Problems are limited to what the parameters allow: without `dilations`, for example, these are 1. The function's
    attribute `takes`, a dict of fields of `Takes`, limits them further; NotImplementedError declines a single call.
    A module of PyTorch has the parameters of its `forward`.
    """

    def __init__(self, function: Callable[..., Any], arrays: str, takes: Mapping[str, Any]) -> None:
        self._function = function
        self.convert = converter(arrays)
        try:
            parameters = inspect.signature(getattr(function, "forward", function)).parameters.values()
        except (TypeError, ValueError) as error:
            raise ValueError(
                "the function's parameters can't be inspected: wrap it in a function of your own"
            ) from error
        kinds = inspect.Parameter
        self._all = any(each.kind is kinds.VAR_KEYWORD for each in parameters)
        plain = [each for each in parameters if each.kind not in (kinds.VAR_KEYWORD, kinds.VAR_POSITIONAL)]
        self._by_place = [each.name for each in plain if each.kind is kinds.POSITIONAL_ONLY]
        self._names = [each.name for each in plain]
        self._needed = {each.name for each in plain if each.default is kinds.empty}
        stated = getattr(function, "takes", {})
        if not isinstance(stated, Mapping):
            raise ValueError("`takes` of the function must be a dict")
        stated = {**stated, **takes}
        ops = [
            op for op in stated.get("ops") or self._operations()
            if op not in OPS or self._needed <= set(self._available(_smallest(op)))
        ]  # fmt: skip
        if not ops:
            raise ValueError(
                "the parameters must be inputs and attributes of an operation, such as src, diff_dst and strides, or "
                f"op, inputs and attributes, but are {', '.join(self._names) or 'not named'}; without op, --ops may "
                "say which operation it is"
            )
        self.takes = Takes.from_json({**self._inferred(), **stated, "ops": ops})

    def _operations(self) -> list[str]:
        """Return the operations that the parameters allow; without `op` the tensors tell which one it is."""
        names = set(self._names)
        if "op" in names:
            return list(OPS)
        tensors = {"src", "weights", "diff_dst", "bias"} & names
        family = [op for op in OPS if op.startswith("ConvTranspose") == ("output_padding" in names)]
        return [op for op in family if set(_smallest(op).input_shapes) in (tensors, tensors - {"bias"})][:1]

    def _inferred(self) -> dict[str, Any]:
        names = set(self._names)
        whole = self._all or "attributes" in names

        def has(*wanted: str) -> bool:
            return whole or bool(names & set(wanted))

        return {
            "dtypes": ("f32",),
            "data_formats": DATA_FORMATS if has("data_format") else ("NCX",),
            "weights_formats": WEIGHTS_FORMATS if has("weights_format") else ("OIX",),
            "strides": has("strides"),
            "dilations": has("dilations"),
            "pads": has("pads_begin", "pads_end"),
            "groups": has("groups"),
            "bias": "bias" in names or "inputs" in names or self._all,
        }

    def _available(self, problem: Problem, call: KernelCall | None = None) -> dict[str, Any]:
        """Return every value that a parameter may be named after."""
        attributes = {
            name: tuple(value) if isinstance(value, list) else value for name, value in problem.attributes().items()
        }
        inputs: dict[str, Any] = dict.fromkeys(problem.input_shapes)
        if call is not None:
            inputs = {
                name: self.convert(values) if isinstance(values, np.ndarray) else values
                for name, values in call.inputs.items()
            }
        optional = {} if problem.of_bias or problem.output != "dst" else {"bias": None}
        more = {"op": problem.op, "dtype": problem.dtype, "inputs": inputs, "attributes": attributes,
                "output_shape": problem.output_shape, "out": None if call is None else call.output}  # fmt: skip
        return {**optional, **attributes, **inputs, **more}

    def run(self, call: KernelCall) -> Any:
        """Call the function."""
        values = self._available(call.problem, call)
        if not self._needed <= set(values):
            raise Unsupported
        given = {name: values[name] for name in self._names if name in values and name not in self._by_place}
        if self._all:
            given |= {**values["attributes"], **values["inputs"]}
        try:
            found = self._function(*[values[name] for name in self._by_place], **given)
        except NotImplementedError as error:
            raise Unsupported(str(error)) from error
        if found is None and "out" not in self._names:
            raise TypeError("the function returned None, and has no parameter `out` to write the result to")
        return found


def _smallest(op: str) -> Problem:
    return Problem(op=op, wide=(1, 1), kernel=(1, 1), bias=False)


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("ndim", ctypes.c_int32),
        ("unused", ctypes.c_int32),
        ("shape", ctypes.c_int64 * 5),
    )


_Axes = ctypes.c_int64 * 3
_PER_AXIS = ("strides", "dilations", "pads_begin", "pads_end", "output_padding")
_TENSORS = ("src", "weights", "bias", "dst")


class _Call(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("op", "dtype", "rank", "data_format", "weights_format", "unused")),
        ("groups", ctypes.c_int64),
        *((name, _Axes) for name in _PER_AXIS),
        *((name, _Tensor) for name in _TENSORS),
    )


class LibraryKernel:
    """The function of a shared library, as `convgrad/kernel.h` declares it."""

    def __init__(self, path: str, symbol: str) -> None:
        try:
            library = ctypes.CDLL(str(Path(path).resolve()))
        except OSError as error:
            raise ValueError(f"the library can't be loaded: {error}") from error
        try:
            self._function = library[symbol]
        except AttributeError as error:
            raise ValueError(
                f"{path} does not export {symbol}, the function that convgrad/kernel.h declares"
            ) from error
        self._function.restype = ctypes.c_int
        self.takes = Takes()

    def run(self, call: KernelCall) -> None:
        """Call the function."""
        problem = call.problem
        record = _Call(
            size=ctypes.sizeof(_Call),
            op=OPS.index(problem.op),
            dtype=DTYPES.index(problem.dtype),
            rank=problem.rank,
            data_format=DATA_FORMATS.index(problem.data_format),
            weights_format=WEIGHTS_FORMATS.index(problem.weights_format),
            groups=problem.groups,
        )
        for name in _PER_AXIS:
            setattr(record, name, _Axes(*getattr(problem, name)))
        for name, array in {**call.inputs, problem.output: call.output}.items():
            shape = (ctypes.c_int64 * 5)(*array.shape)
            setattr(record, name.removeprefix("diff_"), _Tensor(array.ctypes.data, array.ndim, 0, shape))
        status = self._function(ctypes.byref(record))
        if status == 1:
            raise Unsupported
        if status:
            raise RuntimeError(f"the function returned {status}")


_SKIPPED = 77


class CommandKernel:
    """A program that is started for each call, with the path of a folder as its last argument, or as ``{folder}``.

    The folder has `call.json` (`op`, `dtype`, `attributes`, `inputs`, `output`, `output_shape`) and a `.npy` file for
    each input, such as `src.npy`. The program writes the result there, such as `diff_weights.npy`. Exit status 77 means
    that it does not take the problem. bf16 is stored as two bytes (`V2`, or `<u2`).
    """

    def __init__(self, command: str) -> None:
        self._command = shlex.split(command)
        if not self._command:
            raise ValueError("a kernel `command:` needs a program, such as command:./mine")
        self.takes = Takes()

    def run(self, call: KernelCall) -> Array:
        """Start the program and read its result."""
        with tempfile.TemporaryDirectory(prefix="convgrad-check-") as folder:
            self._write(call, Path(folder))
            words = [word.replace("{folder}", folder) for word in self._command]
            words += [folder] if words == self._command else []
            done = subprocess.run(words, stdin=subprocess.DEVNULL, check=False, capture_output=True)  # noqa: S603
            said = done.stderr.decode(errors="replace")
            sys.stderr.write(said)
            if done.returncode == _SKIPPED:
                raise Unsupported
            if done.returncode < 0:
                raise CrashedError(-done.returncode)
            if done.returncode:
                last = next((line for line in reversed(said.splitlines()) if line.strip()), "")
                raise RuntimeError(f"the program ended with status {done.returncode}: {last[:300]}")
            path = Path(folder, f"{call.problem.output}.npy")
            if not path.exists():
                raise FileNotFoundError(f"the program did not write {path.name}")
            found: Array = np.load(path, allow_pickle=False)
            two_bytes = found.dtype in (np.dtype("V2"), np.dtype("<u2"))
            return found.view(dtype_of("bf16").numpy) if two_bytes and call.problem.dtype == "bf16" else found

    def _write(self, call: KernelCall, folder: Path) -> None:
        problem = call.problem
        for name, array in call.inputs.items():
            np.save(folder / f"{name}.npy", array)
        document = {"op": problem.op, "dtype": problem.dtype, "attributes": problem.attributes(),
                    "inputs": {name: f"{name}.npy" for name in call.inputs},
                    "output": problem.output, "output_shape": list(problem.output_shape)}  # fmt: skip
        (folder / "call.json").write_text(json.dumps(document), encoding="utf-8")
