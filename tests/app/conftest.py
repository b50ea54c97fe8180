"""Fixtures shared by the service's tests."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator

import httpx
import pytest

from tests.app.pool.fleet import Fleet
from tests.app.resident import Resident, resident_service
from tests.app.samples import SMALL, post


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine function: on the event loop of its `Fleet` if it has one, else on a new one."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    fleet = next((each for each in given.values() if isinstance(each, Fleet)), None)
    run = asyncio.run if fleet is None else fleet.run
    run(pyfuncitem.obj(**given))
    return True


@pytest.fixture(scope="session")
def tight() -> Iterator[Resident]:
    """A service in this process with small limits, whose code is loaded: its first call takes longer than others."""
    with resident_service(
        workers=1,
        queue_length=2,
        body_limit=4 << 20,
        json_limit=4 << 20,
        work_limit=50_000_000_000,
        memory_limit=40 << 20,
        deadline_s=20.0,
    ) as resident:
        with httpx.Client(base_url=resident.url, timeout=60.0) as client:
            assert post(client, SMALL, SMALL.inputs()).status_code == 200
        yield resident


@pytest.fixture
def tight_http(tight: Resident) -> Iterator[httpx.Client]:
    """A plain HTTP client for that service."""
    with httpx.Client(base_url=tight.url, timeout=60.0) as client:
        yield client


@pytest.fixture
def nothing_is_left(tight: Resident) -> Iterator[None]:
    """Check afterwards that `tight` is idle: no call, no job, no working worker, no memory in use."""
    yield
    tight.run(tight.service.admission.idle(), 10.0)
    tight.until(lambda: not tight.service.calls and tight.service.engine.snapshot()["jobs"] == 0)
    tight.until(tight.is_idle)
    tight.until(lambda: tight.service.segments.stats().used == 0)
