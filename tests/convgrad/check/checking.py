"""Run a check as the command does, and return its report; valid problems."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import convgrad
from convgrad._check.judge import Judge
from convgrad._check.large import check_large
from convgrad._check.problems import Problem
from convgrad._check.process import KernelProcess
from convgrad._check.report import Data, new
from convgrad._check.run import check, chosen
from schemas.ops import resolve
from tests.convgrad.check import kernels

__all__ = ["KERNELS", "assert_valid", "checked", "checked_on_large"]

KERNELS = Path(kernels.__file__)


def checked(
    kernel: str, url: str, *, cases: int, only: Sequence[str] = (), limit: float = 60.0, shrinking: float = 9.0,
    takes: Mapping[str, Any] = MappingProxyType({}),
) -> Data:  # fmt: skip
    """Check a kernel, or a function of `kernels.py`, on some cases; shrink each fault for so many seconds."""
    name = f"{KERNELS}:{kernel}" if hasattr(kernels, kernel) else kernel
    with convgrad.Client(url) as client, KernelProcess(name, takes=takes, limit=limit) as process:
        data = new(name, "numpy", 7, process.takes, {})
        check(process, Judge(client), data, choice=chosen(only, ()), seconds=3600, cases=cases, shrinking=shrinking,
              on_progress=lambda *_: None)  # fmt: skip
    return data


def checked_on_large(kernel: str, *names: str, **takes: Any) -> Data:
    """Check a kernel on large problems."""
    with KernelProcess(kernel, takes=takes, limit=20) as process:
        data = new(kernel, "numpy", 7, process.takes, {})
        until = time.monotonic() + 3600
        check_large(process, data, names, cases=None, until=until, on_progress=lambda *_: None)
    return data


def assert_valid(problem: Problem) -> None:
    """Assert that the service accepts the call, and that its result has the shape that the problem says."""
    inputs = {name: {"dtype": problem.dtype, "shape": list(shape)} for name, shape in problem.input_shapes.items()}
    resolved = resolve(problem.op, problem.attributes(), inputs)
    assert tuple(resolved.output.shape) == problem.output_shape, problem
