"""How a service hands its calls over to other replicas when it starts and stops."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from tests.app.resident import resident_service
from tests.app.samples import LONG, SMALL, post, read, same_bits
from tests.deploy.replicas import free_ports
from tests.faults.leaving import prepared
from tests.live import LiveService, running_service

pytestmark = pytest.mark.heavy


@contextmanager
def running_long(client: httpx.Client) -> Iterator[Iterator[bytes]]:
    """Start a call that takes seconds; the value yields the rest of its reply."""
    call = prepared("rest events", LONG)
    with client.stream("POST", call.path, content=call.content, headers=call.headers) as reply:
        stream = reply.iter_raw()
        next(stream)
        yield stream


def drain(service: LiveService, operator: httpx.Client) -> None:
    """Send SIGTERM and wait until the service says that it drains."""
    service.process.send_signal(signal.SIGTERM)
    while operator.get("/readyz").json()["status"] != "draining":
        pass  # the signal has not been handled yet


def test_connections_are_refused_while_draining() -> None:
    """With listen_when_ready a drain refuses connections, and serves those that are open."""
    ports = free_ports(1)
    flags = ("--workers", "1", "--listen-when-ready", "true", "--ops-port", str(ports[0]))
    with (
        running_service(*flags) as service,
        httpx.Client(base_url=f"http://127.0.0.1:{ports[0]}", timeout=60) as operator,
        httpx.Client(base_url=service.url, timeout=60) as open_one,
        httpx.Client(base_url=service.url, timeout=60) as caller,
    ):
        assert open_one.get("/readyz").status_code == 200
        with running_long(caller) as rest:
            drain(service, operator)
            while accepts(service.url):
                pass  # the listener closes a moment later
            inputs = SMALL.inputs()
            late = post(open_one, SMALL, inputs)
            assert late.headers["connection"] == "close"
            assert same_bits(read(late), SMALL.expected(inputs))
            assert b'"result"' in b"".join(rest)
        assert service.process.wait(20) == 0


def accepts(url: str) -> bool:
    """Return whether connections are accepted there."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    with socket.socket() as sock:
        return sock.connect_ex((host, int(port))) == 0


def answers(service: LiveService, operator: httpx.Client) -> None:
    """Wait until the ops port accepts connections; retries of httpx would sleep through the start."""
    while not accepts(str(operator.base_url).rstrip("/")):
        assert service.process.poll() is None


def test_connections_are_refused_while_starting() -> None:
    """With listen_when_ready a connection is refused until a worker is ready; the ops port answers before."""
    main, ops = free_ports(2)
    flags = ("--port", str(main), "--ops-port", str(ops), "--listen-when-ready", "true")
    url = f"http://127.0.0.1:{main}"
    seen = []
    with (
        running_service(*flags, wait=False) as service,
        httpx.Client(base_url=f"http://127.0.0.1:{ops}", timeout=60) as operator,
    ):
        answers(service, operator)
        while (said := operator.get("/readyz")).status_code == 503:
            status = said.json()["status"]
            open_before = accepts(url)
            if operator.get("/readyz").json()["status"] == "starting":  # before and after
                seen.append((status, open_before))
        assert service.ready.wait(60)
        assert accepts(url)
    assert set(seen) == {("starting", False)}


def test_a_drain_that_waits_for_nothing_fails_nothing() -> None:
    """A request that arrives on an open connection after the drain is computed, as a proxy can't send it elsewhere."""
    with resident_service(workers=1) as resident, httpx.Client(base_url=resident.url, timeout=60) as http:
        resident.run(resident.service.drain(10))
        assert post(http, SMALL, SMALL.inputs()).status_code == 200


def test_a_drain_before_the_start_is_over(tmp_path_factory: pytest.TempPathFactory) -> None:
    """With listen_when_ready a service that is stopped before it listens exits with status 0."""
    (ops,) = free_ports(1)
    flags = ("--ops-port", str(ops), "--listen-when-ready", "true", "--log-format", "json")
    cache = str(tmp_path_factory.mktemp("cache"))  # empty, so that the start takes long
    with (
        running_service(*flags, wait=False, NUMBA_CACHE_DIR=cache) as service,
        httpx.Client(base_url=f"http://127.0.0.1:{ops}", timeout=60) as operator,
    ):
        answers(service, operator)
        assert operator.get("/readyz").json()["status"] == "starting"
        service.process.send_signal(signal.SIGTERM)
        assert service.process.wait(20) == 0
    assert not [line for line in service.log if "listening on" in json.loads(line)["message"]]
