"""Ten times more calls than can be computed: each is answered or told to retry, and memory stays bounded."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import Counter
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest

from benchmarks.startup import memory_mib
from tests.app.samples import same_bits, square
from tests.faults.apis import Prepared, prepare
from tests.faults.chaos import family_service

pytestmark = pytest.mark.heavy

# Some tens of milliseconds for the reference kernel.
SLOW = square(1, 64, 64, 48, 38)
_RETRY_S = 0.05
# Longer than any answer takes: a client that waits this long has lost its call.
_PATIENCE_S = 60.0


async def flood(url: str, call: Prepared, rate: float, seconds: float) -> Counter[str]:
    """Send `rate` calls a second, regardless of their outcomes, each on its own connection; count the outcomes."""
    found, offered, address = Counter[str](), 0, urlsplit(url)
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
                found[outcome(answer, await (reader.readexactly(int(length[1])) if length else reader.read()))] += 1
        except (OSError, EOFError, ValueError) as error:  # a TimeoutError is an OSError
            found[f"{type(error).__name__} while {stage}"] += 1
        finally:
            if writer is not None:
                writer.close()

    start = time.monotonic()
    async with asyncio.TaskGroup() as group:
        while (now := time.monotonic() - start) < seconds:
            for _ in range(int(now * rate) - offered):
                group.create_task(one())
                offered += 1
            await asyncio.sleep(0.005)
    assert found.total() == offered
    return found


def outcome(head: str, body: bytes) -> str:
    """Return the status of a reply, and the reason of a rejection that says when to retry."""
    retried = re.search(r"\nretry-after: [1-9]", head)
    return head.split()[1] + (f" {json.loads(body)['reason']}" if retried else "")


def visit(url: str, call: Prepared, seconds: float) -> list[float]:
    """Call and check /healthz alternately for some time, retrying after rejections; return the seconds of each call."""
    taken, until = list[float](), time.monotonic() + seconds
    with httpx.Client(base_url=url, timeout=60) as client:
        while time.monotonic() < until:
            assert client.get("/healthz").status_code == 200
            start = time.perf_counter()
            reply = client.post(call.path, content=call.content, headers=call.headers)
            if reply.status_code != 200:
                time.sleep(_RETRY_S)
                continue
            assert same_bits(call.read(reply), call.expected)
            taken.append(time.perf_counter() - start)
    return taken


def test_ten_times_what_can_be_computed() -> None:
    """Every call gets its result or a rejection with Retry-After and a reason; /healthz answers, results are right."""
    inputs = SLOW.inputs()
    call = prepare("rest json", SLOW, inputs, SLOW.expected(inputs), reference=True)

    async def scenario(rate: float) -> Counter[str]:
        visiting = asyncio.to_thread(visit, service.url, call, 3)
        found, _ = await asyncio.gather(flood(service.url, call, rate, 2.0), visiting)
        return found

    with family_service("--workers", "2", "--queue-length", "8") as (service, family):
        alone = visit(service.url, call, 1.0)
        before = memory_mib(family.server, "Rss")
        found = asyncio.run(scenario(10 * 2 / float(np.median(alone))))
        grown = memory_mib(family.server, "Rss") - before
        page = httpx.get(f"{service.url}/metrics").text
    assert set(found) == {"200", "503 queue"}
    bound = 2 * 256 * len(call.content) / 2**20  # requests in transit, and what is buffered of them
    assert grown < bound
    peak = re.search(r"^convgrad_shared_memory_peak_bytes (\S+)", page, re.MULTILINE)
    assert peak
    assert float(peak[1]) / 2**20 < bound
