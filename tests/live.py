"""The real service as a process of its own, on a free port."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["LiveService", "listening", "running_service"]

_ROOT = Path(__file__).parents[1]
# A first start compiles every kernel.
_START_S = 280.0
_STOP_S = 30.0
_LISTENING = re.compile(r"listening on ([^\s\"]+)")


@dataclass
class LiveService:
    """A running service: where it listens, its process, and the lines that it has logged."""

    process: subprocess.Popen[str]
    url: str = ""
    log: list[str] = field(default_factory=list)
    ready: threading.Event = field(default_factory=threading.Event)
    listens: threading.Event = field(default_factory=threading.Event)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    def read_log(self) -> None:
        """Collect its log until it ends."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if found := _LISTENING.search(line):
                self.url = found[1]
                self.listens.set()
            if "ready after" in line:
                self.ready.set()
        self.ready.set()
        self.listens.set()


@contextmanager
def running_service(
    *flags: str, wait: bool = True, under: Sequence[str] = (), module: str = "app", **environment: str
) -> Iterator[LiveService]:
    """Run `python -m app` with flags until the block ends; ready, unless told not to `wait`.

    `under` is a command that becomes the one that follows it, such as ``prlimit --nofile=64``; `module` is run in place
    of `app` and starts the service in its own way.
    """
    command = [*under, sys.executable, "-m", module, "--port", "0", *flags]
    with listening(command, cwd=_ROOT, environment={**os.environ, **environment}, wait=wait) as service:
        yield service


@contextmanager
def listening(
    command: Sequence[str], *, cwd: Path, environment: Mapping[str, str], wait: bool = True
) -> Iterator[LiveService]:
    """Run a command that serves until the block ends; ready, unless told not to `wait`."""
    process = subprocess.Popen(command, cwd=cwd, env=environment, stderr=subprocess.PIPE, text=True)
    service = LiveService(process)
    reader = threading.Thread(target=service.read_log, daemon=True)
    reader.start()
    try:
        if wait and not (service.ready.wait(_START_S) and process.poll() is None):
            raise AssertionError("the service did not start:\n" + "".join(service.log))
        yield service
    finally:
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        reader.join()
        assert process.stderr is not None
        process.stderr.close()
