"""What the parts of `app/http` do that uvicorn could do in their place, and the cache of heads: with and without each.

    python -m benchmarks.without [--rounds 3] [--only PART]

For each part, two services run: one as it is, one with uvicorn's own way in place of the part. Both are asked in turn:
the latency of one caller of a tiny and of a large call, and the throughput of four callers. For the cache of heads the
tiny call is one of `/v2`; for the overlap of arrival and computation the large call is, and it is sent at a gigabit per
second. For the upload slots there are many large calls at once; for pipelining, connections with thousands of requests
each.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from urllib.parse import urlsplit

import app.__main__ as service_main
from app.api.oip.head_cache import HeadCache
from app.calls.tasks import RequestReceiver
from app.http import protocol
from app.intake import lease
from app.intake.requests import Arrived
from benchmarks.overload import flood, large_call
from benchmarks.service_cases import APIS, CASES, Wire
from benchmarks.service_load import Connection, latencies, throughput
from tests.live import LiveService, running_service

__all__ = ["PARTS", "main"]

PARTS = ("direct_body", "head_cache", "upload_slots", "pipelining", "overlap")

_LARGE_CALLS, _LARGE_MIB = 200, 16
_BITS_PER_S, _PIECE = 1e9, 1 << 17
_CONNECTIONS, _LINE = 20, b"GET /v1/ops HTTP/1.1\r\nhost: localhost\r\n"
_PIPELINED = 5_999 * (_LINE + b"\r\n") + _LINE + b"connection: close\r\n\r\n"
"""A quarter of a megabyte, which one read may bring."""


def take_out(part: str) -> None:
    """Replace a part in this process by what uvicorn has."""
    if part == "direct_body":
        protocol.LARGE = 1 << 60  # type: ignore[attr-defined] # imported there
    elif part == "head_cache":
        HeadCache.find = lambda *_: None  # type: ignore[method-assign]
    elif part == "upload_slots":
        lease.LARGE = 1 << 60  # type: ignore[attr-defined] # imported there
    elif part == "pipelining":
        protocol.MAX_WAITING = 1 << 60
    elif part == "overlap":
        RequestReceiver._advance = _wait_for_all  # type: ignore[method-assign]


async def _wait_for_all(self: RequestReceiver, arrived: Arrived) -> None:
    """Begin no call before its inputs are complete."""


def _request(api: str, case: str) -> Wire:
    chosen = next(each for each in APIS if each.name == api)
    return chosen.build(next(each for each in CASES if each.name == case))


def _paced(wire: Wire) -> Wire:
    """Return a request that is sent at the rate of a network."""

    def pieces() -> Iterator[memoryview]:
        start, sent = time.perf_counter(), 0
        for data in wire.pieces:
            piece = memoryview(data)
            for at in range(0, len(piece), _PIECE):
                yield piece[at : at + _PIECE]
                sent += len(piece[at : at + _PIECE])
                time.sleep(max(0.0, start + 8 * sent / _BITS_PER_S - time.perf_counter()))

    return replace(wire, pieces=pieces())  # type: ignore[arg-type] # for one call


def _port(service: LiveService) -> int:
    return int(urlsplit(service.url).port or 0)


def _compare_calls(services: dict[str, LiveService], rounds: int, part: str) -> None:
    """Print the latency of one caller and the throughput of four; short runs take turns, for the machine may change."""
    tiny = _request("/v2 binary" if part == "head_cache" else "/v1 JSON", "tiny")
    large = _request("/v2 binary" if part == "overlap" else "multipart to npy", "large")
    send = _paced if part == "overlap" else lambda wire: wire
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
                slow[name] += latencies(lambda: one.call(send(large)), 3)  # noqa: B023 - called at once
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
    flags = "--connections", "2000"
    for part in given.only or PARTS:
        with (
            running_service(*flags) as whole,
            running_service(*flags, module="benchmarks.without", BENCHMARKS_WITHOUT=part) as lacking,
        ):
            services = {f"with {part}": whole, f"without {part}": lacking}
            _compare_calls(services, given.rounds, part)
            for _ in range(given.rounds if part == "upload_slots" else 0):
                for name, each in services.items():
                    found = flood(each, _LARGE_CALLS, large_call(_LARGE_MIB))
                    print(f"{name}: {_LARGE_CALLS} calls of {_LARGE_MIB} MiB at once: {found}", flush=True)
            for name, each in services.items() if part == "pipelining" else ():
                found = flood(each, _CONNECTIONS, _PIPELINED, anew=True)
                print(f"{name}: {_CONNECTIONS} connections with 6,000 requests: {found}", flush=True)


if __name__ == "__main__":
    if part := os.environ.get("BENCHMARKS_WITHOUT"):
        take_out(part)
        sys.exit(service_main.main())
    main()
