"""Servers under measurement: ours and the peers, each in its own environment, and their memory."""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.startup import ROOT, free_port, held_mib

__all__ = ["NotHad", "PeakMemory", "Server", "environment"]

_CACHE = ROOT / ".cache" / "benchmarks"
_TORCH = "torch==2.13.0"
_WEB = ("fastapi", "uvicorn", "uvloop", "httptools")
PACKAGES = {
    "handwritten": (*_WEB, "numpy", _TORCH),
    "pytriton": ("nvidia-pytriton==0.7.0", "numpy", _TORCH),
    "body_only": _WEB,
}
_SCRIPTS = {"handwritten": "handwritten.py", "pytriton": "pytriton_server.py", "body_only": "body_only.py"}
_READY = {"convgrad": "/readyz", "pytriton": "/v2/models/gradient/ready"}
_START_LIMIT_S = 300.0


class NotHad(Exception):  # noqa: N818 - no error: the run goes on and says so
    """Why a peer is unavailable."""


def environment(name: str) -> Path:
    """Create the environment of a peer unless it exists; return its interpreter."""
    folder = _CACHE / name
    done, wanted = folder / "installed.txt", "\n".join(PACKAGES[name])
    python = folder / "bin" / "python"
    if done.exists() and done.read_text(encoding="utf-8") == wanted:
        return python
    for command in (
        [sys.executable, "-m", "venv", "--clear", str(folder)],
        [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *PACKAGES[name]],
    ):
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        if found.returncode:
            raise NotHad(f"{name} could not be installed: {(found.stderr.strip().splitlines() or ['?'])[-1]}")
    done.write_text(wanted, encoding="utf-8")
    return python


class Server:
    """A running server; use it with `with`."""

    def __init__(self, name: str, *, workers: int = 0) -> None:
        self.name = name
        self.port = free_port()
        self._workers = workers
        self._process: subprocess.Popen[bytes]

    def __enter__(self) -> Self:
        env = os.environ | {"PYTHONUNBUFFERED": "1"}
        if self.name == "convgrad":
            env |= {"CONVGRAD_PORT": str(self.port), "CONVGRAD_WORKERS": str(self._workers)}
            env |= {"CONVGRAD_OIP_SHARED_MEMORY": "true"}
            command: Sequence[str] = [sys.executable, "-m", "app"]
        else:
            others = [str(free_port()) for _ in range(2)]  # PyTriton needs two more
            script = str(ROOT / "benchmarks" / "peers" / _SCRIPTS[self.name])
            command = [str(environment(self.name)), script, str(self.port), *others]
            # Triton's stub comes without libpython: it must find ours before any other one of the system.
            env["LD_LIBRARY_PATH"] = str(sysconfig.get_config_var("LIBDIR"))
        self._log = tempfile.TemporaryFile("w+b")
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=self._log, stderr=self._log, start_new_session=True
        )
        try:
            self._wait()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._log.close()

    def memory(self) -> float:
        """Return the memory of all processes of our server in MiB, shared pages counted once."""
        return held_mib(self._process.pid)

    def _wait(self) -> None:
        end = time.monotonic() + _START_LIMIT_S
        while not self._ready():
            if self._process.poll() is not None or time.monotonic() > end:
                self._log.seek(0)
                last = self._log.read().decode(errors="replace").strip().splitlines() or ["it said nothing"]
                raise NotHad(f"{self.name} did not start: {last[-1]}")
            time.sleep(0.1)

    def _ready(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", _READY.get(self.name, "/"))
            status = connection.getresponse().status
            return status == 200 if self.name in _READY else True
        except OSError:
            return False
        finally:
            connection.close()


class PeakMemory:
    """Sample memory in a thread and keep the peak; use it with `with`."""

    def __init__(self, memory: Callable[[], float], every_s: float = 0.02) -> None:
        self._memory, self._every_s = memory, every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.peak = 0.0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(self._every_s):
            self.peak = max(self.peak, self._memory())
