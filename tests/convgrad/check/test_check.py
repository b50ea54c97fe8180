"""`convgrad check` finds planted faults of all kinds, shrinks them, and writes scripts that show them."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import convgrad
from convgrad._check.cases import Case
from convgrad._check.host import Guarded
from convgrad._check.problems import DTYPES, OPS
from convgrad._check.process import KernelProcess
from convgrad._check.report import counts
from tests.convgrad.check.checking import KERNELS, checked
from tests.convgrad.check.kernels import FAULTY
from tests.live import LiveService

CC = shutil.which("cc")


def smallest(fault: dict[str, Any]) -> int:
    """Return the elements of the inputs of the smallest case."""
    return sum(map(prod, Case.from_json(fault["smallest"]).problem.input_shapes.values()))


def test_a_right_kernel_passes(service: LiveService) -> None:
    """A kernel that sums in float64 passes integers, real numbers, Inf and NaN, traps and layers."""
    data = checked("right", service.url, cases=120)
    assert counts(data) == {"passed": 120, "failed": 0, "unsupported": 0}
    assert not data["faults"]
    assert {entry["kind"] for entry in data["cases"]} >= {"integers", "impulse", "normal", "special", "subnormals"}


def test_a_caller_with_many_open_files(service: LiveService) -> None:
    """The pipes of the kernel's process may have descriptors beyond the 1024 that select() takes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 2048:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 2048), hard))
    with ExitStack() as files:
        files.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(1100):
            files.enter_context(Path(os.devnull).open("rb"))
        assert counts(checked("right", service.url, cases=3))["passed"] == 3


@pytest.mark.heavy(minutes=1)
@pytest.mark.parametrize("name", FAULTY)
def test_planted_faults_are_found(name: str, service: LiveService) -> None:
    """Each faulty kernel is found within some cases, with the kind of its fault."""
    hangs = name == "hang"
    data = checked(name, service.url, cases=10 if hangs else 30, limit=0.5 if hangs else 60.0, shrinking=1.0)
    kinds = {fault["kind"] for fault in data["faults"]}
    assert kinds & FAULTY[name], data["faults"]
    if name in ("raises", "hang", "segfault", "input_modified", "another_dtype", "unaligned"):
        assert kinds == FAULTY[name]


def test_a_kernel_for_one_layer_is_tried_on_it(service: LiveService) -> None:
    """A declined case is made more usual: most cases of a kernel for one kind of layer are taken, and judged."""
    data = checked("for_one_layer", service.url, cases=30)
    assert data["declined"] == ["ranks=2", "groups=false"]
    assert counts(data)["passed"] > 20
    assert not data["unjudged"]


@pytest.mark.heavy
def test_a_fault_is_shown_in_its_clearest_case(service: LiveService) -> None:
    """Exchanged pads are one fault, which the hint of an ordinary problem names; its smallest problem has a pixel."""
    (fault,) = checked("pads_exchanged", service.url, cases=16)["faults"]
    assert fault["text"] == "as if pads_begin and pads_end were exchanged"
    assert fault["report"]["hints"] == [fault["text"]]
    assert prod(Case.from_json(fault["smallest"]).problem.wide) == 1


def test_bits_that_differ_are_counted_in_digits(service: LiveService) -> None:
    """A result that differs from call to call in the last bit has 7 of 7.2 digits in common."""
    (fault,) = checked("not_reproducible", service.url, cases=6, shrinking=1.0)["faults"]
    assert re.search(r"[67]\.\d of 7\.2 decimal digits are the same", fault["text"])


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["group_offset", "tf32_inputs", "input_modified", "cached", "nan_masked"])
def test_reproducers_show_the_fault(name: str, service: LiveService, tmp_path: Path) -> None:
    """The problem is small; its script fails with the faulty kernel, not with the right one, and needs no convgrad."""
    fault = checked(name, service.url, cases=40)["faults"][0]
    assert smallest(fault) <= 40
    script = fault["reproducer"]
    assert "convgrad" not in script.replace("Found by convgrad check", "").replace(str(KERNELS.parent), "")
    codes = []
    for kernel in (name, "right"):
        path = tmp_path / f"{kernel}.py"
        path.write_text(script.replace(repr(name), repr(kernel)), encoding="utf-8")
        codes.append(subprocess.run([sys.executable, path], cwd=tmp_path, capture_output=True, check=False).returncode)
    assert codes[0] != 0
    assert codes[1] == 0


@pytest.mark.skipif(CC is None, reason="needs a C compiler")
@pytest.mark.parametrize(
    ("flag", "kinds"),
    [
        ("RIGHT", set()),
        ("STRIDE_BUG", {"wrong"}),
        pytest.param("OUT_OF_BOUNDS", {"crashed", "outside"}, marks=pytest.mark.release),
    ],
)
def test_a_library_is_checked(flag: str, kinds: set[str], service: LiveService, tmp_path: Path) -> None:
    """A C kernel is called through the interface of kernel.h; a write beyond the result crashes or is seen."""
    assert CC is not None
    library = tmp_path / "kernel.so"
    source = Path(__file__).with_name("kernel.c")
    include = Path(convgrad.__file__).parent
    flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Werror", f"-D{flag}", f"-I{include}"]
    subprocess.run([CC, *flags, "-o", library, source], check=True)
    takes = {"ops": ["ConvolutionBackwardWeights"], "dtypes": ["f32"]}
    data = checked(str(library), service.url, cases=48, shrinking=2.0, takes=takes)
    assert {fault["kind"] for fault in data["faults"]} <= kinds
    assert bool(data["faults"]) == bool(kinds)
    assert not any("<frozen" in fault["text"] for fault in data["faults"]), "no line of Python is to blame"
    if flag != "OUT_OF_BOUNDS":  # each call crashes, and takes so long that not all is found out
        assert counts(data)["unsupported"] == 0
        assert data["declined"][:3] == ["ranks=2", "data_formats=NCX", "weights_formats=OIX"]
    with pytest.raises(ValueError, match=r"does not export other, the function that convgrad/kernel\.h declares"):
        KernelProcess(f"{library}:other", takes={}, limit=1)
    for fault in data["faults"]:
        path = tmp_path / "script.py"
        path.write_text(fault["reproducer"], encoding="utf-8")
        assert subprocess.run([sys.executable, path], cwd=tmp_path, check=False, capture_output=True).returncode != 0


@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize("aligned", [False, True])
def test_bytes_beside_a_tensor_are_watched(at_end: bool, aligned: bool) -> None:
    """A write just before or after a tensor, short of the pages that can't be touched, is seen."""
    guarded = Guarded((3, 5), np.dtype(np.float16), 255, at_end=at_end, aligned=aligned)
    address = guarded.array.ctypes.data
    assert (address % 64 == 0) == aligned
    assert np.isnan(guarded.array).all()
    guarded.array[:] = 1
    assert guarded.intact
    ctypes.memset(address - 1, 0, 1) if at_end or not aligned else ctypes.memset(address + guarded.array.nbytes, 0, 1)
    assert not guarded.intact


@pytest.mark.heavy
def test_a_program_is_checked(service: LiveService) -> None:
    """A program that reads and writes .npy files is checked; one that is killed by a signal has crashed."""
    program = f"command: {shlex.join([sys.executable, str(Path(__file__).with_name('program.py'))])}"
    takes = {"ops": ["BiasAdd", "Convolution"], "dtypes": ["f32", "bf16"]}
    data = checked(program, service.url, cases=4, takes=takes)
    assert counts(data) == {"passed": 4, "failed": 0, "unsupported": 0}
    assert data["declined"][0] == "ops=BiasAdd"
    data = checked(f"{program} --crash", service.url, cases=1, shrinking=0.1, takes=takes)
    assert [(fault["kind"], "SIGABRT" in fault["text"]) for fault in data["faults"]] == [("crashed", True)]


@pytest.mark.heavy
@pytest.mark.parametrize("path", [pytest.param("", marks=pytest.mark.release), "/rpc"])
def test_a_server_is_checked(path: str, service: LiveService) -> None:
    """The service itself passes as a server of the Open Inference Protocol and of JSON-RPC, all operations."""
    data = checked(service.url + path, service.url, cases=2 * len(OPS) * 3)
    assert counts(data) == {"passed": len(data["cases"]), "failed": 0, "unsupported": 0}
    data = checked(service.url + path, service.url, cases=1, takes={"dtypes": ["f64"]})
    assert counts(data)["unsupported"] == 1, "the service computes no f64"


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        ("no_such_module:kernel", "no_such_module can't be imported: ModuleNotFoundError"),
        (f"{KERNELS}:nothing", "has no nothing"),
        (f"{KERNELS}:FAULTY", "is not a function"),
        ("os.path:join", "the parameters must be inputs and attributes"),
        ("missing.so", "the library can't be loaded"),
        ("command:", "needs a program"),
        ("mine", "a kernel must be module:function"),
        ("math:pow", "the parameters must be"),
    ],
)
def test_kernels_that_can_not_be_used(kernel: str, message: str) -> None:
    """A kernel that can't be loaded is an error that says which part of it is missing."""
    with pytest.raises(ValueError, match=message):
        KernelProcess(kernel, takes={}, limit=1)


def test_an_import_that_ends_the_process(tmp_path: Path) -> None:
    """A module that ends the process, or fails, while it is imported is reported with its last words."""
    module = tmp_path / "fatal.py"
    module.write_text(
        "import os, sys\nsys.stderr.write('no device\\n')\nsys.stderr.flush()\nos._exit(3)\n", encoding="utf-8"
    )
    with pytest.raises(ValueError, match="it ended with status 3: no device"):
        KernelProcess(f"{module}:kernel", takes={}, limit=1)
    module.write_text("assert 1 > 2, 'no luck'\n", encoding="utf-8")
    with pytest.raises(ValueError, match="can't be imported: AssertionError: no luck"):
        KernelProcess(f"{module}:kernel", takes={}, limit=1)


def test_what_a_function_takes_follows_from_its_parameters(tmp_path: Path) -> None:
    """Tensors name the operation; attributes that are no parameters keep their defaults; `takes` adds to that."""
    module = tmp_path / "functions.py"
    module.write_text(
        "def plain(src, diff_dst, weights_shape): ...\n"
        "def transposed(src, weights, output_padding, **more): ...\n"
        "def every(op, inputs, attributes, out): ...\n"
        "every.takes = {'dtypes': ['bf16'], 'ranks': 2}\n"
        "def unnamed(inputs, attributes): ...\n"
        "class Module:  # as PyTorch's\n"
        "    def __call__(self, *given, **more): ...\n"
        "    def forward(self, src, weights, strides): ...\n"
        "module = Module()\n",
        encoding="utf-8",
    )
    with pytest.raises(ValueError, match="--ops may say which operation it is"):
        KernelProcess(f"{module}:unnamed", takes={}, limit=1)
    with KernelProcess(f"{module}:unnamed", takes={"ops": ["ConvTranspose", "BiasAdd"]}, limit=1) as process:
        assert process.takes.ops == ("ConvTranspose", "BiasAdd")
    with KernelProcess(f"{module}:plain", takes={}, limit=1) as process:
        takes = process.takes
        assert (takes.ops, takes.dtypes, takes.data_formats) == (("ConvolutionBackwardWeights",), ("f32",), ("NCX",))
        assert [takes.strides, takes.dilations, takes.pads, takes.groups] == [False] * 4
    with KernelProcess(f"{module}:module", takes={}, limit=1) as process:
        assert (process.takes.ops, process.takes.strides) == (("Convolution",), True)
    with KernelProcess(f"{module}:transposed", takes={"dtypes": DTYPES}, limit=1) as process:
        assert process.takes.ops == ("ConvTranspose",)
        assert process.takes.groups
        assert process.takes.dtypes == DTYPES
    with KernelProcess(f"{module}:every", takes={}, limit=1) as process:
        assert (process.takes.ops, process.takes.dtypes, process.takes.ranks) == (OPS, ("bf16",), (2,))
