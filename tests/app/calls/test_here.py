"""Tiny calls are computed in the server's process, and only these."""

from __future__ import annotations

import os
import signal

import httpx
import pytest

from engine.options import Options
from engine.process import Engine, metas_of
from tests.app.resident import Resident, resident_service
from tests.app.samples import FRAMES, HEAVY, JSON, NPY, SMALL, SSE, post, read, same_bits


@pytest.mark.heavy
@pytest.mark.parametrize("accept", [JSON, NPY, SSE, FRAMES])
def test_a_tiny_call_needs_no_worker(accept: str) -> None:
    """While the only worker is stopped a tiny call is answered, in every form, the first one of its shape too."""
    inputs = SMALL.inputs()
    with resident_service(workers=1) as resident, httpx.Client(base_url=resident.url, timeout=60) as http:
        workers = [worker["pid"] for worker in resident.service.engine.snapshot()["workers"]]
        for pid in workers:
            os.kill(pid, signal.SIGSTOP)
        try:
            before = _units(resident)
            for _ in range(2):
                reply = post(http, SMALL, inputs, accept)
                assert reply.status_code == 200
                if accept == NPY:
                    assert same_bits(read(reply), SMALL.expected(inputs))
            assert _units(resident) > before
        finally:
            for pid in workers:
                os.kill(pid, signal.SIGCONT)


def test_what_is_tiny() -> None:
    """Work, memory and the reference decide; f64 and verifications are for workers."""
    engine = Engine(2)
    small = metas_of(SMALL.inputs())
    assert engine.preparer.prepare(SMALL.op, SMALL.attributes(), small, Options()).tiny
    assert not engine.preparer.prepare(SMALL.op, SMALL.attributes(), small, Options(reference=True)).tiny
    assert not engine.preparer.prepare(HEAVY.op, HEAVY.attributes(), metas_of(HEAVY.floats()), Options()).tiny


def _units(resident: Resident) -> int:
    return int(resident.service.engine.snapshot()["counters"]["units"])
