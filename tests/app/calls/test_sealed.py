"""Sealed checks whose clients went away, and their limit of memory."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from app.calls.sealed.checks import SealedChecks, SealedLimits
from app.pool.buffers import SegmentPool
from convgrad import NotFound, RateLimited


def test_a_lost_client_costs_nothing() -> None:
    """The memory of a case is free when its time is over, and so is its check."""

    async def lose(case_s: float, check_s: float) -> None:
        segments = SegmentPool(1 << 24)
        checks = SealedChecks(None, segments, SealedLimits(case_s, check_s))
        check = checks.begin({}, "owner", "key")
        with suppress(NotFound):  # on a slow machine the check is over at once
            await checks.next(check)
        async with asyncio.timeout(30):
            while segments.stats().used:  # noqa: ASYNC110 - nothing tells when
                await asyncio.sleep(0.001)
        if case_s > check_s:
            with pytest.raises(NotFound):
                checks.find(check.id, "owner")
        else:
            assert checks.finish(check)["counts"] == {"not_given": 49, "late": 1}

    for times in ((0.001, 60.0), (60.0, 0.1)):
        asyncio.run(lose(*times))


async def test_memory() -> None:
    """The inputs of a case must fit in the memory of the key; the next case is drawn anew."""
    segments = SegmentPool(1 << 24)
    checks = SealedChecks(None, segments, SealedLimits(memory=1))
    check = checks.begin({}, "owner", "key")
    with pytest.raises(RateLimited, match="may have 1") as refused:
        await checks.next(check)
    assert refused.value.data["reason"] == "check_memory"
    assert not check.cases
    assert not segments.stats().used
