"""The memory of a request: small tensors beside the pool, and large bodies a few at a time."""

from __future__ import annotations

import asyncio

import pytest

from app.intake.elements import Sink
from app.intake.lease import LARGE, Lease, UploadSlot
from app.pool.buffers import SegmentPool
from app.telemetry.context import RequestContext
from convgrad._errors import Overloaded

_SIZE = 64 << 10


async def test_many_small_tensors_count() -> None:
    """Those of one request stay on the heap up to 256 KiB together; those beyond are in the pool."""
    pool, used = SegmentPool(1 << 20), []
    with Lease(pool, RequestContext("id")) as lease:
        for _ in range(6):
            await Sink(lease, _SIZE).write(bytes(_SIZE))
            used.append(pool.stats().used)
    assert used == [0, 0, 0, 0, _SIZE, 2 * _SIZE]
    assert pool.stats().used == 0


def slots(most: int, count: int, *, received: int = 0) -> list[UploadSlot]:
    """Return the slots of `count` requests, each with `received` bytes received."""
    shared = asyncio.Semaphore(most)
    return [UploadSlot(shared, lambda: None, lambda: received) for _ in range(count)]


async def test_a_request_waits_until_another_has_its_body() -> None:
    """With one slot at a time the second starts when the first ends, and the third when the second ends."""
    first, second, third = slots(1, 3)
    await first.acquire()
    waits = [asyncio.ensure_future(slot.acquire()) for slot in (second, third)]
    await asyncio.sleep(0)
    assert [wait.done() for wait in waits] == [False, False]
    first.release()
    first.release()
    await waits[0]
    await asyncio.sleep(0)
    assert not waits[1].done()
    second.release()
    await waits[1]
    third.release()


async def test_a_stalled_body_loses_its_slot() -> None:
    """A client that sends nothing does not keep the others waiting."""
    stalled, other = slots(1, 2)
    await stalled.acquire()
    await asyncio.wait_for(other.acquire(), 10)
    other.release()


async def test_no_request_waits_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request is rejected before its client gives up, and other requests keep their slots."""
    monkeypatch.setattr("app.intake.lease._LONGEST_WAIT_S", 0.01)
    first, second, third = slots(1, 3)
    await first.acquire()
    with pytest.raises(Overloaded, match="large bodies"):
        await second.acquire()
    second.release()
    with pytest.raises(Overloaded):
        await third.acquire()
    first.release()
    await third.acquire()
    third.release()


async def test_a_rejected_request_passes_its_slot_on() -> None:
    """A request that is rejected when its slot comes allocates nothing, and the next one starts."""
    pool, shared = SegmentPool(4 * LARGE), asyncio.Semaphore(1)

    def full() -> None:
        raise Overloaded("the queue is full", retry_after=1)

    with (
        Lease(pool, RequestContext("id"), slot=lambda: UploadSlot(shared, full, lambda: 0)) as rejected,
        pytest.raises(Overloaded),
    ):
        await rejected.acquire(LARGE)
    assert pool.stats().created == 0
    with Lease(pool, RequestContext("id"), slot=lambda: UploadSlot(shared, lambda: None, lambda: 0)) as lease:
        await lease.acquire(LARGE)


async def test_memory_is_allocated_when_the_slot_is_acquired() -> None:
    """A waiting request's tensor is allocated only once the other's body has arrived."""
    pool, (first, second) = SegmentPool(8 * LARGE), slots(1, 2)
    with (
        Lease(pool, RequestContext("id"), slot=lambda: first) as ahead,
        Lease(pool, RequestContext("id"), slot=lambda: second) as behind,
    ):
        small = await behind.acquire(LARGE - 1)
        behind.release(small)
        await ahead.acquire(LARGE)
        wait = asyncio.ensure_future(behind.acquire(2 * LARGE))
        await asyncio.sleep(0)
        assert not wait.done()
        assert pool.stats().created == 1
        ahead.received()
        await wait


async def test_a_lease_that_is_closed_passes_its_slot_on() -> None:
    """A request that fails while its tensors arrive does not keep the next one waiting."""
    pool, (first, second) = SegmentPool(4 * LARGE), slots(1, 2)
    with Lease(pool, RequestContext("id"), slot=lambda: first) as failed:
        await failed.acquire(LARGE)
        wait = asyncio.ensure_future(second.acquire())
        await asyncio.sleep(0)
        assert not wait.done()
    for _ in range(3):
        await asyncio.sleep(0)
    assert wait.done()
    second.release()


async def test_a_cancelled_request_takes_no_slot() -> None:
    """A client that disconnects while it waits does not block the ones behind it."""
    first, second, third = slots(1, 3)
    await first.acquire()
    waits = [asyncio.ensure_future(slot.acquire()) for slot in (second, third)]
    await asyncio.sleep(0)
    waits[0].cancel()
    first.release()
    await waits[1]
    third.release()
