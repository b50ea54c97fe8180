"""Calls through every API while processes of the service are killed and stopped: none is lost, none is wrong."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest

from tests.faults.apis import APIS
from tests.faults.chaos import CALLS, PAUSE_S, Family, Striker, Tally, family_service, load, prepare_all
from tests.live import LiveService

pytestmark = pytest.mark.heavy

Hurt = tuple[LiveService, Family]


@pytest.fixture(scope="module")
def hurt() -> Iterator[Hurt]:
    """A service whose processes these tests may kill."""
    with family_service("--workers", "2") as found:
        yield found


def test_random_kills_cost_no_call(hurt: Hurt) -> None:
    """With five workers killed a second, every call on every API returns the oracle's bits."""
    service, family = hurt
    tally = Tally()

    async def scenario() -> None:
        async with Striker(family, 5.0, seed=1, pause_one_in=1 << 30, fork_server_one_in=1 << 30):
            await load(service.url, prepare_all(), tally, count=140)

    asyncio.run(scenario())
    assert not tally.lost
    assert not tally.wrong
    assert tally.right.total() == 140
    assert set(tally.right) == set(APIS)


def test_pauses_of_seconds_cost_no_call_and_no_worker(hurt: Hurt) -> None:
    """Workers that stop for six seconds, as on a swapping machine, go on afterwards: none is taken for dead."""
    service, family = hurt
    tally, workers, calls = Tally(), list[int](), prepare_all(CALLS[:1])

    async def scenario() -> None:
        while len(workers) < 3:  # the spare one too
            workers[:] = family.workers()
            await asyncio.sleep(0.01)
        async with Striker(family, 1.0, seed=2, pause_one_in=1, fork_server_one_in=1 << 30) as striker:
            while not striker.struck["stopped"]:
                await load(service.url, calls, tally, count=20, pause_s=0.05)
        await load(service.url, calls, tally, until=time.monotonic() + PAUSE_S + 1, pause_s=0.05)

    asyncio.run(scenario())
    assert not tally.lost
    assert not tally.wrong
    assert family.workers() == workers


def test_no_call_is_lost_with_all_processes_at_once(hurt: Hurt) -> None:
    """If the fork server and all workers die together, calls wait for their successors; the service stays ready."""
    service, family = hurt
    tally = Tally()

    async def scenario() -> None:
        loading = asyncio.create_task(load(service.url, prepare_all(CALLS[:1]), tally, count=70, pause_s=0.01))
        while tally.count < 10:  # noqa: ASYNC110 - it counts, it does not signal
            await asyncio.sleep(0.001)
        fork_server = family.fork_server()
        assert fork_server is not None
        assert all(family.strike(pid) for pid in (fork_server, *family.workers()))
        await loading

    asyncio.run(scenario())
    assert not tally.lost
    assert not tally.wrong
    assert family.fork_server() is not None
