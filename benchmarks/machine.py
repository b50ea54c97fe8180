"""The environment of a measurement: processor, versions, load."""

from __future__ import annotations

import os
import platform
import time
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from kernels.target import target

__all__ = ["Neighbours", "describe_machine", "load"]

_BUSY = (0, 1, 2, 5, 6, 7)
"""Fields of /proc/stat that count as work: user, nice, system, irq, softirq, and time stolen by the hypervisor."""


class Neighbours:
    """The number of processors kept busy by others since this object was made; None without /proc/stat."""

    def __init__(self) -> None:
        self._wall, self._all, self._own = time.monotonic(), _busy_seconds(), time.process_time()

    def mean(self) -> float | None:
        """Return the mean number of processors since then."""
        now = _busy_seconds()
        if now is None or self._all is None:
            return None
        others = now - self._all - (time.process_time() - self._own)
        return round(max(0.0, others) / max(1e-3, time.monotonic() - self._wall), 2)


def _busy_seconds() -> float | None:
    path = Path("/proc/stat")
    if not path.exists():
        return None
    fields = path.read_text(encoding="ascii").split("\n", 1)[0].split()[1:]
    return sum(int(fields[i]) for i in _BUSY if i < len(fields)) / os.sysconf("SC_CLK_TCK")


def load() -> float:
    """Return the mean number of runnable processes in the last minute, including this one."""
    return round(os.getloadavg()[0], 2)


def describe_machine() -> dict[str, Any]:
    """Return the processor, the system and the versions, for the record."""
    found: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": {
            "model": _model(),
            "llvm_name": target().name,
            "code_path": str(target()),
            "processors": os.cpu_count(),
            "features": sorted(target().features),
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
    """Return the processor's name, if the system provides it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
