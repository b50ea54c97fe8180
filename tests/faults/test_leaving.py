"""Clients that disconnect, and services that are told to stop, in the middle of everything."""

from __future__ import annotations

import asyncio
import os
import select
import signal
from collections.abc import Iterator

import httpx
import pytest

from tests.app.resident import Resident, resident_service
from tests.app.samples import SSE
from tests.faults.apis import APIS
from tests.faults.chaos import CALLS, Tally, family_service, prepare_all
from tests.faults.draining import drain
from tests.faults.leaving import LONG, MOMENTS, idle, leave, prepared, seconds_until

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
