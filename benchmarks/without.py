"""What the parts of `app/http` do that uvicorn could do in their place: with and without each.

    python -m benchmarks.without [--rounds 3] [--only PART]

For each part, two services run: one as it is, one with uvicorn's own way in place of the part. Both are asked in turn:
the latency of one caller of a tiny and of a large call, and the throughput of four callers. For the listener there is a
flood of tiny calls at once, each over a connection of its own; for the timeouts, connections that begin a request and
never complete it; for the upload slots, many large calls at once; for pipelining, connections with thousands of
requests each.
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
from starlette.types import Message

import app.__main__ as service_main
from app.http import exchange, protocol
from app.intake import lease
from benchmarks.overload import flood, large_call
from benchmarks.service_cases import APIS, CASES, Wire
from benchmarks.service_load import Connection, latencies, throughput
from tests.live import LiveService, running_service

__all__ = ["PARTS", "main"]

PARTS = ("listener", "direct_body", "timeouts", "upload_slots", "pipelining")

_SLOW_S, _HALF, _LATER_S, _AT_ONCE, _AGAIN_S = 5, 500, 8, 1000, 8.0
_LARGE_CALLS, _LARGE_MIB = 200, 16
_CONNECTIONS, _LINE = 20, b"GET /v1/ops HTTP/1.1\r\nhost: localhost\r\n"
_PIPELINED = 5_999 * (_LINE + b"\r\n") + _LINE + b"connection: close\r\n\r\n"
"""A quarter of a megabyte, which one read may bring."""


def take_out(part: str) -> None:
    """Replace a part in this process by what uvicorn has."""
    if part == "direct_body":
        protocol.LARGE = 1 << 60  # type: ignore[attr-defined] # imported there
    elif part == "upload_slots":
        lease.LARGE = 1 << 60  # type: ignore[attr-defined] # imported there
    elif part == "pipelining":
        protocol.MAX_WAITING = 1 << 60
    elif part == "listener":
        service_main.Server.startup = _startup  # type: ignore[method-assign]
    elif part == "timeouts":
        exchange.Exchange._receive_in_time = _receive  # type: ignore[method-assign]
        protocol.HttpProtocol._arm_head_timer = lambda _: None  # type: ignore[method-assign,assignment]


async def _startup(self: service_main.Server, sockets: list[socket.socket] | None = None) -> None:
    self._loop = asyncio.get_running_loop()
    await uvicorn.Server.startup(self, sockets)
    for each in self.servers[0].sockets:
        self._addresses.append(f"http://127.0.0.1:{each.getsockname()[1]}")
        service_main._log.info("listening on %s", self._addresses[-1])


async def _receive(self: exchange.Exchange) -> Message:
    return await self._receive()


def _request(api: str, case: str) -> Wire:
    chosen = next(each for each in APIS if each.name == api)
    return chosen.build(next(each for each in CASES if each.name == case))


def _half_open(service: LiveService) -> int:
    """Send the beginning of a request over many connections; return how many are still open a while later."""
    with ExitStack() as stack:
        address = "127.0.0.1", _port(service)
        clients = [stack.enter_context(socket.create_connection(address)) for _ in range(_HALF)]
        for client in clients:
            client.sendall(b"POST /v1/ops")
        time.sleep(_LATER_S)
        return sum(map(_is_open, clients))


def _is_open(client: socket.socket) -> bool:
    client.setblocking(False)
    try:
        client.recv(1)  # closed, or answered and closed
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def _port(service: LiveService) -> int:
    return int(urlsplit(service.url).port or 0)


def _compare_calls(services: dict[str, LiveService], rounds: int) -> None:
    """Print the latency of one caller and the throughput of four; short runs take turns, for the machine may change."""
    tiny, large = _request("/v1 JSON", "tiny"), _request("multipart to npy", "large")
    alone, slow, rates = (dict[str, list[float]]((name, []) for name in services) for _ in range(3))
    with ExitStack() as stack:
        connections = {
            name: [stack.enter_context(Connection(_port(service))) for _ in range(4)]
            for name, service in services.items()
        }
        for one, *_ in connections.values():
            latencies(lambda: one.call(tiny), 300)  # noqa: B023 - called at once
        for _ in range(10 * rounds):
            for name, several in connections.items():
                one = several[0]
                alone[name] += latencies(lambda: one.call(tiny), 100)  # noqa: B023 - called at once
                slow[name] += latencies(lambda: one.call(large), 3)  # noqa: B023 - called at once
                count, seconds = throughput([lambda each=each: each.call(tiny) for each in several], 0.3)  # type: ignore[misc]
                rates[name].append(count / seconds)
    for name in services:
        micros, millis = 1e6 * statistics.median(alone[name]), 1e3 * statistics.median(slow[name])
        rate = statistics.median(rates[name])
        print(f"{name}: tiny call {micros:.0f} us, large {millis:.1f} ms, four callers {rate:.0f} calls/s", flush=True)


def main() -> None:
    """Measure with and without each part."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=PARTS, action="append")
    given = parser.parse_args()
    flags = "--slow-s", str(_SLOW_S), "--connections", "2000"
    crowd = b"".join(_request("/v1 JSON", "tiny").pieces).replace(b"\r\n", b"\r\nconnection: close\r\n", 1)
    for part in given.only or PARTS:
        with (
            running_service(*flags) as whole,
            running_service(*flags, module="benchmarks.without", BENCHMARKS_WITHOUT=part) as lacking,
        ):
            services = {f"with {part}": whole, f"without {part}": lacking}
            _compare_calls(services, given.rounds)
            for _ in range(given.rounds if part == "listener" else 0):
                for name, each in services.items():
                    found = flood(each, _AT_ONCE, crowd, _AGAIN_S, anew=True)
                    print(f"{name}: {_AT_ONCE} clients that call again at once: {found}", flush=True)
            for _ in range(given.rounds if part == "upload_slots" else 0):
                for name, each in services.items():
                    found = flood(each, _LARGE_CALLS, large_call(_LARGE_MIB))
                    print(f"{name}: {_LARGE_CALLS} calls of {_LARGE_MIB} MiB at once: {found}", flush=True)
            for name, each in services.items() if part == "pipelining" else ():
                found = flood(each, _CONNECTIONS, _PIPELINED, anew=True)
                print(f"{name}: {_CONNECTIONS} connections with 6,000 requests: {found}", flush=True)
            for name, each in services.items() if part == "timeouts" else ():
                print(f"{name}: {_half_open(each)} of {_HALF} begun requests are open after {_LATER_S} s", flush=True)


if __name__ == "__main__":
    if part := os.environ.get("BENCHMARKS_WITHOUT"):
        take_out(part)
        sys.exit(service_main.main())
    main()
