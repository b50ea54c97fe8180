"""Scripts that show a fault again.

They need NumPy, ml_dtypes for bf16, and the kernel; those for servers and for functions that get other arrays than
NumPy's also need convgrad.
"""

from __future__ import annotations

import base64
import zlib
from inspect import getsource
from pathlib import Path
from pprint import pformat

import numpy as np

from convgrad._arithmetic import described
from convgrad._check import frameworks
from convgrad._check.cases import EXACT, Array, Case
from convgrad._check.examine import FAULTS, Fault
from convgrad._check.host import Guarded
from convgrad._check.judge import Judge, as_read
from convgrad._check.problems import DATA_FORMATS, DTYPES, OPS, WEIGHTS_FORMATS, Problem
from convgrad._check.relations import RELATIONS
from convgrad._errors import CallerError

__all__ = ["reproducer"]

_WRITTEN = 3000
"""Elements of a tensor that are written as numbers; longer ones are compressed."""

_LARGEST = 1 << 20


def reproducer(case: Case, fault: Fault, kernel: str, arrays: str, judge: Judge) -> str:
    """Return the script for a fault of a kernel in a case, with the right results as the reference computes them."""
    calls: list[tuple[Problem, dict[str, Array], Array]] = []

    def run(problem: Problem, inputs: dict[str, Array]) -> Array:
        dense = {name: np.ascontiguousarray(values) for name, values in inputs.items()}
        read = {name: as_read(dense[name], how) for name, how in zip(dense, ways, strict=False)}
        calls.append((problem, dense, judge.reference(problem, {**dense, **read})))
        return calls[-1][2]

    inputs, declared = case.inputs(), judge.declared(case.problem)
    ways = () if fault.report is None else fault.report.data.get("arithmetic", {}).get("read", ())
    again = f"convgrad check {kernel} --only {case.number} --seed {case.seed}"
    try:
        first = run(case.problem, inputs)
        if fault.kind in RELATIONS:
            list(RELATIONS[fault.kind].expect(case, inputs, first, run))
    except CallerError as error:
        return f"# There is no reference to compare with ({error}): {again}\n"
    if sum(array.size for _, tensors, right in calls for array in (*tensors.values(), right)) > _LARGEST:
        return f"# Too large for a script: {again}\n"
    rms, largest = _allowed(case, fault, plain=not declared)
    return _TEMPLATE.format(
        title=" ".join(f"{FAULTS[fault.kind]}: {fault.text}".split()).replace('"""', "'''").replace("\\", "/"),
        problem=str(case.problem) + (f"\n\nJudged as declared: {described(declared)}" if declared else ""),
        of_read=" (of inputs that are rounded as declared)" if any(ways) else "",
        imports="import ml_dtypes\n" if case.problem.dtype == "bf16" else "",
        kernel=_kernel(kernel, arrays),
        guarded=getsource(Guarded),
        calls=",\n".join(_call(*each) for each in calls),
        rms=repr(float(rms)),
        largest=repr(float(largest)),
    )


def _allowed(case: Case, fault: Fault, *, plain: bool) -> tuple[float, float]:
    """Return the errors that the judge allows: the root of their mean square, and the largest one."""
    if plain and case.kind in EXACT:
        return 0.0, 0.0
    if fault.report is None:
        return np.inf, np.inf
    data = fault.report.data
    rules, worst = {rule["rule"]: rule for rule in data["rules"]}, data["worst"]
    if not rules["exact"]["passed"]:
        return 0.0, 0.0
    rms, largest, mean = np.inf, np.inf, rules["mean_square"]
    if worst and float(worst["share"]) > 1:
        largest = abs(float(worst["got"]) - float(worst["exact"])) / float(worst["share"])
    if not mean["passed"]:
        rms = float(data["rms_error"]) * (float(mean["limit"]) / float(mean["measured"])) ** 0.5
    elif not rules["hypotheses"]["passed"]:
        rms = float(data["rms_error"]) / 2
    return rms, largest if np.isfinite(largest) else np.inf


def _call(problem: Problem, inputs: dict[str, Array], right: Array) -> str:
    members = {
        "op": repr(problem.op),
        "dtype": repr(problem.dtype),
        "attributes": repr(problem.attributes()),
        "inputs": "{" + ", ".join(f"{name!r}: {_literal(array)}" for name, array in inputs.items()) + "}",
        "output": repr(problem.output),
        "right": _literal(right),
        "fields": repr(problem.as_json()),
    }
    return "    {" + ",\n     ".join(f"{name!r}: {text}" for name, text in members.items()) + "}"


def _literal(array: Array) -> str:
    name = str(array.dtype)
    dtype = "ml_dtypes.bfloat16" if name == "bfloat16" else f"np.{name}"
    if array.size > _WRITTEN:
        packed = base64.b64encode(zlib.compress(array.tobytes(), 9)).decode()
        return f"np.frombuffer(zlib.decompress(base64.b64decode({packed!r})), {dtype}).reshape({array.shape})"
    values = [int(x) if x == np.rint(x) and abs(x) < 1e15 else x for x in array.astype(np.float64).reshape(-1).tolist()]
    text = pformat(values, width=110, compact=True).replace("\n", "\n" + " " * 8)
    return f"np.array({text}, {dtype}).reshape({array.shape})"


def _kernel(kernel: str, arrays: str) -> str:
    name, _, rest = kernel.partition(":")
    if name == "command":
        return _COMMAND.format(command=rest)
    if name in frameworks.FRAMEWORKS:
        shared = ("converter", "_module", "_axes", "_permuted", "_bias")
        used = [each for key, each in vars(frameworks).items() if key in shared or key.split("_")[1:2] == [name]]
        return _FRAMEWORK.format(parts="\n\n".join(map(getsource, used)), name=name, kernel=kernel)
    if ".so" in Path(name).suffixes or Path(name).suffix in (".dylib", ".dll"):
        return _LIBRARY.format(path=str(Path(name)), symbol=rest or "convgrad_kernel", ops=OPS, dtypes=DTYPES,
                               data=DATA_FORMATS, weights=WEIGHTS_FORMATS)  # fmt: skip
    if rest and not kernel.startswith(("http://", "https://", "torch:", "jax:")) and arrays == "numpy":
        how = _FILE.format(path=name) if name.endswith(".py") else f"module = importlib.import_module({name!r})\n"
        return _PYTHON.format(load=how, function=rest)
    return _CONVGRAD.format(kernel=kernel, arrays=arrays)


_TEMPLATE = '''"""{title}

{problem}

Found by convgrad check. Exits with 1 while the fault shows.
"""

from __future__ import annotations

import base64
import ctypes
import importlib
import importlib.util
import inspect
import json
import mmap
import os
import shlex
import subprocess
import sys
import tempfile
import zlib
from math import prod

{imports}import numpy as np

nan, inf = np.nan, np.inf
sys.path.insert(0, os.getcwd())

{kernel}

# Each call, with the result of the float64 reference, rounded once{of_read}.
CALLS = [
{calls}
]
RMS_ALLOWED, LARGEST_ALLOWED = {rms}, {largest}  # of errors; zero: every bit counts


{guarded}

def placed(array, at_end, aligned):
    """Copy an array into its own memory, directly before or after a protected page."""
    copy = Guarded(array.shape, array.dtype, 0, at_end=at_end, aligned=aligned)
    copy.array[...] = array
    return copy


def same(one, other):
    one, other = one.astype(np.float64), other.astype(np.float64)
    return np.array_equal(one, other, equal_nan=True)


faults = []
for given in CALLS:
    results = []
    for at_end, aligned, byte in ((True, True, 255), (True, False, 123), (False, False, 255)):
        memory = {{name: placed(array, at_end, aligned) for name, array in given["inputs"].items()}}
        memory["the result"] = result = placed(given["right"], at_end, aligned)
        inputs = {{name: memory[name].array for name in given["inputs"]}}
        result.array.reshape(-1).view(np.uint8)[:] = byte
        found = kernel(given, inputs, result.array)
        faults += [f"memory beside {{name}} was written" for name, each in memory.items() if not each.intact]
        faults += [f"{{name}} was changed" for name, array in inputs.items() if not same(array, given["inputs"][name])]
        results.append(np.array(found))
    got, right = results[0], given["right"]
    if got.shape != right.shape or got.dtype != right.dtype:
        faults.append(f"the result is {{got.dtype}} {{got.shape}}, not {{right.dtype}} {{right.shape}}")
        continue
    if not all(same(got, other) for other in results[1:]):
        faults.append("the bits differ when the call is repeated, at another address")
    finite = np.isfinite(right.astype(np.float64))
    with np.errstate(invalid="ignore"):
        error = np.abs(got.astype(np.float64) - right.astype(np.float64))
    if not same(got[~finite], right[~finite]) or not np.isfinite(error[finite]).all():
        faults.append("Inf or NaN where it does not belong, or not where it does")
    error = error[finite]
    rms, largest = np.sqrt(np.mean(error**2)) if error.size else 0.0, error.max(initial=0.0)
    print(f"error: RMS {{rms:.4g}} of {{RMS_ALLOWED:.4g}}, largest {{largest:.4g}} of {{LARGEST_ALLOWED:.4g}}")
    if not (rms <= RMS_ALLOWED and largest <= LARGEST_ALLOWED):
        faults.append("the errors are too large")
        if got.size <= 64:
            print("got", got, "right", right, sep="\\n")
print("\\n".join(faults) or "the fault does not show")
sys.exit(1 if faults else 0)
'''

_PYTHON = """{load}function = module
for part in {function!r}.split("."):
    function = getattr(function, part)


def kernel(given, inputs, out):
    attributes = {{n: tuple(v) if isinstance(v, list) else v for n, v in given["attributes"].items()}}
    more = {{"op": given["op"], "dtype": given["dtype"], "inputs": inputs, "attributes": attributes,
            "output_shape": out.shape, "out": out}}
    values = {{"bias": None, **attributes, **inputs, **more}}
    parameters = inspect.signature(function).parameters
    named = {{name: values[name] for name in parameters if name in values}}
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        named |= {{**attributes, **inputs}}
    found = function(**named)
    return out if found is None else found
"""

_FILE = """spec = importlib.util.spec_from_file_location("kernel_under_test", {path!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
"""

_LIBRARY = """class Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("ndim", ctypes.c_int32), ("unused", ctypes.c_int32),
                ("shape", ctypes.c_int64 * 5)]


AXES = ("strides", "dilations", "pads_begin", "pads_end", "output_padding")


class Call(ctypes.Structure):  # struct convgrad_call of convgrad/kernel.h
    _fields_ = [("size", ctypes.c_int64)]
    _fields_ += [(n, ctypes.c_int32) for n in ("op", "dtype", "rank", "data_format", "weights_format", "unused")]
    _fields_ += [("groups", ctypes.c_int64), *[(name, ctypes.c_int64 * 3) for name in AXES]]
    _fields_ += [(name, Tensor) for name in ("src", "weights", "bias", "dst")]


function = ctypes.CDLL(os.path.abspath({path!r}))[{symbol!r}]


def kernel(given, inputs, out):
    attributes, fields = given["attributes"], given["fields"]
    call = Call(ctypes.sizeof(Call), {ops!r}.index(given["op"]), {dtypes!r}.index(given["dtype"]), len(fields["wide"]),
                {data!r}.index(fields["data_format"]), {weights!r}.index(fields["weights_format"]), 0, fields["groups"])
    for name in AXES:
        setattr(call, name, (ctypes.c_int64 * 3)(*attributes.get(name, fields.get(name, ()))))
    for name, array in {{**inputs, given["output"]: out}}.items():
        shape = (ctypes.c_int64 * 5)(*array.shape)
        setattr(call, name.removeprefix("diff_"), Tensor(array.ctypes.data, array.ndim, 0, shape))
    status = function(ctypes.byref(call))
    if status:
        sys.exit(f"the function returned {{status}}")
    return out
"""

_COMMAND = """def kernel(given, inputs, out):
    with tempfile.TemporaryDirectory() as folder:
        for name, array in inputs.items():
            np.save(os.path.join(folder, name + ".npy"), array)
        call = {{"op": given["op"], "dtype": given["dtype"], "attributes": given["attributes"],
                "inputs": {{name: name + ".npy" for name in inputs}}, "output": given["output"],
                "output_shape": list(out.shape)}}
        with open(os.path.join(folder, "call.json"), "w") as file:
            json.dump(call, file)
        words = shlex.split({command!r})
        filled = [word.replace("{{folder}}", folder) for word in words]
        subprocess.run(filled + ([folder] if filled == words else []), check=True)
        found = np.load(os.path.join(folder, given["output"] + ".npy"))
        return found.view(out.dtype) if found.dtype in ("V2", "<u2") else found
"""

_FRAMEWORK = """from functools import cache


{parts}

def kernel(given, inputs, out):
    convert = converter({kernel!r})
    attributes = {{n: tuple(v) if isinstance(v, list) else v for n, v in given["attributes"].items()}}
    values = {{"op": given["op"], "inputs": {{n: convert(array) for n, array in inputs.items()}},
              "attributes": attributes, "output_shape": out.shape}}
    found = _{name}(**{{n: values[n] for n in inspect.signature(_{name}).parameters}})
    if not hasattr(found, "detach"):
        return np.asarray(found)
    found = found.detach().cpu().contiguous()  # NumPy can't read bf16 of PyTorch
    return found.view(_module("torch").int16).numpy().view(out.dtype) if out.itemsize == 2 else found.numpy()
"""

_CONVGRAD = """from convgrad._check.adapters import KernelCall, adapter
from convgrad._check.problems import Problem
from convgrad._tensors import array_of

loaded = adapter({kernel!r}, {arrays!r}, {{}})


def kernel(given, inputs, out):
    found = loaded.run(KernelCall(Problem.from_json(given["fields"]), inputs, out))
    return out if found is None else array_of(found)
"""
