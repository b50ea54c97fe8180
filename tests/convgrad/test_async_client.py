"""The asyncio client against a real HTTP server: the same guarantees, with `await`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

import convgrad
from convgrad import AsyncClient, Progress, Tile
from tests.convgrad.conftest import QUICK
from tests.convgrad.server import SRC, Handler, Received, Server, UnixServer, busy, cut, free_port, hang_up, running

T = TypeVar("T")


@asynccontextmanager
async def client_of(server: Server | UnixServer, **options: Any) -> AsyncIterator[AsyncClient]:
    """Connect to a server, with short waits between attempts."""
    async with AsyncClient(server.url, retry=QUICK, **options) as client:
        yield client


def using(server: Server, use: Callable[[AsyncClient], Awaitable[T]]) -> T:
    """Run one coroutine with a client of the server; return its result."""

    async def run() -> T:
        async with client_of(server) as client:
            return await use(client)

    return asyncio.run(run())


def test_calls_run_side_by_side(server: Server) -> None:
    """One client can run several calls at a time."""

    async def use(client: AsyncClient) -> list[np.ndarray[Any, Any]]:
        return await asyncio.gather(*(client.run("Op", {"src": SRC + number}) for number in range(5)))

    for number, result in enumerate(using(server, use)):
        np.testing.assert_array_equal(result, SRC + number)


def test_stream(server: Server) -> None:
    """`async for` yields the events and `await` returns the result, even after leaving the loop early."""

    async def use(client: AsyncClient) -> None:
        async with client.stream("Op", {"src": SRC}) as stream:
            events = [event async for event in stream]
            assert [type(event) for event in events] == [Progress, Tile, Progress, Tile]
            np.testing.assert_array_equal(await stream.result(), SRC)
        async with client.stream("Op", {"src": SRC}) as stream:
            async for _ in stream:
                break
            assert (await stream.details()).stats == {"tiles": 2}

    using(server, use)


def test_pages_and_health(server: Server) -> None:
    """Lists, tables, validation and health work as in the blocking client."""
    server.script += [
        lambda handler, _: handler.reply(200, b'[{"op": "Op"}]'),
        lambda handler, _: handler.reply(200, b'{"name": "Op"}'),
        lambda handler, _: handler.reply(200, b'{"resolved": {}}'),
        lambda handler, _: handler.reply(503, b'{"status": "starting"}'),
        lambda handler, _: handler.reply(503, b'{"status": "starting"}'),
        lambda handler, _: handler.reply(200, b'{"status": "ready"}'),
    ]

    async def use(client: AsyncClient) -> None:
        assert await client.operations() == [{"op": "Op"}]
        assert await client.describe("Op") == {"name": "Op"}
        assert await client.validate("Op", {"src": SRC}) == {"resolved": {}}
        assert (await client.health()).detail["status"] == "starting"
        assert (await client.wait_until_ready(5)).ready

    using(server, use)


@pytest.mark.parametrize("step", [busy, hang_up, cut])
def test_transient_errors_are_retried(server: Server, step: Any) -> None:
    """Temporary rejections, broken connections and replies that break off are retried."""
    server.script += [step, step]
    np.testing.assert_array_equal(using(server, lambda client: client.run("Op", {"src": SRC})), SRC)
    assert len(server.received) == 3


def test_no_service_is_connect_failed() -> None:
    """Without a service a call raises `ConnectFailed`, and waiting `TimedOut`."""

    async def use() -> None:
        async with AsyncClient(f"http://127.0.0.1:{free_port()}", retry=QUICK) as client:
            with pytest.raises(convgrad.ConnectFailed):
                await client.run("Op", {"src": SRC})
            with pytest.raises(convgrad.TimedOut):
                await client.wait_until_ready(0.01)

    asyncio.run(use())


def test_unix_socket(tmp_path: Path) -> None:
    """`uds` reaches a service behind a Unix socket."""
    server = UnixServer(tmp_path / "s")

    async def use() -> None:
        async with client_of(server, uds=tmp_path / "s") as client:
            np.testing.assert_array_equal(await client.run("Op", {"src": SRC}), SRC)

    with running(server):
        asyncio.run(use())


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

    using(server, use)
