"""Run a check as the command does, and return its report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import convgrad
from convgrad._check.judge import Judge
from convgrad._check.process import KernelProcess
from convgrad._check.report import Data, new
from convgrad._check.run import check, chosen
from tests.convgrad.check import kernels

__all__ = ["KERNELS", "checked"]

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
