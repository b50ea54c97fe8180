"""What the parts of `app/http` do that uvicorn could do in their place: with and without each.

    python -m benchmarks.without [--rounds 3] [--only PART]

For each part, two services run: one as it is, one with uvicorn's own way in place of the part. Both are asked in turn:
the latency of one caller of a tiny and of a large call, and the throughput of four callers. For the upload slots there
are many large calls at once; for pipelining, connections with thousands of requests each.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from contextlib import ExitStack
from urllib.parse import urlsplit

import app.__main__ as service_main
from app.http import protocol
from app.intake import lease
from benchmarks.overload import flood, large_call
from benchmarks.service_cases import APIS, CASES, Wire
from benchmarks.service_load import Connection, latencies, throughput
from tests.live import LiveService, running_service

__all__ = ["PARTS", "main"]

PARTS = ("direct_body", "upload_slots", "pipelining")

_LARGE_CALLS, _LARGE_MIB = 200, 16
_CONNECTIONS, _LINE = 20, b"GET /v1/ops HTTP/1.1\r\nhost: localhost\r\n"
_PIPELINED = 5_999 * (_LINE + b"\r\n") + _LINE + b"connection: close\r\n\r\n"
"""A quarter of a megabyte, which one read may bring."""


def take_out(part: str) -> None:
    """Replace a part in this process by what uvicorn has."""
    if part == "direct_body":
        protocol.LARGE = 1 << 60  # type: ignore[attr-defined] # imported there
    elif part == "upload_slots":
        lease.LARGE = 1 << 60
    elif part == "pipelining":
        protocol.MAX_WAITING = 1 << 60


def _request(api: str, case: str) -> Wire:
    chosen = next(each for each in APIS if each.name == api)
    return chosen.build(next(each for each in CASES if each.name == case))


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
    flags = "--connections", "2000"
    for part in given.only or PARTS:
        with (
            running_service(*flags) as whole,
            running_service(*flags, module="benchmarks.without", BENCHMARKS_WITHOUT=part) as lacking,
        ):
            services = {f"with {part}": whole, f"without {part}": lacking}
            _compare_calls(services, given.rounds)
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
