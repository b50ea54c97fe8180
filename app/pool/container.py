"""What this process may use of the machine: processors and memory, as its control group allows."""

from __future__ import annotations

import math
import os
from pathlib import Path

__all__ = ["cpu_count", "memory_bytes"]

_CGROUP = Path("/sys/fs/cgroup")


def cpu_count(cgroup: Path = _CGROUP) -> int:
    """Count the processors this process may keep busy: affinity, cut by the control group's quota."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota_v2(cgroup / "cpu.max") or _quota_v1(cgroup / "cpu")
    # A quota of 1.5 keeps two workers busy three quarters of the time: better than one all of the time.
    return max(1, min(allowed, math.ceil(quota))) if quota else max(1, allowed)


def memory_bytes(cgroup: Path = _CGROUP) -> int:
    """Tell how many bytes of memory there are: the machine's, cut by the control group's limit."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = (_number(cgroup / "memory.max"), _number(cgroup / "memory" / "memory.limit_in_bytes"))
    return min([physical, *(limit for limit in limits if limit)])  # no limit in version 1 is about 2**63


def _quota_v2(path: Path) -> float | None:
    fields = _text(path).split()
    if len(fields) != 2 or not all(field.isdecimal() for field in fields) or fields[1] == "0":
        return None
    return int(fields[0]) / int(fields[1])


def _quota_v1(folder: Path) -> float | None:
    quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    return quota / period if quota and period else None


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return ""
