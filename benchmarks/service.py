"""Latency and throughput of the service through each of its APIs, against other ways to serve the same gradient.

    python -m benchmarks.service [--rounds N] [--only TEXT] [--cases tiny,large] [--json OUT] [--markdown OUT]

Latency of one caller and throughput of four, for three sizes of a 3x3 float32 weight gradient. All servers run at the
same time and are called in turn, round after round. The peers' environments are created under .cache.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

import convgrad
from benchmarks.machine import describe_machine, load
from benchmarks.service_cases import APIS, ATTRIBUTES, CASES, OP, Api, Array, Case
from benchmarks.service_load import Call, Connection, latencies, throughput
from benchmarks.service_report import markdown
from benchmarks.service_servers import NotHad, PeakMemory, Server
from benchmarks.service_shared import open_bare, open_local, open_shared, open_torch

CLIENT = "Python client"
SHARED = "/v2 shared memory"
BARE = "bare kernels"
LOCAL = "convgrad.local()"
PYTORCH = "PyTorch"
CALLERS = 4
CALLS = {"tiny": 200, "medium": 40, "large": 8}
"""Calls per turn."""

_TOLERANCE = 1e-2
_LARGE = 16


@dataclass(frozen=True)
class Contender:
    """One way to have a case computed; `open` returns a function that calls it on its own connection."""

    name: str
    server: str
    open: Callable[[Case, ExitStack], Call]
    read: Callable[[Any, Case], Array] | None


def contenders(servers: dict[str, Server]) -> Iterator[Contender]:
    """Return the client and every API whose server is available."""
    yield Contender(BARE, "none", open_bare, lambda found, _: found)
    yield Contender(LOCAL, "own", open_local, lambda found, _: found)
    if find_spec("torch"):
        yield Contender(PYTORCH, "none", open_torch, lambda found, _: found[1].numpy())
    if "convgrad" in servers:
        yield Contender(CLIENT, "convgrad", _client(servers["convgrad"]), lambda found, _: found)
        yield Contender(SHARED, "convgrad", open_shared(servers["convgrad"].port), lambda found, _: found)
    for api in APIS:
        if api.server in servers:
            yield Contender(api.name, api.server, _plain(api, servers[api.server]), api.read)


def main(arguments: list[str] | None = None) -> int:
    """Measure the chosen contenders; print and write the results."""
    chosen = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the servers are stopped on exit
    cases = [case for case in CASES if case.name in chosen.cases.split(",")]
    document: dict[str, Any] = describe_machine() | {"load_before": load(), "absent": {}, "cases": {}, "memory": {}}
    with ExitStack() as stack:
        servers = _start(chosen, stack, document["absent"])
        found = [each for each in contenders(servers) if not chosen.only or any(o in each.name for o in chosen.only)]
        for case in cases:
            _say(f"{case.name}: latency and throughput of {len(found)}")
            document["cases"][case.name] = _measure(case, found, chosen)
    if "convgrad" in servers and any(case.name == "large" for case in cases):
        _say("large: memory")
        document["memory"] = _memory(cases[-1], chosen.workers)
    document["load_after"] = load()
    text = markdown(document)
    print(text)
    if chosen.json:
        chosen.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if chosen.markdown:
        chosen.markdown.write_text(text, encoding="utf-8")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="rounds per contender (default 10)")
    parser.add_argument("--seconds", type=float, default=1.0, help="seconds per throughput round (default 1)")
    parser.add_argument("--cases", default="tiny,medium,large", help="default tiny,medium,large")
    parser.add_argument("--only", action="append", help="only contenders whose name contains this (repeatable)")
    parser.add_argument("--no-peers", action="store_true", help="only our own server")
    parser.add_argument("--workers", type=int, default=0, help="our worker processes; 0: one per processor")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--markdown", type=Path, help="write the tables here")
    return parser


def _start(chosen: argparse.Namespace, stack: ExitStack, absent: dict[str, str]) -> dict[str, Server]:
    """Start every server that a chosen contender needs; report those that are unavailable."""
    wanted = {api.server for api in APIS if not chosen.only or any(text in api.name for text in chosen.only)}
    if not chosen.only or any(text in name for text in chosen.only for name in (CLIENT, SHARED)):
        wanted.add("convgrad")
    servers = {}
    for name in sorted({"convgrad"} & wanted if chosen.no_peers else wanted):
        _say(f"starting {name}")
        try:
            servers[name] = stack.enter_context(Server(name, workers=chosen.workers))
        except NotHad as reason:
            absent[name] = str(reason)
            _say(str(reason))
    return servers


def _measure(case: Case, found: list[Contender], chosen: argparse.Namespace) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    expected = case.expected()
    with ExitStack() as stack:
        calls = {each: [each.open(case, stack) for _ in range(CALLERS)] for each in found}
        for each, (first, *_) in calls.items():
            _check(each, first(), case, expected)
            latencies(first, 5)
            rows[each.name] = {"server": each.server, "latencies_s": [], "calls": 0, "seconds": 0.0}
        for _ in range(chosen.rounds):
            for each, (first, *_) in calls.items():
                rows[each.name]["latencies_s"] += latencies(first, CALLS[case.name])
        for _ in range(max(1, chosen.rounds // 3) if chosen.seconds else 0):
            for each, several in calls.items():
                count, seconds = throughput(several, chosen.seconds)
                rows[each.name]["calls"] += count
                rows[each.name]["seconds"] += seconds
    for row in rows.values():
        taken = row["latencies_s"]
        row |= {f"p{p}_ms": float(np.percentile(taken, p)) * 1000 for p in (50, 99)}
        row["min_ms"] = min(taken) * 1000
        row["per_s"] = row["calls"] / row["seconds"] if row["seconds"] else None
    return rows


def _memory(case: Case, workers: int) -> dict[str, float]:
    """Return the memory of a fresh server when idle, and its peak while it answers large calls one by one."""
    api = next(api for api in APIS if api.name == "multipart to frames")
    with Server("convgrad", workers=workers) as server, ExitStack() as stack:
        small = _plain(api, server)(CASES[0], stack)
        latencies(small, 200)  # until every worker has done some work
        idle = server.memory()
        call = _plain(api, server)(case, stack)
        with PeakMemory(server.memory) as watch:
            latencies(call, _LARGE)
        return {"idle_mib": idle, "peak_mib": watch.peak, "tensors_mib": case.nbytes / 2**20}


def _check(contender: Contender, reply: Any, case: Case, expected: Array) -> None:
    """Abort if a contender's result is wrong: its time would be meaningless."""
    if contender.read is None:
        return
    found = contender.read(reply, case)
    difference = float(np.abs(found - expected).max() / np.sqrt(np.mean(np.square(expected))))
    if difference > _TOLERANCE:
        raise SystemExit(f"{contender.name} computes something else: off by {difference:.3g} of the RMS")


def _client(server: Server) -> Callable[[Case, ExitStack], Call]:
    def open_one(case: Case, stack: ExitStack) -> Call:
        client = stack.enter_context(convgrad.Client(f"http://127.0.0.1:{server.port}"))
        inputs: dict[str, Any] = {**case.inputs(), "weights_shape": case.weights_shape}
        return lambda: client.run(OP, inputs, ATTRIBUTES)

    return open_one


def _plain(api: Api, server: Server) -> Callable[[Case, ExitStack], Call]:
    def open_one(case: Case, stack: ExitStack) -> Call:
        connection, wire = stack.enter_context(Connection(server.port)), api.build(case)

        def call() -> object:
            reply = connection.call(wire)
            if reply.status != 200:
                raise SystemExit(f"{api.name} answered {reply.status}: {reply.body[:300]!r}")
            return reply

        return call

    return open_one


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
