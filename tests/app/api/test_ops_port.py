"""Health and metrics on a separate port, on the real service."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from urllib.parse import urlsplit

import httpx
import pytest

from tests.app.samples import FRAMES, LONG, NPY, SMALL, digest, parts, post, read, same_bits
from tests.live import LiveService, running_service

pytestmark = pytest.mark.heavy

KEY = "cg_the-key-of-the-operators-test"


def where(service: LiveService) -> str:
    """Return the operators' address from the log."""
    (found,) = re.findall(r"health and metrics at (\S+)", "".join(service.log))
    return str(found)


def address_of(url: str) -> tuple[str | None, int | None]:
    """Return host and port of a URL."""
    parts = urlsplit(url)
    return parts.hostname, parts.port


def test_operators_need_no_key_and_callers_do() -> None:
    """Health and metrics need no key on their port, which has no other page; on the main port /metrics needs one."""
    flags = ("--workers", "1", "--ops-port", "0")
    with running_service(*flags, CONVGRAD_KEYS=f"tester {digest(KEY)}") as service, httpx.Client(timeout=60) as http:
        ops = where(service)
        assert ops.startswith("http://127.0.0.1:")
        with httpx.Client(base_url=service.url, headers={"x-api-key": KEY}, timeout=60) as caller:
            inputs = SMALL.inputs()
            assert same_bits(read(post(caller, SMALL, inputs, NPY)), SMALL.expected(inputs))
            assert caller.get("/metrics").status_code == 200
        for page in ("/healthz", "/readyz"):
            assert http.get(ops + page).json() == http.get(service.url + page).json()
            assert http.head(ops + page).status_code == 200
        assert "convgrad_ready 1.0" in http.get(f"{ops}/metrics").text
        assert http.get(f"{service.url}/metrics").status_code == 401
        for page in ("/", "/docs", "/openapi.json", "/v1/ops", "/v2/health/live"):
            assert http.get(ops + page).status_code == 404
        assert http.post(f"{ops}/metrics", content=bytes(1 << 20)).status_code == 405
        assert http.post(f"{ops}/rpc", headers={"x-api-key": KEY}, json={}).status_code == 404


def test_operators_see_the_whole_drain() -> None:
    """From the start of the drain until after the main port closes /readyz is 503 on this port, which closes last."""
    with (
        running_service("--workers", "2", "--ops-port", "0", "--drain-s", "0.5") as service,
        httpx.Client(base_url=where(service), timeout=60) as operator,
        httpx.Client(base_url=service.url, timeout=60) as caller,
    ):
        assert operator.get("/readyz").status_code == 200
        files, headers = parts(LONG, LONG.floats(), reference=True), {"accept": FRAMES}
        with caller.stream("POST", f"/v1/ops/{LONG.op}", files=files, headers=headers) as running:
            next(running.iter_raw())
            service.process.send_signal(signal.SIGTERM)
            while (ready := operator.get("/readyz")).status_code == 200:
                pass  # the signal has not been handled yet
            assert ready.json()["status"] == "draining"
            while not closed(service.url):
                pass  # the drain time is not over yet
            assert operator.get("/readyz").status_code == 503  # the call continues during uvicorn's own timeout
            assert "convgrad_ready 0.0" in operator.get("/metrics").text
            service.process.send_signal(signal.SIGTERM)
            assert service.process.wait(20) == 0
        assert closed(where(service))


def closed(url: str) -> bool:
    """Return whether no connection is accepted there."""
    with socket.socket() as sock:
        return sock.connect_ex(address_of(url)) != 0


def test_a_port_that_is_taken_is_explained(service: LiveService) -> None:
    """The program exits with status 2 and without a traceback."""
    command = [sys.executable, "-m", "app", "--port", "0", "--ops-port", service.url.rpartition(":")[2]]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, "in use" in done.stderr, "Traceback" in done.stderr) == (2, True, False)
