"""The memory of a request: what small tensors may take beside the pool."""

from __future__ import annotations

from app.intake.elements import Sink
from app.intake.lease import Lease
from app.pool.buffers import SegmentPool
from app.telemetry.context import RequestContext

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
