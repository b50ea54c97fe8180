"""What the machine may lack: the service has a fallback, or /readyz, log and exit status say what is missing."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest

import convgrad
from kernels.target import NAME
from tests.app.samples import SMALL, post
from tests.confined import without
from tests.faults.machine import can, right
from tests.live import LiveService, running_service

pytestmark = pytest.mark.heavy

# As a user that can read root's files: a limit on processes does not apply to root.
OTHER_USER = [
    *("setpriv", "--reuid=23456", "--regid=23456", "--clear-groups"),
    *("--inh-caps=+dac_read_search,+dac_override", "--ambient-caps=+dac_read_search,+dac_override"),
]
PATIENCE_S = 60.0


def quick(*flags: str, **options: Any) -> AbstractContextManager[LiveService]:
    """Run a service that compiles nothing: what is missing in these tests does not concern the kernels."""
    options[NAME] = "reference"
    return running_service(*flags, **options)


def said(service: LiveService, status: str) -> dict[str, Any]:
    """Poll /readyz until it reports this status; return that page."""
    until = time.monotonic() + PATIENCE_S
    with httpx.Client(timeout=60) as http:
        while time.monotonic() < until:
            if service.url:
                reply = http.get(f"{service.url}/readyz")
                page: dict[str, Any] = reply.json()
                assert reply.status_code == (200 if page["status"] == "ready" else 503)
                if page["status"] == status:
                    return page
    raise AssertionError(f"never {status}:\n" + "".join(service.log))


def ended(service: LiveService, cause: str) -> None:
    """Wait for the service to exit, with status 4 and the cause in the last error of its log."""
    assert service.process.wait(PATIENCE_S) == 4
    service.ready.wait(PATIENCE_S)
    errors = [line for line in service.log if " ERROR " in line]
    assert f"no worker can be started, exiting: {cause}" in errors[-1]
    assert not [line for line in service.log if "Traceback" in line]


def test_processes_that_may_not_be_started() -> None:
    """With too low a process limit the service reports `failed` and the cause, rejects calls, and finally exits."""
    under = [*OTHER_USER, "prlimit", "--nproc=1"]
    if not can([*OTHER_USER, "true"]):
        pytest.skip("no other user here")
    with quick("--workers", "2", under=under, wait=False) as service:
        page = said(service, "failed")
        assert page["workers"] == {"ready": 0, "wanted": 2}
        assert page["cause"].startswith(
            "the fork server can't be started: Resource temporarily unavailable; raise the process limit"
        )
        with httpx.Client(base_url=service.url, timeout=60) as http:
            assert "convgrad_failed 1.0" in http.get("/metrics").text
            refused = post(http, SMALL, SMALL.inputs())
            assert (refused.status_code, refused.json()["reason"]) == (503, "failed")
        command = [sys.executable, "-m", "convgrad", "health", "--url", service.url]
        health = subprocess.run(command, check=False, capture_output=True, text=True)
        assert health.returncode == 4
        with convgrad.Client(service.url) as client, pytest.raises(convgrad.TimedOut, match="failed: the fork"):
            client.wait_until_ready(0.1)
        assert page["cause"] in health.stdout
        ended(service, page["cause"])


def test_fewer_processes_than_workers() -> None:
    """If only some of the workers can be started, the service computes, and says how many there are and why."""
    under = [*OTHER_USER, "prlimit", "--nproc=4"]  # itself, the fork server, and two more, one of which may be a thread
    if not can([*OTHER_USER, "true"]):
        pytest.skip("no other user here")
    with quick("--workers", "4", under=under) as service:
        page = said(service, "ready")
        assert 1 <= page["workers"]["ready"] < page["workers"]["wanted"] == 4
        assert page["cause"].startswith("workers can't be forked")
        assert any("of 4 workers" in line for line in service.log)


def test_without_memfd_create_a_call_is_computed(tmp_path: Path) -> None:
    """Without memfd_create shared memory is created in unlinked files."""
    under = without("memfd_create")
    with quick("--workers", "1", under=under, TMPDIR=str(tmp_path)) as service:
        assert right(service)
        assert any("tensors are kept in unlinked files" in line for line in service.log)
        assert not list(tmp_path.glob("convgrad-*[!0-9]"))


def test_without_shared_memory_of_any_kind() -> None:
    """Without memfd_create and room for a file, the service says so and exits."""
    under = [*without("memfd_create"), "prlimit", "--fsize=0"]
    with quick("--workers", "1", under=under, wait=False) as service:
        page = said(service, "failed")
        assert page["cause"].startswith("the fork server can't be started: memfd_create failed")
        ended(service, page["cause"])


def test_without_pidfd_open() -> None:
    """Without the system call for watching processes the service exits at once and says what it needs."""
    with quick("--workers", "1", under=without("pidfd_open"), wait=False) as service:
        ended(service, "the fork server can't be started: Function not implemented; use Linux 5.3 or later")


def test_no_room_for_compiled_code(tmp_path: Path) -> None:
    """If compiled code can't be stored, the target is not called unfit: the service says what is missing, and where."""
    under = ["unshare", "--mount", "sh", "-ec", f'mount -t tmpfs -o mode=700,size=64k none {tmp_path}; exec "$@"', "sh"]
    if not can(under):
        pytest.skip("no mounts here")
    folder: dict[str, Any] = {"NUMBA_CACHE_DIR": str(tmp_path)}
    with running_service("--workers", "1", under=under, wait=False, **folder) as service:
        page = said(service, "failed")
        assert page["unfit"] == []
        assert page["progress"] == 0.0
        cause = "the kernels can't be compiled or loaded: No space left on device; free disk space"
        assert page["cause"].startswith(cause)


def test_one_processor() -> None:
    """On one processor there is one worker, and it computes."""
    under = ["taskset", "--cpu-list", str(min(os.sched_getaffinity(0)))]
    if not can(under):
        pytest.skip("no taskset here")
    with quick(under=under) as service:
        assert said(service, "ready")["workers"] == {"ready": 1, "wanted": 1}
        assert right(service)


def test_no_folder_that_can_be_written() -> None:
    """On a completely read-only machine the service exits at once and names the setting."""
    folders = '/ /tmp /var/tmp /dev/shm "$HOME" "$PWD"'
    readonly = f'for each in {folders}; do mount --bind -o ro "$each" "$each" 2>/dev/null; done; exec "$@"'
    under = ["unshare", "--mount", "sh", "-c", readonly, "sh"]
    if not can(under) or can([*under, "touch", "/tmp/convgrad-is-writable"]):
        pytest.skip("no mounts here")
    command = [*under, sys.executable, "-m", "app", "--port", "0"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "compiled kernels need a folder that can be written: let NUMBA_CACHE_DIR name one"
    ]


def test_a_taken_port_starts_nothing(tmp_path: Path) -> None:
    """The address is bound before anything is forked: if it is in use, nothing is compiled."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        command = [sys.executable, "-m", "app", "--port", port]
        environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
        done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment, timeout=PATIENCE_S)
    assert done.returncode == 3
    assert "in use" in done.stderr
    assert "Waiting for application startup" not in done.stderr
    assert not [file for file in tmp_path.rglob("*") if file.is_file() and file.name != ".lock"]
