"""A late write by a worker of a finished call never gets into the memory of another call."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress

import httpx
import numpy as np
import pytest

from tests.app.resident import Resident, resident_service
from tests.app.samples import same_bits
from tests.faults.apis import prepare
from tests.faults.chaos import MIDDLE
from tests.faults.leaving import busy, idle, sent


@pytest.fixture(scope="module")
def resident() -> Iterator[Resident]:
    """A service in this process with two workers."""
    with resident_service(workers=2) as found:
        yield found


def strike(pids: list[int], number: signal.Signals) -> None:
    """Send a signal to workers, some of which may be dead."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGCONT])
def test_a_late_write_reaches_no_other_call(resident: Resident, end: signal.Signals) -> None:
    """Workers are stopped in a call whose client leaves, then die or continue: later calls return the oracle's bits."""
    inputs = MIDDLE.inputs()
    right = prepare("rest npy", MIDDLE, inputs, MIDDLE.expected(inputs))
    left = prepare("rest npy", MIDDLE, MIDDLE.floats(), np.empty(0), reference=True)  # as large, and slow
    reused = resident.service.segments.stats().reused
    with httpx.Client(base_url=resident.url, timeout=60) as http:
        for _ in range(5):
            with sent(resident, left):
                resident.until(lambda: busy(resident), 30)
                workers = resident.service.engine.snapshot()["workers"]
                stopped = [worker["pid"] for worker in workers if worker["pid"]]  # one that starts again has none yet
                strike(stopped, signal.SIGSTOP)
            strike(stopped, end)
            for _ in range(2):
                reply = http.post(right.path, content=right.content, headers=right.headers)
                assert same_bits(right.read(reply), right.expected)
    resident.until(lambda: idle(resident))
    assert resident.service.segments.stats().reused > reused
