"""The asyncio client against a real HTTP server: what only it has, its network and cancellation."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

import convgrad
from convgrad import AsyncClient
from tests.convgrad.conftest import QUICK
from tests.convgrad.server import SRC, Handler, Received, Server, UnixServer, busy, cut, free_port, hang_up, running

T = TypeVar("T")


def using(url: str, use: Callable[[AsyncClient], Awaitable[T]], **options: Any) -> T:
    """Run one coroutine with a client of the server; return its result."""

    async def run() -> T:
        async with AsyncClient(url, retry=QUICK, **options) as client:
            return await use(client)

    return asyncio.run(run())


@pytest.mark.parametrize("step", [busy, hang_up, cut])
def test_transient_errors_are_retried(server: Server, step: Any) -> None:
    """Temporary rejections, broken connections and replies that break off are retried."""
    server.script += [step, step]
    np.testing.assert_array_equal(using(server.url, lambda client: client.run("Op", {"src": SRC})), SRC)
    assert len(server.received) == 3


def test_no_service_is_connect_failed() -> None:
    """Without a service a call raises `ConnectFailed`, and waiting `TimedOut`."""

    async def use(client: AsyncClient) -> None:
        with pytest.raises(convgrad.ConnectFailed):
            await client.run("Op", {"src": SRC})
        with pytest.raises(convgrad.TimedOut):
            await client.wait_until_ready(0.01)

    using(f"http://127.0.0.1:{free_port()}", use)


def test_unix_socket(tmp_path: Path) -> None:
    """`uds` reaches a service behind a Unix socket."""
    server = UnixServer(tmp_path / "s")
    with running(server):
        found = using(server.url, lambda client: client.run("Op", {"src": SRC}), uds=tmp_path / "s")
    np.testing.assert_array_equal(found, SRC)


def test_a_call_can_be_cancelled(server: Server) -> None:
    """A call that is cancelled while it waits for its reply raises `CancelledError`, and the client still works."""
    waiting, go_on = threading.Event(), threading.Event()

    def wait(handler: Handler, received: Received) -> None:
        waiting.set()
        go_on.wait(10)
        hang_up(handler, received)

    async def use(client: AsyncClient) -> None:
        server.script.append(wait)
        call = asyncio.ensure_future(client.run("Op", {"src": SRC}))
        await asyncio.to_thread(waiting.wait, 10)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        go_on.set()
        np.testing.assert_array_equal(await client.run("Op", {"src": SRC}), SRC)

    using(server.url, use)
