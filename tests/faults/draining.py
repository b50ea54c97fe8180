"""A service that is told to stop while it has many calls."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence

import httpx

from tests.faults.apis import Prepared
from tests.faults.chaos import Family, Tally, load
from tests.live import LiveService

__all__ = ["drain"]


async def drain(service: LiveService, family: Family, calls: Sequence[Prepared], tally: Tally, count: int) -> list[int]:
    """Send SIGTERM while `count` calls are in flight, and wait for them; return the processes that are left.

    Both workers are stopped until /readyz is 503, so that the calls in flight are known.
    """
    async with httpx.AsyncClient(base_url=service.url, timeout=60) as client:

        async def seen(metric: str) -> None:
            while f"\n{metric}\n" not in (await client.get("/metrics")).text:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

        await seen('convgrad_workers{state="idle"} 3.0')  # the spare one too
        for pid in family.workers():
            family.strike(pid, signal.SIGSTOP)
        loading = asyncio.create_task(load(service.url, calls, tally, count=count, at_once=count))
        await seen(f"convgrad_calls_open {count}.0")
        service.process.send_signal(signal.SIGTERM)
        while (ready := await client.get("/readyz")).status_code != 503:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert ready.json()["status"] == "draining"
        assert (await client.get("/healthz")).status_code == 200
        late = await client.post("/v1/ops/ConvTranspose", json={})
        while late.json()["code"] == "overloaded":  # the queue is full; the drain begins a moment later
            late = await client.post("/v1/ops/ConvTranspose", json={})
        told = late.status_code, late.json()["code"], "retry-after" in late.headers
        assert told == (503, "shutting_down", True), (told, late.text, service.log)
    for pid in family.workers():
        family.strike(pid, signal.SIGCONT)
    await loading
    await asyncio.to_thread(service.process.wait, 30)
    return list(family.members())
