"""Clients that disconnect, and services that are told to stop, in the middle of everything."""

from __future__ import annotations

import asyncio
import os
import select
import signal
from collections.abc import Iterator, Sequence

import httpx
import pytest

from tests.app.resident import Resident, resident_service
from tests.app.samples import SSE
from tests.faults.apis import APIS, Prepared
from tests.faults.chaos import CALLS, Family, Tally, family_service, load, prepare_all
from tests.faults.leaving import LONG, MOMENTS, idle, leave, prepared, seconds_until
from tests.live import LiveService

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def resident() -> Iterator[Resident]:
    """A service in this process with two workers."""
    with resident_service(workers=2) as found:
        yield found


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("moment", MOMENTS)
def test_nothing_is_left_of_a_client_that_leaves(resident: Resident, api: str, moment: str) -> None:
    """Its request, call, units and memory are soon released, and the call of another client continues."""
    leave(resident, api, moment)
    # a unit that was sent ahead may begin, and stop, after the first moment without one
    seconds_until(resident, lambda: None, lambda: idle(resident))


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


def test_a_drain_loses_no_call() -> None:
    """All of forty calls over all APIs in flight at SIGTERM return the right result; no process is left."""
    tally = Tally()
    calls = prepare_all(CALLS[:1])
    with family_service("--workers", "2", "--queue-length", "40", "--drain-s", "100") as (service, family):
        left = asyncio.run(drain(service, family, calls, tally, 40))
        assert service.process.returncode == 0
    assert not tally.lost
    assert (tally.right.total(), tally.wrong, left) == (40, [], [])


def test_nothing_outlives_a_killed_server() -> None:
    """After `kill -9` of a server with one worker computing and one stopped, all its processes exit by themselves."""
    call = prepared("rest npy", LONG)
    with family_service("--workers", "2") as (service, family):
        members = family.members()
        pidfds = [os.pidfd_open(pid) for pid in members]
        family.strike(family.workers()[0], signal.SIGSTOP)
        with (
            httpx.Client(base_url=service.url, timeout=60) as client,
            httpx.Client(base_url=service.url, timeout=60) as other,
        ):
            headers = call.headers | {"accept": SSE}
            with client.stream("POST", call.path, content=call.content, headers=headers) as reply:
                stream = reply.iter_raw()
                assert next(stream).startswith(b"data: ")
                assert "convgrad_calls_open 1.0" in other.get("/metrics").text
                service.process.kill()
                with pytest.raises(httpx.HTTPError):
                    b"".join(stream)
        ended = select.poll()
        for pidfd in pidfds:
            ended.register(pidfd, select.POLLIN)
        waiting = set(pidfds)
        while waiting:
            found = ended.poll(30_000)
            assert found, "processes outlive their server"
            for pidfd, _ in found:
                ended.unregister(pidfd)
                waiting.remove(pidfd)
                os.close(pidfd)
