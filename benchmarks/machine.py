"""What a measurement was made with: processor, versions, load."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from kernels.cpu import cpu

__all__ = ["describe_machine", "load"]


def load() -> float:
    """Give the mean number of runnable processes in the last minute, this one among them."""
    return round(os.getloadavg()[0], 2)


def describe_machine() -> dict[str, Any]:
    """Describe processor, system and versions, for the record."""
    found: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": {
            "model": _model(),
            "llvm_name": cpu().name,
            "code_path": cpu().tag,
            "processors": os.cpu_count(),
            "features": sorted(cpu().features),
        },
        "system": f"{platform.system()} {platform.machine()}",
        "versions": {"python": platform.python_version()} | _versions(),
    }
    return found


def _versions() -> dict[str, str]:
    found = {}
    for name in ("numba", "llvmlite", "numpy", "torch"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _model() -> str:
    """Read the processor's name; not every system has one to read."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
