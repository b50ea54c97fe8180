"""What the parts of `app/http` do that uvicorn could do in their place: the service with and without each.

    python -m benchmarks.without [--rounds 3] [--only PART]

For each part, two services run: one as it is, one with uvicorn's own way in place of the part. They are measured in
turn, round after round: the latency of one caller of a tiny and of a large call, the throughput of four callers, a
flood of small calls at once, each over a connection of its own, and how many connections that send half a request are
still open after a while.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import statistics
import sys
import time
from contextlib import ExitStack
from urllib.parse import urlsplit

import uvicorn
from starlette.types import Receive, Scope, Send

import app.__main__ as service_main
from app.http import cork, direct_body, timeouts
from benchmarks.overload import flood
from benchmarks.service_cases import APIS, CASES, Wire
from benchmarks.service_load import Connection, latencies, throughput
from tests.live import LiveService, running_service

__all__ = ["PARTS", "main"]

PARTS = ("listener", "direct_body", "cork", "timeouts")

_SLOW_S, _HALF, _LATER_S = 5, 500, 8


def take_out(part: str) -> None:
    """Replace a part in this process by what uvicorn has."""
    if part == "cork":
        del cork.CorkProtocol.on_headers_complete
    elif part == "direct_body":
        direct_body._LEAST = 1 << 60
    elif part == "listener":
        service_main.Server.startup = _startup  # type: ignore[method-assign]
    elif part == "timeouts":
        timeouts.Timeouts.__call__ = _pass_on  # type: ignore[method-assign]
        timeouts.TimeoutProtocol._wait = lambda _: None  # type: ignore[method-assign,assignment]


async def _startup(self: service_main.Server, sockets: list[socket.socket] | None = None) -> None:
    self._loop = asyncio.get_running_loop()
    await uvicorn.Server.startup(self, sockets)
    for each in self.servers[0].sockets:
        service_main._log.info("listening on http://127.0.0.1:%d", each.getsockname()[1])


async def _pass_on(self: timeouts.Timeouts, scope: Scope, receive: Receive, send: Send) -> None:
    await self._app(scope, receive, send)


def _request(api: str, case: str) -> Wire:
    chosen = next(each for each in APIS if each.name == api)
    return chosen.build(next(each for each in CASES if each.name == case))


def _half_open(port: int) -> int:
    """Send half a request over many connections; return how many are still open a while later."""
    with ExitStack() as stack:
        clients = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(_HALF)]
        for client in clients:
            client.sendall(b"POST /v1/ops/ConvTranspose HTTP/1.1\r\nhost: 127.0.0.1\r\n")
        time.sleep(_LATER_S)
        return sum(map(_is_open, clients))


def _is_open(client: socket.socket) -> bool:
    client.setblocking(False)
    try:
        return bool(client.recv(1))
    except BlockingIOError:
        return True
    except OSError:
        return False


def measure(service: LiveService) -> str:
    """Measure one service and describe it in one line."""
    port = int(urlsplit(service.url).port or 0)
    tiny, large = _request("/v1 JSON", "tiny"), _request("multipart to npy", "large")
    with ExitStack() as stack:
        one, *others = [stack.enter_context(Connection(port)) for _ in range(5)]
        latencies(lambda: one.call(tiny), 200)
        alone = statistics.median(latencies(lambda: one.call(tiny), 1000))
        slow = statistics.median(latencies(lambda: one.call(large), 12))
        count, seconds = throughput([lambda each=each: each.call(tiny) for each in others], 2.0)  # type: ignore[misc]
    crowd = flood(service, 4000, b"".join(tiny.pieces).replace(b"\r\n", b"\r\nconnection: close\r\n", 1))
    return (
        f"tiny {1e6 * alone:.0f} us, large {1e3 * slow:.1f} ms, four callers {count / seconds:.0f} calls/s; "
        f"4,000 at once: {crowd}; {_half_open(port)} of {_HALF} half requests open after {_LATER_S} s"
    )


def main() -> None:
    """Measure with and without each part."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=PARTS, action="append")
    given = parser.parse_args()
    flags = "--slow-s", str(_SLOW_S), "--connections", "2000"
    for part in given.only or PARTS:
        with (
            running_service(*flags) as whole,
            running_service(*flags, module="benchmarks.without", BENCHMARKS_WITHOUT=part) as without,
        ):
            for _ in range(given.rounds):
                print(f"with {part}: {measure(whole)}", flush=True)
                print(f"without {part}: {measure(without)}", flush=True)


if __name__ == "__main__":
    if part := os.environ.get("BENCHMARKS_WITHOUT"):
        take_out(part)
        sys.exit(service_main.main())
    main()
