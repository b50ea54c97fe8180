"""The operations of frameworks as kernels, where these are installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import convgrad
from convgrad._check.cases import Case
from convgrad._check.examine import Fault
from convgrad._check.frameworks import FRAMEWORKS
from convgrad._check.judge import Judge
from convgrad._check.problems import OPS, Problem
from convgrad._check.process import KernelProcess, Memory
from convgrad._check.report import counts
from convgrad._check.reproducer import reproducer
from tests.convgrad.check.checking import checked, checked_on_large
from tests.live import LiveService


@pytest.mark.parametrize("name", ["torch", "jax", "onnxruntime"])
def test_a_framework_is_checked(name: str, service: LiveService) -> None:
    """Its f32 operations have the right bits for integers, in all formats, and honest errors for real numbers."""
    for package in (name, *(("onnx",) if name == "onnxruntime" else ())):
        pytest.importorskip(package)
    takes = {"dtypes": ["f32"], "ops": OPS[4:6] if name == "onnxruntime" else OPS}
    data = checked(name, service.url, cases=32, only=["integers", "impulse", "normal", "random"], takes=takes)
    assert counts(data) == {"passed": 32, "failed": 0, "unsupported": 0}, data["faults"]


@pytest.mark.parametrize("name", ["torch", "jax"])
def test_a_framework_is_checked_on_large_problems(name: str) -> None:
    """Its arrays are drawn and projected without NumPy's, in f32 and bf16."""
    pytest.importorskip(name)
    takes = {"dtypes": ["f32", "bf16"], "ops": [OPS[0], OPS[4]]}
    data = checked_on_large(name, "65536 images", **takes)
    assert counts(data) == {"passed": 4, "failed": 0, "unsupported": 0}, data["faults"]


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_script_for_a_framework_stands_alone(name: str, service: LiveService, tmp_path: Path) -> None:
    """It contains what calls the framework, needs no convgrad, and tells a right result from a wrong one."""
    case = Case(Problem(op="Convolution", wide=(5, 4), kernel=(3, 2), dst_channels=2), "integers", seed=1)
    with convgrad.Client(service.url) as client:
        script = reproducer(case, Fault("wrong", "text"), name, "numpy", Judge(client))
    compile(script, name, "exec")
    assert "convgrad" not in script.replace("Found by convgrad check", "")
    pytest.importorskip(name)
    called = "def kernel(given, inputs, out):\n"
    wrong = script.replace(called, f"{called}    inputs = {{name: array + 1 for name, array in inputs.items()}}\n")
    for text, code in ((script, 0), (wrong, 1)):
        (tmp_path / "script.py").write_text(text, encoding="utf-8")
        done = subprocess.run([sys.executable, tmp_path / "script.py"], cwd=tmp_path, capture_output=True, check=False)
        assert done.returncode == code, done.stderr


def test_torch_gets_no_inf_where_the_pads_differ() -> None:
    """Pads that differ at both ends are added before PyTorch is called, so Inf beside them shows nothing about it."""
    pytest.importorskip("torch")
    problem = Problem(op="Convolution", wide=(3,), kernel=(2,), pads_end=(1,))
    inputs = {name: np.full(shape, np.inf, np.float32) for name, shape in problem.input_shapes.items()}
    with KernelProcess("torch", takes={}, limit=60.0) as process:
        assert process.call(problem, inputs, Memory()).status == "unsupported"
        assert (
            process.call(problem, {name: np.ones_like(each) for name, each in inputs.items()}, Memory()).status
            == "done"
        )


def test_a_framework_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A framework that can't be imported is named."""
    (tmp_path / "onnxruntime.py").write_text("raise ImportError('not here')\n", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ValueError, match=r"needs the package onnxruntime, which can't be imported: not here"):
        KernelProcess("onnxruntime", takes={}, limit=1)
