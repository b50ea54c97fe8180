"""Connect to the user's local service, or start it.

Each set of settings has a folder with the sockets and the log of its service, and a lock that the service holds while
it runs: the kernel releases it however the process ends. The process that gets the lock starts the service, which
inherits the lock; all others connect.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convgrad import _launch as launch
from convgrad._errors import ConnectFailed, TimedOut
from convgrad._shared import Connection, ServiceEnded

if sys.platform != "win32":  # the client itself works there too
    import fcntl

__all__ = ["LocalService", "open_service"]

_POLL_S = 0.02
_MAX_PATH = 107  # of a Unix socket
_USERS, _HTTP, _LOCK, _LOG = "users", "http", "lock", "log"
# Variables that choose the compiled code; all other settings are the caller's parameters.
_CODE = ("CONVGRAD_TARGET", "CONVGRAD_CPU_FEATURES", "CONVGRAD_CPU_IMITATE", "CONVGRAD_PLAN_MEMORY", "NUMBA_CACHE_DIR")


@dataclass(frozen=True)
class LocalService:
    """A running local service, and the connection that keeps it running."""

    folder: Path
    pid: int
    connection: Connection

    @property
    def http(self) -> Path:
        """The Unix socket of its API."""
        return self.folder / _HTTP

    def close(self) -> None:
        """Disconnect; the service ends with its last user."""
        self.connection.close()

    def is_locked(self) -> bool:
        """Whether this service, or a later one in the same folder, is running."""
        with _lock(self.folder) as lock:
            return lock is None

    def ended_message(self) -> str:
        """Return the message of an error: it has ended, with the last line of its log."""
        return f"the local service (process {self.pid}) has ended{_last_line(self.folder)}"


def open_service(settings: Mapping[str, Any], *, share: bool, timeout: float) -> LocalService:
    """Connect to the running service with these settings, or start it; it may not be ready yet.

    Without `share`, always start a new one. Raises `ConnectFailed` when the service is not installed or ends
    while it starts, `TimedOut` after `timeout` seconds, `OSError` when there is no folder for it.
    """
    if not sys.platform.startswith("linux"):
        raise ConnectFailed("a local service needs Linux: start one elsewhere and give its URL to convgrad.Client")
    try:
        root = launch.service_root()
    except launch.NotInstalled as error:
        raise ConnectFailed(str(error)) from error
    end = time.monotonic() + timeout
    base = _base_folder()
    _sweep(base)
    name = _name_of(root, settings)
    folder = base / name if share else Path(tempfile.mkdtemp(prefix=f"{name}-", dir=base))
    starts = 0
    connection: Connection | None
    while True:
        folder.mkdir(mode=0o700, exist_ok=True)
        with _lock(folder) as lock:
            if lock is not None:
                if starts:
                    raise ConnectFailed(f"the local service ended while it started{_last_line(folder)}")
                starts += 1
                connection = _start(folder, root, settings, lock)
            else:
                connection = _connect(folder)
        if connection is not None and (found := _greeted(connection, folder, end)) is not None:
            return found
        if time.monotonic() > end:
            raise TimedOut(f"the local service did not start within {timeout:g} s{_last_line(folder)}")
        time.sleep(_POLL_S)


def _greeted(connection: Connection, folder: Path, end: float) -> LocalService | None:
    """Wait for the first packet of the service; None if it ends before."""
    try:
        hello = connection.hello(max(_POLL_S, end - time.monotonic()))
    except (ServiceEnded, TimeoutError):
        connection.close()
        return None
    except BaseException:
        connection.close()
        raise
    return LocalService(folder, int(hello["pid"]), connection)


def _connect(folder: Path) -> Connection | None:
    try:
        return Connection(str(folder / _USERS))
    except OSError:  # not there yet, or ending
        return None


def _start(folder: Path, root: Path, settings: Mapping[str, Any], lock: int) -> Connection:
    """Start a service in a folder whose `lock` this process holds, and connect to it."""
    for name in (_USERS, _HTTP):  # left by a service that was killed
        (folder / name).unlink(missing_ok=True)
    path = str(folder / _USERS)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with listener, (folder / _LOG).open("wb") as log:
        listener.bind(path)
        listener.listen(128)
        # Connect before the service starts: if this process dies meanwhile, the service finds a closed connection.
        connection = Connection(path)
        inherited = {name: value for name, value in os.environ.items() if not _is_setting(name)}
        given = {**settings, "uds": folder / _HTTP}
        variables = {f"CONVGRAD_{name.upper()}": str(value) for name, value in given.items()}
        try:
            process = subprocess.Popen(  # noqa: S603 - our own command
                launch.command([str(listener.fileno())], "app.local"),
                env=launch.environment(root, {**inherited, **variables}),
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(listener.fileno(), lock),
                start_new_session=True,  # Ctrl-C is for this process, not for the other users' service
            )
        except BaseException:
            connection.close()
            raise
    threading.Thread(target=process.wait, name="convgrad-local", daemon=True).start()
    return connection


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[int | None]:
    """Try to lock a folder; yields the descriptor that holds the lock, or None. A child that inherits it keeps it."""
    try:
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except FileNotFoundError:  # the folder was swept
        yield None
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        held = os.fstat(lock).st_nlink > 0  # not that of a folder that was swept meanwhile
    except BlockingIOError:
        held = False
    try:
        yield lock if held else None
    finally:
        os.close(lock)


def _sweep(base: Path) -> None:
    """Remove the folders of services that have ended."""
    for folder in base.iterdir():
        with _lock(folder) as lock, contextlib.suppress(OSError):
            if lock is not None:
                # Rename it first: another process may create a new folder of this name at any time.
                gone = tempfile.mkdtemp(prefix="ended-", dir=base)
                folder.rename(gone)
                shutil.rmtree(gone, ignore_errors=True)


def _base_folder() -> Path:
    """Return the folder of this user's local services, which nobody else can enter."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    choices = [Path(runtime, "convgrad")] if runtime else []
    choices.append(Path(tempfile.gettempdir(), f"convgrad-local-{os.getuid()}"))
    for folder in choices:
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, exist_ok=True)
            found = folder.lstat()
            own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
            if own and len(os.fsencode(folder)) + 40 <= _MAX_PATH:
                return folder
    raise OSError(f"a local service needs a folder with a short name that is only yours, such as {choices[-1]}")


def _name_of(root: Path, settings: Mapping[str, Any]) -> str:
    """Return a short name for a service of this code with these settings."""
    from convgrad import __version__

    code = {name: os.environ.get(name) for name in _CODE}
    text = json.dumps([__version__, str(root), sys.executable, dict(settings), code], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _is_setting(name: str) -> bool:
    return name.startswith("CONVGRAD_") and name not in _CODE


def _last_line(folder: Path) -> str:
    try:
        lines = (folder / _LOG).read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return ""
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f"; the last line of its log: {last}" if last else ""
