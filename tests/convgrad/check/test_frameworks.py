"""The operations of frameworks as kernels, where these are installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from convgrad._check.problems import OPS
from convgrad._check.process import KernelProcess
from convgrad._check.report import counts
from tests.convgrad.check.checking import checked
from tests.live import LiveService


@pytest.mark.parametrize("name", ["torch", "jax", "onnxruntime"])
def test_a_framework_is_checked(name: str, service: LiveService) -> None:
    """Its f32 operations have the right bits for integers, in all formats, and honest errors for real numbers."""
    for package in (name, *(("onnx",) if name == "onnxruntime" else ())):
        pytest.importorskip(package)
    takes = {"dtypes": ["f32"], "ops": OPS[4:6] if name == "onnxruntime" else OPS}
    data = checked(name, service.url, cases=32, only=["integers", "impulse", "normal", "random"], takes=takes)
    assert counts(data) == {"passed": 32, "failed": 0, "unsupported": 0}, data["faults"]


def test_a_framework_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A framework that can't be imported is named."""
    (tmp_path / "onnxruntime.py").write_text("raise ImportError('not here')\n", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ValueError, match=r"needs the package onnxruntime, which can't be imported: not here"):
        KernelProcess("onnxruntime", takes={}, limit=1)
