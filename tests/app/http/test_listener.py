"""Connections beyond the limit on the real service: they are told why they are rejected; operators still get in."""

from __future__ import annotations

import json
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from app.http.overload import RequestStart, rejection
from app.replies.errors import problem_object
from benchmarks.startup import memory_mib
from convgrad._errors import Overloaded
from tests.app.bare import connected
from tests.app.samples import NPY, SMALL, post, read, same_bits
from tests.live import LiveService, running_service

pytestmark = pytest.mark.heavy

BOUND = 8
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
    with running_service("--workers", "1", "--connections", str(BOUND), "--slow-s", "20") as service:
        yield service


@contextmanager
def full(service: LiveService) -> Iterator[None]:
    """Use all allowed connections, with heads that never end."""
    with ExitStack() as stack:
        while held(service) < BOUND:
            stack.enter_context(connected(service.url)).sendall(b"POST /rpc HTTP/1.1\r\nhost: localhost\r\n")
        yield
    until(lambda: held(service) == 0)


def held(service: LiveService) -> float:
    """Return the number of others' connections; one of ours may still be closing at the first reads."""
    return min(gauge(service, "connections_open") for _ in range(4)) - 1


def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    limit = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.02)


def page(service: LiveService) -> str:
    """Return the metrics, read over a separate connection, which counts as open itself."""
    reply = httpx.get(f"{service.url}/metrics", timeout=30)
    assert reply.status_code == 200
    return reply.text


def gauge(service: LiveService, name: str) -> float:
    """Return the value of one metric."""
    (value,) = re.findall(rf"^convgrad_{name} (\S+)$", page(service), re.MULTILINE)
    return float(value)


def refused(service: LiveService, api: str) -> float:
    """Return how many requests to this API were rejected because of too many connections."""
    line = f'convgrad_refusals_total{{api="{api}",reason="connections"}}'
    return float((re.findall(rf"^{re.escape(line)} (\S+)$", page(service), re.MULTILINE) or [0])[0])


def right(service: LiveService) -> bool:
    """Return whether a call returns the right result."""
    inputs = SMALL.inputs()
    with httpx.Client(base_url=service.url, timeout=60) as http:
        return same_bits(read(post(http, SMALL, inputs, NPY)), SMALL.expected(inputs))


def asked(service: LiveService, path: str, length: int, more: str = "") -> tuple[str, bytes]:
    """Send a whole request without reading, then read to the end; return head and body of the answer."""
    lines = [
        f"POST {path} HTTP/1.1",
        "host: localhost",
        "content-type: application/json",
        f"content-length: {length}",
        more,
    ]
    with connected(service.url) as sock:
        sock.sendall("\r\n".join([*lines, ""]).encode() + bytes(length))
        reply = b"".join(iter(lambda: sock.recv(65536), b""))
    start, _, body = reply.partition(b"\r\n\r\n")
    return start.decode(), body


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize("length", [10, 5 << 20])
def test_rejected_clients_are_told_why(narrow: LiveService, path: str, length: int) -> None:
    """Each API answers 503 in its own form, with Retry-After, even if the client first sends all of a large body."""
    api = {"v1": "rest", "v2": "oip"}.get(path[1:3], "rpc")
    with full(narrow):
        before = refused(narrow, api)
        head, body = asked(narrow, path, length, "X-Request-ID: mine\r\n")
        assert refused(narrow, api) == before + 1
    assert head.startswith("HTTP/1.1 503 Service Unavailable\r\n")
    assert "\r\nretry-after: 1\r\n" in head
    assert "\r\nx-request-id: mine\r\n" in head
    assert "\r\nconnection: close\r\n" in head
    assert f"\r\ncontent-length: {len(body)}" in head
    assert APIS[path](json.loads(body)) == "connections"
    assert right(narrow)


def test_health_and_metrics_beyond_the_limit(narrow: LiveService) -> None:
    """Health and metrics are answered beyond the limit, once per connection; other pages are not."""
    with full(narrow), httpx.Client(base_url=narrow.url, timeout=30) as http:
        for name in ("/healthz", "/readyz", "/metrics"):
            reply = http.get(name)
            assert (reply.status_code, reply.headers.get("connection")) == (200, "close")
            assert http.head(name.replace("metrics", "healthz")).status_code == 200
        assert http.get("/v1/ops").status_code == 503
        assert http.get("/healthzz").json()["reason"] == "connections"
    assert right(narrow)


def test_a_head_that_begins_late(narrow: LiveService) -> None:
    """A connection that sends nothing at first is decided later: it is served if there is room then, or rejected."""
    with full(narrow), connected(narrow.url) as early:
        page(narrow)  # by now it has been accepted
        early.sendall(f"GET {PATH} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
        assert early.recv(100).startswith(b"HTTP/1.1 503")
    with ExitStack() as stack:
        with full(narrow):
            late = stack.enter_context(connected(narrow.url))
            page(narrow)  # by now it has been accepted
        late.sendall(f"GET {PATH} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
        assert late.recv(100).startswith(b"HTTP/1.1 200")


def test_the_oldest_silent_connections_get_an_answer() -> None:
    """If the most silent connections are open, the oldest are told why they are closed, and new ones can connect."""
    if shutil.which("prlimit") is None:
        pytest.skip("no prlimit here")
    under = ["prlimit", "--nofile=200:200"]  # a quarter of them may be waiting connections
    with running_service("--workers", "1", "--connections", str(BOUND), under=under) as service, ExitStack() as stack:
        with full(service):
            first = stack.enter_context(connected(service.url))
            for _ in range(55):
                stack.enter_context(connected(service.url))
            head, _, body = whole(first).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 503")
            assert json.loads(body)["reason"] == "connections"
        assert right(service)


def whole(connection: socket.socket) -> bytes:
    """Read until the connection is closed."""
    return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def test_idle_connections_make_room(narrow: LiveService) -> None:
    """Idle connections are closed in favour of those with a request."""
    with ExitStack() as stack:
        for _ in range(3 * BOUND):
            sock = stack.enter_context(connected(narrow.url))
            sock.sendall(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert sock.recv(100).startswith(b"HTTP/1.1 200")

        def comes_in() -> bool:
            with httpx.Client(base_url=narrow.url, timeout=30) as http:
                return http.get("/v1/ops").status_code == 200

        until(comes_in)


def test_a_flood_leaves_nothing_behind(narrow: LiveService) -> None:
    """Hundreds of large requests beyond the limit are answered; memory and descriptors are then as before."""
    descriptors = Path(f"/proc/{narrow.pid}/fd")
    if not descriptors.exists():
        pytest.skip("no /proc here")
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
            assert memory_mib(narrow.pid, "Rss") < memory + 32
        until(lambda: len([*descriptors.iterdir()]) <= open_before + 1)
    assert right(narrow)


def test_connections_reset_while_they_wait(narrow: LiveService) -> None:
    """Connections that are reset while they wait disturb nobody."""
    with full(narrow):
        for data in (b"", b"POST /rpc HTTP/1.1\r\ncontent-length: 5\r\n\r\n"):
            for _ in range(20):
                with connected(narrow.url) as sock:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                    sock.sendall(data)
    assert right(narrow)


@pytest.mark.parametrize("data", [b"", b"\x16\x03\x01", b"GET", b"POST /v1/ops/x HTTP/1.1", b"\xff" * 4096])
def test_malformed_heads_can_be_answered(data: bytes) -> None:
    """Whatever the first bytes are, they are assigned to an API and can be answered."""
    head = RequestStart(data)
    assert not head.is_probe
    assert not head.is_call
    assert rejection(head, Overloaded("full", retry_after=1, data={"reason": "x"})).startswith(b"HTTP/1.1 503 ")


CALLS = ["ops/x", "ops/x/verify", "graphs", "checks/1/submit"]


@pytest.mark.parametrize(
    "path", [*(f"/v1/{each}" for each in CALLS), "/v2/models/x/infer", "/v2/models/x/versions/1/infer"]
)
def test_every_page_that_computes_is_known_by_its_head(path: str) -> None:
    """A full service can reject each of them without reading the body."""
    assert RequestStart(f"POST {path} HTTP/1.1\r\n".encode()).is_call
    assert not RequestStart(f"GET {path} HTTP/1.1\r\n".encode()).is_call


def test_only_complete_heads_are_let_in_beyond_the_limit() -> None:
    """A head that has no end yet would occupy a place that is reserved for health and metrics."""
    requests = [(b"GET /healthz", b""), (b"GET /v2/health/ready", b""), (b"HEAD /metrics", b"host: localhost\r\n")]
    for request, fields in requests:
        lines = request + b" HTTP/1.1\r\n" + fields
        assert RequestStart(lines + b"\r\n").is_probe
        assert not RequestStart(lines).is_probe


def test_rejections_are_the_api_s_problem_objects() -> None:
    """A rejection's body is the problem object that a full request would get, with or without its own id."""
    error = Overloaded("full", retry_after=2, data={"reason": "queue", "limit": 4})
    for given in ("mine", ""):
        head = RequestStart(f"POST {PATH} HTTP/1.1\r\nX-Request-Id: {given}\r\n\r\n".encode())
        start, _, body = rejection(head, error).partition(b"\r\n\r\n")
        said = json.loads(body)
        assert said == problem_object(error, said["request_id"])
        assert f"x-request-id: {said['request_id']}\r\n" in start.decode()
        assert said["request_id"] == given or len(said["request_id"]) == 32
