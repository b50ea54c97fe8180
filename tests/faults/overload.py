"""Far more calls than the service can compute: what it refuses and how, and what becomes of those that it takes."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.queues import Queue
from urllib.parse import urlsplit

import httpx
import numpy as np

from benchmarks.startup import memory_mib
from tests.app.calls import same_bits
from tests.faults.chaos import family_service
from tests.faults.doors import Prepared, prepare
from tests.problems import Case

__all__ = ["HEAVY", "Flood", "Seen", "flood", "overload", "visit"]

# Many multiply-adds for few bytes: some tens of milliseconds.
HEAVY = Case(
    name="heavy",
    op="ConvolutionBackwardWeights",
    dtype="bf16",
    src_channels=32,
    dst_channels=32,
    src_spatial=(64, 64),
    dst_spatial=(40, 40),
    kernel=(25, 25),
)
_RETRY_S = 0.05


@dataclass
class Flood:
    """Count what a flood came to: answers with the right length, refusals by status and reason, and all else."""

    accepted: int = 0
    refused: Counter[tuple[int, str]] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


async def flood(url: str, call: Prepared, rate: float, seconds: float) -> Flood:
    """Send `rate` calls a second, whatever becomes of them, each on a connection of its own."""
    found, address = Flood(), urlsplit(url)
    head = call.head().replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")

    async def one() -> None:
        reader, writer = await asyncio.open_connection(address.hostname, address.port, limit=1 << 24)
        try:
            writer.write(head + call.content)
            first, _, body = (await reader.read()).partition(b"\r\n\r\n")
        except ConnectionError as error:
            found.faults.append(repr(error))
            return
        finally:
            writer.close()
        _book(found, first.decode(), body)

    start = time.monotonic()
    sent: list[asyncio.Task[None]] = []
    while (now := time.monotonic() - start) < seconds:
        sent += [asyncio.create_task(one()) for _ in range(int(now * rate) - len(sent))]
        await asyncio.sleep(0.005)
    await asyncio.gather(*sent)
    return found


def _book(found: Flood, head: str, body: bytes) -> None:
    status = int(head.split()[1]) if head else 0
    if status == 200:
        found.accepted += 1
    elif status in (429, 503) and re.search(r"\nretry-after: [1-9]", head):
        found.refused[status, json.loads(body)["reason"]] += 1
    else:
        found.faults.append(head)


@dataclass
class Seen:
    """What a caller of its own process saw, in seconds: accepted calls, their time in the queue, /healthz."""

    calls: list[float] = field(default_factory=list)
    queued: list[float] = field(default_factory=list)
    health: list[float] = field(default_factory=list)


def visit(url: str, call: Prepared, seconds: float) -> Seen:
    """Call one after the other for some time, again after a refusal, and look at /healthz before each."""
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


def _visit(url: str, seconds: float, results: Queue[Seen]) -> None:
    results.put(visit(url, heavy_call(), seconds))


def heavy_call() -> Prepared:
    """Make the heavy call ready."""
    inputs = HEAVY.inputs()
    return prepare("rest json", HEAVY, inputs, HEAVY.expected(inputs))


def overload() -> None:
    """Offer ten times what two workers can compute, for twenty seconds, and print what came of it."""
    spawn, seconds = multiprocessing.get_context("spawn"), 20.0
    with family_service("--workers", "2", "--queue-length", "16") as (service, family):
        call = heavy_call()
        visit(service.url, call, 1.0)
        alone = visit(service.url, call, 5.0)
        rate = 2 / float(np.median(alone.calls))  # two workers, each call is one unit or keeps both
        before = memory_mib(family.server, "Rss")
        results: Queue[Seen] = spawn.Queue()
        visitor = spawn.Process(target=_visit, args=(service.url, seconds, results))
        visitor.start()
        found = asyncio.run(flood(service.url, call, 10 * rate, seconds + 4))
        seen = results.get()
        visitor.join()
        after = memory_mib(family.server, "Rss")
        page = httpx.get(f"{service.url}/metrics").text
    rest = [took - queued for took, queued in zip(seen.calls, seen.queued, strict=True)]
    peak = re.search(r"^convgrad_shared_memory_peak_bytes (\S+)", page, re.MULTILINE)
    assert peak
    print(f"overload: {rate:.0f} calls a second are possible at most, {10 * rate:.0f} were offered")
    print(f"overload: {found.accepted} accepted, refused {dict(found.refused)}, faults {Counter(found.faults)}")
    print(f"overload: p99 alone {_p99(alone.calls):.0f} ms; one more caller's {len(rest)} accepted calls: p99", end=" ")
    print(f"{_p99(seen.calls):.0f} ms, without their time in the queue {_p99(rest):.0f} ms")
    print(f"overload: /healthz median {np.median(seen.health) * 1000:.0f} ms, p99 {_p99(seen.health):.0f} ms")
    print(
        f"overload: server {before:.0f} MiB before, {after:.0f} after; shared memory {float(peak[1]) / 2**20:.0f} MiB"
    )


def _p99(seconds: Sequence[float]) -> float:
    return float(np.quantile(seconds, 0.99)) * 1000 if seconds else float("nan")
