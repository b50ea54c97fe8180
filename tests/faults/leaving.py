"""Clients that disconnect, on every API and at any moment: how long their calls keep the service busy afterwards."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import numpy as np

from tests.app.bare import connected
from tests.app.resident import Resident
from tests.app.samples import LARGE, square
from tests.faults.apis import Prepared, prepare
from tests.problems import Case

__all__ = ["LONG", "MOMENTS", "busy", "idle", "leave", "prepared", "seconds_until", "sent"]

# A lot of work for any kernel, in few bytes.
LONG = square(4, 64, 64, 64, 40)

Condition = Callable[[], bool]


@cache
def prepared(api: str, case: Case) -> Prepared:
    """Return a prepared call whose result is not checked."""
    return prepare(api, case, case.floats(), np.empty(0))


@contextmanager
def sent(resident: Resident, call: Prepared, share: float = 1.0) -> Iterator[socket.socket]:
    """Send the first `share` of a call over a raw socket with a small receive buffer."""
    with connected(resident.url, little_room=True) as sock:
        sock.sendall(call.head() + call.content[: int(len(call.content) * share)])
        yield sock


def seconds_until(resident: Resident, act: Callable[[], object], condition: Condition) -> float:
    """Act; return how long it takes on the service's loop until a condition holds there."""

    async def measure() -> float:
        start = time.perf_counter()
        act()
        async with asyncio.timeout(20):
            while not condition():  # noqa: ASYNC110 - the point is to look from outside
                await asyncio.sleep(0.0005)
        return time.perf_counter() - start

    found: float = resident.run(measure())
    return found


def busy(resident: Resident) -> bool:
    """Return whether a worker has a unit."""
    return any(worker["unit"] for worker in resident.service.engine.snapshot()["workers"])


def idle(resident: Resident) -> bool:
    """Return whether there is no request, no call, no unit on a worker and no memory in use."""
    service = resident.service
    return not (service.admission.requests or service.calls or busy(resident) or service.segments.stats().used)


def while_sending(resident: Resident, api: str) -> float:
    """Disconnect in the middle of the body."""
    with sent(resident, prepared(api, LONG), 0.5) as sock:
        resident.until(lambda: resident.service.segments.stats().used > 0)
        return seconds_until(resident, sock.close, lambda: idle(resident))


def while_queued(resident: Resident, api: str) -> float:
    """Disconnect while the workers have another call; that one continues."""
    with sent(resident, prepared("rest npy", LONG)) as other:
        resident.until(lambda: len(resident.service.calls) == 1 and not idle(resident))
        with sent(resident, prepared(api, LONG)) as sock:
            resident.until(lambda: len(resident.service.calls) == 2)
            found = seconds_until(resident, sock.close, lambda: len(resident.service.calls) == 1)
        seconds_until(resident, other.close, lambda: idle(resident))
    return found


def while_computing(resident: Resident, api: str) -> float:
    """Disconnect while workers compute."""
    with sent(resident, prepared(api, LONG)) as sock:
        resident.until(lambda: busy(resident), 30)
        return seconds_until(resident, sock.close, lambda: idle(resident))


def while_receiving(resident: Resident, api: str) -> float:
    """Disconnect in the middle of the reply."""
    with sent(resident, prepared(api, LARGE)) as sock:
        assert sock.recv(1000).startswith(b"HTTP/1.1 200")
        return seconds_until(resident, sock.close, lambda: idle(resident))


MOMENTS: dict[str, Callable[[Resident, str], float]] = {
    "sending": while_sending,
    "queued": while_queued,
    "computing": while_computing,
    "receiving": while_receiving,
}


def leave(resident: Resident, api: str, moment: str) -> float:
    """Let a client disconnect; return the seconds until nothing of its call is left."""
    seconds_until(resident, lambda: None, lambda: idle(resident))
    return MOMENTS[moment](resident, api)
