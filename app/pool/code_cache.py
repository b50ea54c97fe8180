"""Where compiled kernels are kept: a folder that this process can write and that nobody else can."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

__all__ = ["code_cache"]


def code_cache(environment: Mapping[str, str]) -> str:
    """Choose the folder for compiled kernels: NUMBA_CACHE_DIR, else the user's cache, else a temporary one.

    A folder is taken only when it can be written and nobody else can write to it: what is in it gets
    executed. When NUMBA_CACHE_DIR can only be read, as in a container with a read-only root, what is in it
    is copied to the folder that is taken instead.
    """
    given = environment.get("NUMBA_CACHE_DIR")
    home = environment.get("XDG_CACHE_HOME") or str(Path(environment.get("HOME") or "/nonexistent", ".cache"))
    choices = [given, str(Path(home, "convgrad"))]
    choices.append(str(Path(tempfile.gettempdir(), f"convgrad-numba-{os.getuid()}")))
    for folder in map(Path, filter(None, choices)):
        if _usable(folder):
            break
    else:
        folder = Path(tempfile.mkdtemp(prefix="convgrad-numba-"))
    if given and Path(given) != folder:
        _copy_missing(Path(given), folder)
    return str(folder)


def _usable(folder: Path) -> bool:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return False
    return _is_private(folder) and os.access(folder, os.W_OK | os.X_OK)


def _is_private(folder: Path) -> bool:
    try:
        status = folder.stat()
    except OSError:
        return False
    return status.st_uid in {os.getuid(), 0} and not status.st_mode & stat.S_IWOTH


def _copy_missing(source: Path, target: Path) -> None:
    def copy(old: str, new: str) -> None:
        # What was compiled since then stays: a newer index would lose its entries to the older one.
        if not Path(new).exists():
            shutil.copyfile(old, new)

    if _is_private(source):
        # A copy that fails, on a full disk for instance, only costs compiling.
        with contextlib.suppress(OSError, shutil.Error):
            shutil.copytree(source, target, copy_function=copy, dirs_exist_ok=True)
