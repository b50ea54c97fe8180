"""Ten times more calls than can be computed: each is answered or told to retry, and memory stays bounded."""

from __future__ import annotations

import asyncio
import re

import httpx
import numpy as np
import pytest

from benchmarks.startup import memory_mib
from tests.app.samples import square
from tests.faults.apis import prepare
from tests.faults.chaos import family_service
from tests.faults.overload import Flood, Seen, flood, visit

pytestmark = pytest.mark.heavy

# Some tens of milliseconds for the reference kernel.
SLOW = square(1, 64, 64, 48, 38)


def test_ten_times_what_can_be_computed() -> None:
    """Every call gets its result or a rejection with Retry-After and a reason; /healthz answers, results are right."""
    inputs = SLOW.inputs()
    call = prepare("rest json", SLOW, inputs, SLOW.expected(inputs), reference=True)

    async def scenario(rate: float) -> tuple[Flood, Seen]:
        return await asyncio.gather(flood(service.url, call, rate, 2.0), asyncio.to_thread(visit, service.url, call, 3))

    with family_service("--workers", "2", "--queue-length", "8") as (service, family):
        alone = visit(service.url, call, 1.0)
        before = memory_mib(family.server, "Rss")
        found, seen = asyncio.run(scenario(10 * 2 / float(np.median(alone.calls))))
        grown = memory_mib(family.server, "Rss") - before
        page = httpx.get(f"{service.url}/metrics").text
    assert not found.faults
    assert found.accepted
    assert set(found.refused) == {(503, "queue")}
    assert seen.health
    bound = 2 * 256 * len(call.content) / 2**20  # requests in transit, and what is buffered of them
    assert grown < bound
    peak = re.search(r"^convgrad_shared_memory_peak_bytes (\S+)", page, re.MULTILINE)
    assert peak
    assert float(peak[1]) / 2**20 < bound
