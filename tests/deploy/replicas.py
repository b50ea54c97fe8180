"""Real replicas of the service behind a real nginx with the configuration of `deploy/nginx/`, on free ports."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx

from tests.live import LiveService, running_service

__all__ = ["NGINX", "Replica", "free_ports", "passed_on", "proxy"]

NGINX = Path(__file__).resolve().parents[2] / "deploy" / "nginx"
_LOG = "log_format upstream '$upstream_addr'; access_log access.log upstream;"


def free_ports(count: int) -> list[int]:
    """Return ports that are free now."""
    with ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [listener.getsockname()[1] for listener in listeners]


class Replica:
    """A service with one worker that can be restarted on its port; use ``with``."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.statuses: list[int] = []
        """The exit statuses of the processes that were stopped."""
        self.logged: list[str] = []
        """The lines that these have logged."""

    def __enter__(self) -> Replica:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    @property
    def service(self) -> LiveService:
        """The running process."""
        return self._service

    def restart(self) -> None:
        """Stop it with SIGTERM, wait until it has exited, start another one, and wait until that is ready."""
        self._stop()
        self._start()

    def _start(self) -> None:
        with ExitStack() as stack:
            flags = ("--port", str(self.port), "--workers", "1", "--listen-when-ready", "true", "--drain-s", "60")
            self._service = stack.enter_context(running_service(*flags))
            self._stack = stack.pop_all()

    def _stop(self) -> None:
        self._stack.close()
        self.statuses.append(self._service.process.returncode)
        self.logged += self._service.log


@contextmanager
def proxy(folder: Path, replicas: Sequence[int]) -> Iterator[str]:
    """Run nginx in front of these ports, with its files in `folder`; the value is its URL."""
    (port,) = free_ports(1)
    text = (NGINX / "nginx.conf").read_text("utf-8")
    for old, new in (("listen 8080", f"listen 127.0.0.1:{port}"), ("access_log off;", _LOG)):
        assert old in text
        text = text.replace(old, new)
    (folder / "nginx.conf").write_text(text, "utf-8")
    # As in the file for compose, but for the names.
    (folder / "replicas.conf").write_text(
        "".join(f"server 127.0.0.1:{each} max_fails=0;\n" for each in replicas), "utf-8"
    )
    # A master that runs as root would start its workers as a user who can't enter this folder.
    more = "daemon off;" + (" user root;" if os.geteuid() == 0 else "")
    nginx = shutil.which("nginx", path=os.environ["PATH"] + ":/usr/sbin")
    assert nginx
    command = [nginx, "-e", "stderr", "-p", str(folder), "-c", str(folder / "nginx.conf"), "-g", more]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    log: list[str] = []
    reader = threading.Thread(target=lambda: log.extend(process.stderr or ()), daemon=True)
    reader.start()
    try:
        with httpx.Client(transport=httpx.HTTPTransport(retries=8)) as client:
            assert client.get(f"http://127.0.0.1:{port}/healthz").status_code == 200, "".join(log)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)
        reader.join()
        (folder / "error.log").write_text("".join(log), "utf-8")
        if process.stderr is not None:
            process.stderr.close()


def passed_on(folder: Path) -> int:
    """Return how many requests nginx sent to a second replica because the first failed; read it after `proxy`."""
    return sum("," in line for line in (folder / "access.log").read_text("utf-8").splitlines())
