"""The service's sealed checks: with limits of time and memory, judged by workers.

A check belongs to the key, or without keys to the address, that began it. It holds the inputs of one case at a time,
until that is answered or its time is over.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.pool.buffers import SegmentPool
from convgrad._check.cases import Array
from convgrad._errors import RateLimited
from engine.sealed import checks as sealed
from engine.sealed.checks import SealedCase, SealedCheck

__all__ = ["Judging", "SealedChecks", "SealedLimits", "settled", "submit"]

Judging = Coroutine[Any, Any, dict[str, Any]]
"""Judges an answer, sets the status of its case, and returns the reply."""


@dataclass(frozen=True, slots=True)
class SealedLimits:
    """Seconds to answer a case, from when it is drawn; seconds after which a check is forgotten.

    For each key or address, the open checks, and the bytes of the inputs of their open cases.
    """

    case_s: float = 60.0
    check_s: float = 3600.0
    checks: int = 4
    memory: int = 64 << 20


class SealedChecks(sealed.SealedChecks):
    """The checks of all keys and addresses; the inputs of their open cases are in shared memory."""

    def __init__(self, key_file: Path | None, segments: SegmentPool, limits: SealedLimits | None = None) -> None:
        self.limits = limits or SealedLimits()
        super().__init__(key_file, checks=self.limits.checks)
        self._segments = segments
        self._drawing = asyncio.Lock()

    def begin(self, given: Mapping[str, Any], owner: str, key: str) -> SealedCheck:
        """Begin a check, which is forgotten after its time; raises as `engine.sealed` does."""
        check = super().begin(given, owner, key)
        timer = asyncio.get_running_loop().call_later(self.limits.check_s, self.drop, check)
        check.closing.callback(timer.cancel)
        return check

    async def next(self, check: SealedCheck) -> SealedCase | None:
        """Return the case that is to be answered, drawn now unless the last one is still open; None after the last.

        Raises `InvalidParams`, `NotFound`, `RateLimited` and what `SegmentPool.acquire` raises.
        """
        async with self._drawing:
            current = check.current()
            if current is not None or len(check.cases) == check.asked:
                return current
            drawn = await asyncio.to_thread(check.draw)
            inputs = await asyncio.to_thread(drawn.case.inputs)
            drawn.until = time.monotonic() + self.limits.case_s
            try:
                await self._keep(drawn, inputs, check.owner)
                self.find(check.id, check.owner)
                check.give(drawn)
            except BaseException:
                drawn.close("late")
                raise
            timer = asyncio.get_running_loop().call_later(self.limits.case_s, drawn.end, "late")
            drawn.closing.callback(timer.cancel)
            return drawn

    async def _keep(self, drawn: SealedCase, inputs: Mapping[str, Array], owner: str) -> None:
        """Copy the inputs to shared memory."""
        cases = [case for check in self._checks.values() if check.owner == owner for case in check.cases[-1:]]
        held = sum(segment.size for case in cases for segment in case.inputs.values())
        needed, limit = held + sum(array.nbytes for array in inputs.values()), self.limits.memory
        if needed > limit:
            message = f"the open cases of this key or address need {needed} bytes, but may have {limit}"
            data = {"reason": "check_memory", "limit": limit, "value": needed}
            raise RateLimited(message, retry_after=sealed.RETRY_AFTER_S, data=data)
        for name, array in inputs.items():
            segment = await self._segments.acquire_async(max(1, array.nbytes), owner)
            drawn.closing.callback(segment.release)
            drawn.inputs[name] = segment
            segment.view[: array.nbytes] = array.tobytes()


def submit(case: SealedCase, answer: str, judge: Callable[[], Judging]) -> asyncio.Future[dict[str, Any]]:
    """Return the verdict on an answer, judged now or before; raises `InvalidParams` after another answer."""

    async def judged(judging: Judging) -> dict[str, Any]:
        try:
            return await judging
        finally:
            case.reopen()

    def begin() -> asyncio.Future[dict[str, Any]]:
        verdict = asyncio.ensure_future(judged(judge()))
        verdict.add_done_callback(lambda verdict: verdict.cancelled() or verdict.exception())
        return verdict

    return case.submit(answer, begin)


async def settled(check: SealedCheck) -> SealedCheck:
    """Wait until no answer is being judged; return the check."""
    if judging := [case.verdict for case in check.cases[-1:] if case.verdict is not None]:
        await asyncio.wait(judging)
    return check
