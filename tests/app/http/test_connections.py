"""Connections beyond the limit on the real service: they are told why they are rejected; operators still get in."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from app.telemetry.context import api_of
from benchmarks.startup import memory_mib
from tests.app.bare import connected
from tests.app.samples import SMALL
from tests.faults.machine import right
from tests.hostile import wire
from tests.live import LiveService, running_service

pytestmark = pytest.mark.heavy

BOUND = 8
CALL = b'{"jsonrpc": "2.0", "id": 1, "method": "ops.list"}'
PATH = f"/v1/ops/{SMALL.op}"
# How to find the reason in each API's rejection.
APIS: dict[str, Callable[[dict[str, object]], object]] = {
    PATH: lambda said: said["reason"],
    "/rpc": lambda said: said["error"]["data"]["reason"],  # type: ignore[index]
    f"/v2/models/{SMALL.op}/infer": lambda said: re.sub(r".*limit.* connections.*", "connections", str(said["error"])),
}


@pytest.fixture(scope="module")
def narrow() -> Iterator[LiveService]:
    """A service that allows few connections."""
    with running_service("--workers", "1", "--connections", str(BOUND)) as service:
        yield service


@contextmanager
def full(service: LiveService) -> Iterator[None]:
    """Use all allowed connections, with heads that never end."""
    with ExitStack() as stack:
        for _ in range(BOUND):
            stack.enter_context(connected(service.url)).sendall(b"POST /rpc HTTP/1.1\r\nhost: localhost\r\n")
        until(lambda: metric(service, "connections_open") > BOUND)
        yield
    until(lambda: metric(service, "connections_open") == 1)


def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds; each look is a request."""
    limit = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < limit


def metric(service: LiveService, series: str) -> float:
    """Return the value of a metric, 0 if there is none, read over a connection that is counted itself."""
    page = httpx.get(f"{service.url}/metrics", timeout=30).text
    return float((re.findall(rf"^convgrad_{re.escape(series)} (\S+)$", page, re.MULTILINE) or ["0"])[0])


def asked(service: LiveService, path: str, length: int) -> tuple[str, bytes]:
    """Send a whole request without reading, then read to the end; return head and body of the answer."""
    with connected(service.url) as sock:
        sock.sendall(wire.request(path, CALL.ljust(length), b"x-request-id: mine", b"content-type: application/json"))
        start, _, body = wire.read_all(sock).partition(b"\r\n\r\n")
    return start.decode(), body


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize("length", [len(CALL), 5 << 20])
def test_rejected_clients_are_told_why(narrow: LiveService, path: str, length: int) -> None:
    """Each API reports the limit in its own form, even if the client first sends all of a large body."""
    refusals = f'refusals_total{{api="{api_of(path)}",reason="connections"}}'
    with full(narrow):
        before = metric(narrow, refusals)
        head, body = asked(narrow, path, length)
        assert metric(narrow, refusals) == before + 1
    if path != "/rpc":
        assert head.startswith("HTTP/1.1 503 Service Unavailable\r\n")
        assert "\r\nretry-after: 1\r\n" in head
    assert "\r\nx-request-id: mine\r\n" in head
    assert "\r\nconnection: close" in head
    assert APIS[path](json.loads(body)) == "connections"
    assert right(narrow)


def test_health_and_metrics_beyond_the_limit(narrow: LiveService) -> None:
    """Health and metrics are answered beyond the limit, once per connection; other pages are not."""
    with full(narrow), httpx.Client(base_url=narrow.url, timeout=30) as http:
        for name in ("/healthz", "/readyz", "/metrics"):
            reply = http.get(name)
            assert (reply.status_code, reply.headers.get("connection")) == (200, "close")
        assert http.get("/v1/ops").status_code == 503
        assert http.get("/healthzz").json()["reason"] == "connections"
    assert right(narrow)


def test_a_flood_leaves_nothing_behind(narrow: LiveService) -> None:
    """Hundreds of large requests beyond the limit are answered; memory and descriptors are then as before."""
    descriptors = Path(f"/proc/{narrow.pid}/fd")
    if not descriptors.exists():
        pytest.skip("no /proc here")
    assert right(narrow)  # which loads code
    with full(narrow):
        asked(narrow, PATH, 100)
        memory = memory_mib(narrow.pid, "Rss")
        open_before = len([*descriptors.iterdir()])
        with ExitStack() as stack:
            socks = [stack.enter_context(connected(narrow.url)) for _ in range(300)]
            head = f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {1 << 20}\r\n\r\n".encode()
            for sock in socks:
                sock.sendall(head + bytes(1 << 20))
            assert httpx.get(f"{narrow.url}/healthz", timeout=30).status_code == 200
            for sock in socks:
                assert sock.recv(100).startswith(b"HTTP/1.1 503")
            assert memory_mib(narrow.pid, "Rss") < memory + 64
        until(lambda: metric(narrow, "connections_open") <= BOUND + 1)
        assert len([*descriptors.iterdir()]) <= open_before + 1
    assert right(narrow)
