"""The processors and memory that this process may use, by its resource limits and control groups."""

from __future__ import annotations

import contextlib
import math
import os
import resource
from collections.abc import Iterator
from pathlib import Path

__all__ = [
    "check_address_space",
    "cpu_count",
    "free_memory",
    "memory_bytes",
    "name_process",
    "prefer_for_oom_kill",
]

_ROOT = Path("/")
# Address space that loading the service takes, rounded up; with less, imports fail in unpredictable ways.
_LEAST_MIB = 384
_OOM_SCORE = 500


def check_address_space() -> None:
    """Raise `MemoryError` when `ulimit -v` is too low to load the service."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY and limit < _LEAST_MIB << 20:
        raise MemoryError(
            f"ulimit -v allows {limit >> 20} MiB of address space, but loading the service needs {_LEAST_MIB} MiB"
        )


def cpu_count(root: Path = _ROOT) -> int:
    """Count the processors this process may use: its affinity, limited by the quotas of its control groups."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [_quota_v2(folder / "cpu.max") or _quota_v1(folder) for folder in _groups(root, "cpu")]
    # Rounded up: with a quota of 1.5, two workers at 75 % beat one at 100 %.
    return max(1, min([allowed, *(math.ceil(quota) for quota in quotas if quota)]))


def memory_bytes(root: Path = _ROOT) -> int:
    """Return the bytes of memory available: the machine's, limited by control groups and `ulimit -v`."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    files = [
        folder / name for folder in _groups(root, "memory") for name in ("memory.max", "memory.limit_in_bytes")
    ]  # version 1 says about 2**63 for "no limit"
    address_space = resource.getrlimit(resource.RLIMIT_AS)[0]
    limits = [limit for limit in map(_number, files) if limit]
    return min([physical, *limits, *([] if address_space == resource.RLIM_INFINITY else [address_space])])


def free_memory(root: Path = _ROOT) -> int:
    """Return the bytes of memory that this process can still be given: by the machine, and by its control groups."""
    lines = (line.split() for line in _text(root / "proc/meminfo").splitlines())
    free = [int(line[1]) << 10 for line in lines if line[0] == "MemAvailable:"]
    for folder in _groups(root, "memory"):
        for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            if most := _number(folder / limit):
                # what files keep in memory counts as used, and is given up when memory is short
                stat = dict(line.split() for line in _text(folder / "memory.stat").splitlines())
                kept = int(stat.get("inactive_file", 0))
                free.append(max(0, most - (_number(folder / used) or 0) + kept))
    return min([memory_bytes(root), *free])


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """List the folders of this process's control group and its ancestors for a controller, in both versions.

    A limit applies to everything below its group: the MemoryMax of a systemd slice limits each service in it.
    """
    lines = [line.split(":", 2) for line in _text(root / "proc/self/cgroup").splitlines()]
    own = {controller: Path(group) for _, controllers, group in lines for controller in controllers.split(",")}
    for line in _text(root / "proc/self/mountinfo").splitlines():
        fields = line.split()
        kind, options = fields[fields.index("-") + 1], fields[-1].split(",")
        group = own.get("" if kind == "cgroup2" else controller)
        if group is None or not (kind == "cgroup2" or (kind == "cgroup" and controller in options)):
            continue
        # A container may see only part of the tree: then the mount's root is itself a group.
        top, place = root / fields[4].lstrip("/"), Path(fields[3])
        group = group.relative_to(place) if group.is_relative_to(place) else Path()
        yield from (top / folder for folder in (group, *group.parents) if ".." not in folder.parts)


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


def prefer_for_oom_kill(pid: int | str = "self") -> None:
    """Make the out-of-memory killer choose this process, and those it starts, before the server."""
    with contextlib.suppress(OSError):  # a container may hide or lock /proc; nothing depends on it
        score = Path(f"/proc/{pid}/oom_score_adj")
        inherited = int(score.read_text(encoding="ascii"))
        score.write_text(str(min(1000, inherited + _OOM_SCORE)), encoding="ascii")


def name_process(name: str) -> None:
    """Set the name that `ps` and `top` show."""
    with contextlib.suppress(OSError):  # a container may hide or lock /proc; nothing depends on it
        Path("/proc/self/comm").write_text(name, encoding="ascii")
