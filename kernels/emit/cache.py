"""Where compiled code is kept: one folder for exactly these sources, this target and these compilers.

The folder's name has all that decides the code in it, so that what was generated on one machine, in the build of an
image for instance, is found on every other one that it is for.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import llvmlite
import numba

from kernels.target import target

__all__ = [
    "VERDICT",
    "cache_folder",
    "choose_folder",
    "folder_name",
    "is_unpacked",
    "locked",
    "pack",
    "refused_folder",
]

VERDICT = "verdict.json"
"""A file that is written when all code is there and has been tried."""

_ARCHIVE, _SUFFIX = "zip", ".zip"

_UNPACKED, _TRIED = "unpacked", "tried"
"""Files that say that everything was taken from an archive, so that nothing is missing, and that it was tried."""


@cache
def folder_name() -> str:
    """Name the folder by the target and a digest of it, of the package's sources and place, and of the compilers.

    Numba looks only at the file that a function stands in, not at what it calls, and would run old code after a change
    elsewhere; and it finds a function by the path of its file. Triton's functions are not Numba's.
    """
    package = Path(__file__).parents[1]
    versions = numba.__version__, llvmlite.__version__, sys.implementation.cache_tag
    digest = hashlib.sha256(" ".join(map(str, (target().digest, *versions, package))).encode())
    for source in sorted(set(package.rglob("*.py")) - set((package / "gpu").iterdir())):
        digest.update(source.read_bytes())
    return f"{target()}-{digest.hexdigest()[:16]}"


@cache
def cache_folder() -> str:
    """Return this process's folder (see `choose_folder`)."""
    return str(choose_folder(os.environ))


def choose_folder(environment: Mapping[str, str]) -> Path:
    """Choose the folder, make it, and fill it with what an image carries for this target.

    It lies under `NUMBA_CACHE_DIR`, the user's cache folder, the temporary one or `/dev/shm`: the first that can be
    written and that nobody else can write to, for what lies there is run as code. Where `NUMBA_CACHE_DIR` can only be
    read, or holds the folder as an archive, the code is taken from there. Raises `OSError` where none can be written.
    """
    folder = _base(environment) / folder_name()
    folder.mkdir(mode=0o700, exist_ok=True)
    given = environment.get("NUMBA_CACHE_DIR")
    if given and not (folder / VERDICT).exists():
        with locked(folder):
            _fill(folder, Path(given) / folder_name())
    return folder


def _base(environment: Mapping[str, str]) -> Path:
    home = environment.get("XDG_CACHE_HOME") or str(Path(environment.get("HOME") or "/nonexistent", ".cache"))
    choices = (
        environment.get("NUMBA_CACHE_DIR"),
        str(Path(home, "convgrad")),
        *(str(Path(folder, f"convgrad-{os.getuid()}")) for folder in _temporary_folders()),
    )
    for choice in map(Path, filter(None, choices)):
        if _usable(choice) and _usable(choice / folder_name()):
            return choice
    for folder in _temporary_folders():
        with contextlib.suppress(OSError):
            return Path(tempfile.mkdtemp(prefix="convgrad-", dir=folder))
    raise OSError("compiled kernels need a folder that can be written: let NUMBA_CACHE_DIR name one")


def _temporary_folders() -> Iterator[str]:
    with contextlib.suppress(FileNotFoundError):
        yield tempfile.gettempdir()
    yield "/dev/shm"  # noqa: S108 - a folder of our own is made there, and looked at as all others are


def refused_folder(environment: Mapping[str, str]) -> str | None:
    """Explain why the folder that `NUMBA_CACHE_DIR` names is not used; None if it is, or does not exist yet."""
    given = Path(environment.get("NUMBA_CACHE_DIR") or "/nonexistent")
    if not given.exists() or _is_private(given):
        return None
    status = given.stat()
    return (
        f"NUMBA_CACHE_DIR: {given} is not used: code from it is run, so only its owner, this user or root, may write to"
        f" it, but it belongs to user {status.st_uid} and has mode {stat.S_IMODE(status.st_mode):04o}"
    )


def _usable(folder: Path) -> bool:
    try:
        for each in reversed([folder, *folder.parents]):  # `parents=True` would make the others as the umask says
            if not each.exists():
                each.mkdir(mode=0o700, exist_ok=True)
    except OSError:
        return False
    return _is_private(folder) and os.access(folder, os.W_OK | os.X_OK)


def _is_private(folder: Path) -> bool:
    try:
        status = folder.stat()
    except OSError:
        return False
    return status.st_uid in {os.getuid(), 0} and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _fill(folder: Path, source: Path) -> None:
    """Take compiled code from another folder or its archive; a failure, on a full disk say, costs compiling."""
    archive = source.with_name(source.name + _SUFFIX)
    if (folder / _UNPACKED).exists() or not _is_private(source.parent):
        return
    with contextlib.suppress(OSError, shutil.Error, shutil.ReadError):
        if archive.is_file():
            shutil.unpack_archive(archive, folder)
            Path(folder, _UNPACKED).touch()
        elif source.is_dir() and source != folder:
            shutil.copytree(source, folder, dirs_exist_ok=True)


def is_unpacked() -> bool:
    """Return whether this process's folder was filled from an archive, so that nothing has to be compiled.

    Only the first process is told: if it can't even load the code, the next one compiles it.
    """
    folder = Path(cache_folder())
    try:
        (folder / _UNPACKED).stat()
        (folder / _TRIED).touch(exist_ok=False)
    except OSError:
        return False
    return True


def pack(folder: str) -> Path:
    """Turn a folder into an archive beside it, a fifth of its size, from which `cache_folder` fills it again."""
    archive = shutil.make_archive(folder, _ARCHIVE, folder)
    shutil.rmtree(folder)
    return Path(archive)


@contextlib.contextmanager
def locked(folder: str | Path) -> Iterator[None]:
    """Hold the folder against other processes: two that compile into one folder would lose each other's entries.

    A file system without locks is used without one.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            file = stack.enter_context(Path(folder, ".lock").open("a"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
