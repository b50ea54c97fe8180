"""The real application on a real socket inside the test's process, so that tests can inspect it."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn
import uvloop

from app.calls.service import Service
from app.http.protocol import SLOW_S, HttpProtocol
from app.main import create_app
from app.settings import Settings

__all__ = ["Resident", "resident_service"]

_WAIT_S = 60.0


@dataclass
class Resident:
    """A service in this process: its address, its event loop, and the service object."""

    url: str
    loop: asyncio.AbstractEventLoop
    service: Service
    connections: set[Any]
    """The protocols of the open connections."""

    def run(self, work: Coroutine[Any, Any, Any], timeout: float = _WAIT_S) -> Any:
        """Run a coroutine on the service's loop; return its result."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout)

    def until(self, condition: Callable[[], bool], timeout: float = 10.0) -> None:
        """Wait until a condition holds on the service's loop; it is checked there every millisecond."""

        async def look() -> None:
            async with asyncio.timeout(timeout):
                while not condition():  # noqa: ASYNC110 - the point is to look from outside
                    await asyncio.sleep(0.001)

        self.run(look(), timeout + 5)

    def is_idle(self) -> bool:
        """Return whether no worker has a unit."""
        return all(worker["unit"] is None for worker in self.service.engine.snapshot()["workers"])

    def cancelled(self) -> float:
        """Return how many calls ended because nobody waited for them any more."""
        page = httpx.get(f"{self.url}/metrics").text
        return sum(float(each) for each in re.findall(r'convgrad_calls_total{.*outcome="cancelled"} (.*)', page))


@contextmanager
def resident_service(slow_s: float = SLOW_S, **settings: Any) -> Iterator[Resident]:
    """Run the application with these settings until the block ends; yields when it is ready."""
    app = create_app(Settings(port=0, **settings), slow_s)
    protocol: Any = type("HttpProtocol", (HttpProtocol,), {"slow_s": slow_s})
    config = uvicorn.Config(app, port=0, loop="uvloop", http=protocol, log_config=None, lifespan="on")
    server = uvicorn.Server(config)
    started = threading.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        serving = asyncio.create_task(server.serve())
        while not server.started and not serving.done():  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.005)
        started.set()
        await serving

    def run() -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve())

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert started.wait(_WAIT_S)
        port = server.servers[0].sockets[0].getsockname()[1]
        resident = Resident(f"http://127.0.0.1:{port}", loops[0], app.state.service, server.server_state.connections)
        resident.until(lambda: app.state.service.engine.ready, 280.0)
        yield resident
    finally:
        server.should_exit = True
        thread.join()
