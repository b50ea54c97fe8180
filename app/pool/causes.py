"""Why there is no worker, in one line that ends with the remedy."""

from __future__ import annotations

import errno
import os
import signal

__all__ = ["explain", "how_it_ended", "is_final"]

_REMEDIES = {
    errno.EAGAIN: "raise the limit on processes (ulimit -u, pids_limit of the container, TasksMax of systemd)",
    errno.ENOMEM: "allow more memory (the container's limit, MemoryMax of systemd, ulimit -v)",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.ENFILE: "raise the system's limit on open files (sysctl fs.file-max)",
    errno.ENOSPC: "make room on the disk, or let TMPDIR and NUMBA_CACHE_DIR name other folders",
    errno.EDQUOT: "make room on the disk, or let TMPDIR and NUMBA_CACHE_DIR name other folders",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f): it holds for shared memory too",
    errno.ENOSYS: "use Linux 5.3 or later, and a container whose seccomp profile allows this system call",
    errno.EPERM: "use a container whose seccomp profile allows this system call",
}


def explain(what: str, error: BaseException) -> str:
    """Say in one line what failed, why, and what to do about it."""
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
    """Whether another try would fail in the same way."""
    return getattr(error, "errno", None) == errno.ENOSYS


def how_it_ended(status: int) -> str:
    """Say how a process ended whose status, negative for a signal, is given."""
    if status == -signal.SIGKILL:
        return "by SIGKILL, as when memory runs out"
    return f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
