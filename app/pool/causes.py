"""Failures of the worker pool as one log line: what failed, why, and the remedy."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path

__all__ = ["exit_code", "explain", "how_it_ended", "is_final"]

_REMEDIES = {
    errno.EAGAIN: "raise the process limit (ulimit -u, the container's pids_limit, systemd's TasksMax)",
    errno.ENOMEM: "allow more memory (the container's limit, systemd's MemoryMax, ulimit -v)",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.ENFILE: "raise the system's limit on open files (sysctl fs.file-max)",
    errno.ENOSPC: "free disk space, or point TMPDIR and NUMBA_CACHE_DIR at other folders",
    errno.EDQUOT: "free disk space, or point TMPDIR and NUMBA_CACHE_DIR at other folders",
    errno.EFBIG: "raise the file size limit (ulimit -f): it applies to shared memory too",
    errno.ENOSYS: "use Linux 5.3 or later, and a container whose seccomp profile allows this system call",
    errno.EPERM: "use a container whose seccomp profile allows this system call",
}


def explain(what: str, error: BaseException) -> str:
    """Return one line: what failed, why, and what to do about it."""
    code, reason = getattr(error, "errno", None), getattr(error, "strerror", None)
    if isinstance(error, MemoryError):
        code, reason = errno.ENOMEM, os.strerror(errno.ENOMEM)
    elif isinstance(error, RuntimeError) and "new thread" in str(error):
        code = errno.EAGAIN
    text = reason or f"{type(error).__name__}: {error}".removeprefix("OSError: ")
    line = " ".join(f"{what}: {text}".split())
    remedy = _REMEDIES.get(code or 0)
    return f"{line}; {remedy}" if remedy else line


def is_final(error: BaseException) -> bool:
    """Whether another attempt would fail in the same way."""
    return getattr(error, "errno", None) == errno.ENOSYS


def how_it_ended(status: int | None) -> str:
    """Describe how a process ended, from its exit status: negative for a signal, None if unknown."""
    if status is None:
        return "has ended"
    if status == -signal.SIGKILL:
        return "was killed by SIGKILL, as when memory runs out"
    return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"


def exit_code(pid: int) -> int | None:
    """Return the exit status of a dead process that its parent has not reaped; None if it is unknown."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return os.waitstatus_to_exitcode(int(fields[-1])) if fields[0] == "Z" else None
