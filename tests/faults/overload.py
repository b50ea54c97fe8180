"""Far more calls than the service can compute: how it rejects the excess, and how the accepted ones fare."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from urllib.parse import urlsplit

import httpx
import numpy as np

from benchmarks.startup import memory_mib
from tests.app.samples import Array, same_bits, square
from tests.faults.apis import Prepared, prepare
from tests.faults.chaos import family_service

__all__ = ["HEAVY", "Flood", "Seen", "flood", "overload", "visit"]

# Many multiply-adds for few bytes: some tens of milliseconds.
HEAVY = replace(square(1, 32, 32, 64, 40), dtype="bf16")
_RETRY_S = 0.05
# Longer than any answer takes: a client that waits this long has lost its call.
_PATIENCE_S = 60.0


@dataclass
class Flood:
    """The outcomes of a flood: calls accepted, rejections by status and reason, and all other failures by kind."""

    offered: int = 0
    accepted: int = 0
    refused: Counter[tuple[int, str]] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)


async def flood(url: str, call: Prepared, rate: float, seconds: float) -> Flood:
    """Send `rate` calls a second, regardless of their outcomes, each on its own connection."""
    found, address = Flood(), urlsplit(url)
    head = call.head().replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")

    async def one() -> None:
        stage, writer = "connecting", None
        try:
            async with asyncio.timeout(_PATIENCE_S):
                reader, writer = await asyncio.open_connection(address.hostname, address.port, limit=1 << 24)
                stage = "waiting for the answer"
                writer.write(head + call.content)
                answer = (await reader.readuntil(b"\r\n\r\n")).decode()
                stage = "reading the answer"
                length = re.search(r"\ncontent-length: (\d+)", answer)
                _book(found, answer, await (reader.readexactly(int(length[1])) if length else reader.read()))
        except (OSError, EOFError, ValueError) as error:  # a TimeoutError is an OSError
            found.faults[f"{type(error).__name__} while {stage}"] += 1
        finally:
            if writer is not None:
                writer.close()

    start = time.monotonic()
    async with asyncio.TaskGroup() as group:
        while (now := time.monotonic() - start) < seconds:
            for _ in range(int(now * rate) - found.offered):
                group.create_task(one())
                found.offered += 1
            await asyncio.sleep(0.005)
    assert found.offered == found.accepted + found.refused.total() + found.faults.total(), found
    return found


def _book(found: Flood, head: str, body: bytes) -> None:
    status = int(head.split()[1])
    if status == 200:
        found.accepted += 1
    elif status in (429, 503) and re.search(r"\nretry-after: [1-9]", head):
        found.refused[status, json.loads(body)["reason"]] += 1
    else:
        found.faults[f"status {status}"] += 1


@dataclass
class Seen:
    """What a caller in a separate process measured, in seconds: accepted calls, their time in the queue, /healthz."""

    calls: list[float] = field(default_factory=list)
    queued: list[float] = field(default_factory=list)
    health: list[float] = field(default_factory=list)


def visit(url: str, call: Prepared, seconds: float) -> Seen:
    """Make one call after another for some time, retrying after rejections, and request /healthz before each."""
    seen, until = Seen(), time.monotonic() + seconds
    with httpx.Client(base_url=url, timeout=60) as client:
        while time.monotonic() < until:
            start = time.perf_counter()
            assert client.get("/healthz").status_code == 200
            seen.health.append(time.perf_counter() - start)
            start = time.perf_counter()
            reply = client.post(call.path, content=call.content, headers=call.headers)
            took = time.perf_counter() - start
            if reply.status_code != 200:
                time.sleep(_RETRY_S)
                continue
            assert same_bits(call.read(reply), call.expected)
            timing = re.search(r"queue;dur=([\d.]+)", reply.headers["server-timing"])
            assert timing
            seen.calls.append(took)
            seen.queued.append(float(timing[1]) / 1000)
    return seen


def _visit(url: str, seconds: float, expected: Array, results: Connection) -> None:
    call = _heavy_call(expected)
    results.send(None)  # ready
    results.send(visit(url, call, seconds))


def _heavy_call(expected: Array) -> Prepared:
    return prepare("rest json", HEAVY, HEAVY.inputs(), expected)


def overload(seconds: float = 20.0) -> None:
    """For `seconds`, send ten times the rate that two workers can compute, and print the outcome."""
    with family_service("--workers", "2", "--queue-length", "16") as (service, family):
        expected = HEAVY.expected(HEAVY.inputs())
        call = _heavy_call(expected)
        visit(service.url, call, 1.0)
        alone = visit(service.url, call, 5.0)
        rate = 2 / float(np.median(alone.calls))  # two workers; each call is one unit or occupies both
        before = memory_mib(family.server, "Rss")
        spawn = multiprocessing.get_context("spawn")
        results, sender = spawn.Pipe(duplex=False)
        visitor = spawn.Process(target=_visit, args=(service.url, seconds, expected, sender))
        visitor.start()
        sender.close()  # so that reading from a visitor that died ends
        results.recv()
        found = asyncio.run(flood(service.url, call, 10 * rate, seconds + 4))
        seen: Seen = results.recv()
        visitor.join()
        after = memory_mib(family.server, "Rss")
        page = httpx.get(f"{service.url}/metrics").text
    rest = [took - queued for took, queued in zip(seen.calls, seen.queued, strict=True)]
    peak = re.search(r"^convgrad_shared_memory_peak_bytes (\S+)", page, re.MULTILINE)
    assert peak
    print(f"overload: {rate:.0f} calls a second are possible at most, {10 * rate:.0f} were offered: {found.offered}")
    print(f"overload: {found.accepted} accepted, refused {dict(found.refused)}, faults {dict(found.faults)}")
    print(f"overload: p99 alone {_p99(alone.calls):.0f} ms; one more caller's {len(rest)} accepted calls: p99", end=" ")
    print(f"{_p99(seen.calls):.0f} ms, without their time in the queue {_p99(rest):.0f} ms")
    print(f"overload: /healthz median {np.median(seen.health) * 1000:.0f} ms, p99 {_p99(seen.health):.0f} ms", end=" ")
    print(f"of {len(seen.health)}; alone p99 {_p99(alone.health):.0f} ms")
    print(
        f"overload: server {before:.0f} MiB before, {after:.0f} after; shared memory {float(peak[1]) / 2**20:.0f} MiB"
    )


def _p99(seconds: Sequence[float]) -> float:
    return float(np.quantile(seconds, 0.99)) * 1000 if seconds else float("nan")
