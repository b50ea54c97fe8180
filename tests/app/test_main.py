"""The service as a process: its start, its drain, and the faults it survives."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

import convgrad
from app.http.sockets import listen
from tests.app.bare import connected, replies
from tests.app.samples import FRAMES, LONG, SMALL, frames, parts, post, read, same_bits
from tests.live import LiveService, running_service

pytestmark = pytest.mark.heavy


def children(pid: int) -> set[int]:
    """Return all descendants of a process."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            found |= {child} | children(child)
    return found


def alive(pid: int) -> bool:
    """Return whether a process is running; a zombie is not."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


@pytest.fixture
def own() -> Iterator[LiveService]:
    """A service that the test may stop."""
    with running_service("--workers", "2", "--drain-s", "60") as service:
        yield service


def interrupt_twice(service: LiveService, first: signal.Signals, second: signal.Signals) -> set[int]:
    """Send two signals, the second when the first has been handled; return the processes that were its children."""
    below = children(service.pid)
    service.process.send_signal(first)
    while httpx.get(f"{service.url}/readyz").json()["status"] != "draining":
        pass  # the signal has not been handled yet
    service.process.send_signal(second)
    return below


def assert_ended_quietly(service: LiveService, below: set[int]) -> None:
    """Check the exit status, that the log has no traceback, and that nothing is left."""
    assert service.process.wait(30) == 0
    assert not [pid for pid in below if alive(pid)]
    while not any("Finished server process" in line for line in service.log):
        pass  # the log is read in a thread
    assert not [line for line in service.log if "Traceback" in line or "ERROR" in line]
    assert sum("stopping at once" in line for line in service.log) < 2


def test_the_second_signal_ends_a_stream(own: LiveService) -> None:
    """A second SIGTERM does not wait for the running call: its stream ends with an error."""
    with httpx.Client(base_url=own.url, timeout=60) as http:
        files, headers = parts(LONG, LONG.floats(), reference=True), {"accept": FRAMES}
        with http.stream("POST", f"/v1/ops/{LONG.op}", files=files, headers=headers) as running:
            stream = running.iter_raw()
            got = next(stream)
            below = interrupt_twice(own, signal.SIGTERM, signal.SIGTERM)
            got += b"".join(stream)
    last = list(frames(got))[-1][0]
    assert (last["type"], last["code"]) == ("error", "shutting_down")
    assert_ended_quietly(own, below)


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_two_interrupts_during_a_call(own: LiveService, first: signal.Signals) -> None:
    """The client of a running call gets 503, one line of the log says what happened, and no process is left."""
    files = parts(LONG, LONG.floats(), reference=True)
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(httpx.post, f"{own.url}/v1/ops/{LONG.op}", files=files, timeout=60)
        while "\nconvgrad_calls_open 1.0\n" not in httpx.get(f"{own.url}/metrics").text:
            pass
        below = interrupt_twice(own, first, signal.SIGINT)
        reply = running.result()
    assert (reply.status_code, reply.json()["code"], reply.headers["retry-after"]) == (503, "shutting_down", "5")
    assert_ended_quietly(own, below)
    assert sum("stopping at once: 1 calls fail" in line for line in own.log) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_while_the_service_is_imported(number: signal.Signals) -> None:
    """A signal before anything listens ends the process as by default, with a line and without a traceback."""
    code = (
        "import builtins, runpy, signal; found = builtins.__import__\n"
        "def interrupted(name, *rest, **more):\n"
        f"    if name == 'uvicorn': signal.raise_signal({int(number)})\n"
        "    return found(name, *rest, **more)\n"
        "builtins.__import__ = interrupted; runpy.run_module('app', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (-number, f"ended by {number.name}\n")


def test_while_kernels_are_compiled(tmp_path: Path) -> None:
    """Each API says how far it is and when to try again; two interrupts end the service quietly."""
    with running_service("--workers", "1", wait=False, NUMBA_CACHE_DIR=str(tmp_path)) as service:
        assert service.listens.wait(60)
        with httpx.Client(base_url=service.url, timeout=60) as http:
            problem = http.post(f"/v1/ops/{SMALL.op}", json={})
            call = {"jsonrpc": "2.0", "id": 1, "method": SMALL.op, "params": {}}
            rpc = http.post("/rpc", json=call).json()["error"]
            inference = http.post(f"/v2/models/{SMALL.op}/infer", json={})
            pages = [http.get(path) for path in ("/readyz", "/v2/health/ready", f"/v2/models/{SMALL.op}/ready")]
        with convgrad.Client(service.url, retry=None) as client, pytest.raises(convgrad.Overloaded) as raised:
            client.run(SMALL.op, SMALL.inputs(), SMALL.attributes())
        found = problem.json()
        assert (problem.status_code, found["title"], found["code"]) == (503, "Starting", "overloaded")
        errors = [found, rpc["data"], raised.value.data]
        said = [found["detail"], rpc["message"], inference.json()["error"], str(raised.value)]
        headers = [int(reply.headers["retry-after"]) for reply in (problem, inference, *pages)]
        assert [text for text in said if not re.search(r"is starting: \d+ % of its kernels", text)] == []
        assert all(error["reason"] == "starting" and 0 <= error["progress"] < 1 for error in errors)
        assert all(1 <= seconds <= 30 for seconds in [*headers, *(error["retry_after"] for error in errors)])
        assert headers[0] == math.ceil(found["retry_after"])
        below = children(service.pid)
        service.process.send_signal(signal.SIGINT)
        service.process.send_signal(signal.SIGINT)
        assert_ended_quietly(service, below)


def test_what_the_drain_does_not_wait_for_is_answered() -> None:
    """When the drain time is over, running calls and requests that are still arriving get 503 `shutting_down`."""
    with (
        running_service("--workers", "1", "--drain-s", "0") as service,
        httpx.Client(base_url=service.url, timeout=60) as client,
        ThreadPoolExecutor(1) as thread,
        connected(service.url) as slow,
    ):
        slow.sendall(f"POST /v1/ops/{SMALL.op} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n".encode())
        slow.sendall(b"content-type: application/json\r\n\r\n{")
        for pid in children(service.pid):
            if not children(pid):
                os.kill(pid, signal.SIGSTOP)
        running = thread.submit(post, client, LONG, LONG.inputs())
        while "\nconvgrad_calls_open 1.0\n" not in httpx.get(f"{service.url}/metrics").text:
            pass
        service.process.send_signal(signal.SIGTERM)
        call = running.result()
        assert (call.status_code, call.json()["code"], call.headers["retry-after"]) == (503, "shutting_down", "5")
        ((status, upload),) = replies(slow, 1)
        assert (status, json.loads(upload)["code"]) == (503, "shutting_down")
        assert service.process.wait(30) == 0
        assert not [line for line in service.log if "Traceback" in line]


def test_a_unix_socket(tmp_path: Path) -> None:
    """With --uds the service listens on that socket, and nowhere else."""
    path = tmp_path / "convgrad.sock"
    with running_service("--uds", str(path)) as service:
        assert service.url == f"unix:{path}"
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(transport=transport, base_url="http://localhost", timeout=60) as http:
            inputs = SMALL.inputs()
            assert same_bits(read(post(http, SMALL, inputs)), SMALL.expected(inputs))


@pytest.mark.parametrize(("mask", "mode"), [(0o000, 0o660), (0o022, 0o640), (0o007, 0o660), (0o077, 0o600)])
def test_only_owner_and_group_may_open_the_socket(tmp_path: Path, mask: int, mode: int) -> None:
    """The umask decides whether the group may connect; nobody else can, at no time, whatever was there before."""
    path, before = tmp_path / "convgrad.sock", os.umask(mask)
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    path.chmod(0o666)
    try:
        (listener,) = listen("", 0, path)
    finally:
        os.umask(before)
    with listener:
        assert stat.S_IMODE(path.stat().st_mode) == mode


def is_alive_at(path: Path) -> bool:
    """Return whether a service answers on a Unix socket."""
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path))) as http:
        return http.get("http://any.example/healthz").status_code == 200


def test_a_second_service_does_not_take_the_socket_away(tmp_path: Path) -> None:
    """A Unix socket on which a service answers is not taken over; one that was left behind is replaced."""
    path = tmp_path / "convgrad.sock"
    flags = ["--uds", str(path), "--workers", "1"]
    with running_service(*flags) as service:
        command = [sys.executable, "-m", "app", *flags]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode not in (0, 2)
        assert f"another process listens on the Unix socket {path}" in done.stderr
        assert is_alive_at(path)
        service.process.kill()
        service.process.wait()
    assert path.is_socket()
    with running_service(*flags):
        assert is_alive_at(path)


def test_two_listeners_shut_down_cleanly() -> None:
    """A host with two addresses gets two listeners, and SIGTERM ends the service with status 0."""
    with running_service("--host", "", "--public", "true", "--workers", "1") as service:
        service.process.send_signal(signal.SIGTERM)
        assert service.process.wait(60) == 0
    assert sum("listening on" in line for line in service.log) == 2
    assert not [line for line in service.log if "Traceback" in line or "Error" in line]


def test_json_logs_have_the_request() -> None:
    """With --log-format json each line is an object; a request's line has its id, address, status and outcome.

    A proxy on this machine may set the caller's address; other callers may not.
    """
    elsewhere = httpx.HTTPTransport(local_address="127.0.0.2")
    with running_service("--workers", "1", "--log-format", "json") as service:
        for name, transport in (("proxy", None), ("caller", elsewhere)):
            with httpx.Client(base_url=service.url, transport=transport, timeout=60) as http:
                http.post("/v1/ops/none", headers={"x-request-id": name, "x-forwarded-for": "203.0.113.9"})
    found = {line.get("request_id"): line for line in map(json.loads, service.log)}
    assert (found["proxy"]["status"], found["proxy"]["outcome"]) == (404, "unknown_operation")
    assert (found["proxy"]["address"], found["caller"]["address"]) == ("203.0.113.9", "127.0.0.2")
