"""Tensors that are kept between requests under handles: uploaded ones, inputs of sealed checks, results.

A handle is valid for the key, or without keys the address, that it was made for. Each may keep so many bytes: beyond
that its oldest tensors go.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass
from typing import Any, cast

from app.calls.work import Output
from app.pool.buffers import Segment, SegmentPool
from convgrad._errors import NotFound, TooLarge

__all__ = ["KeptLimits", "KeptTensor", "KeptTensors"]


@dataclass(frozen=True, slots=True)
class KeptLimits:
    """Seconds for which a tensor is kept; for each key or address, the tensors and their bytes."""

    seconds: float = 600.0
    tensors: int = 64
    memory: int = 256 << 20


@dataclass(frozen=True, eq=False, slots=True)
class KeptTensor:
    """A tensor: its owner, its description, the memory that holds it, and the timer that frees it."""

    handle: str
    owner: str
    output: Output
    timer: asyncio.TimerHandle

    @property
    def size(self) -> int:
        """Bytes of its memory."""
        return self.output.memory.size


class KeptTensors:
    """The tensors of all keys and addresses, the oldest first."""

    def __init__(self, segments: SegmentPool, limits: KeptLimits | None = None) -> None:
        self.limits = limits or KeptLimits()
        self._segments = segments
        self._kept: dict[str, KeptTensor] = {}

    async def keep_copy(self, output: Output, owner: str) -> dict[str, Any]:
        """Keep an output like `keep`; what this process alone can read is copied to a segment."""
        if isinstance(output.memory, Segment):
            return self.keep(output, owner)
        segment = await self._segments.acquire_async(max(1, output.nbytes), owner)
        segment.view[: output.nbytes] = output.data
        return self.keep(Output(output.name, output.spec, segment), owner)

    def keep(self, output: Output, owner: str) -> dict[str, Any]:
        """Keep an output, sharing its segment; return its reference as JSON.

        Raises `TooLarge` for more than one owner may keep.
        """
        if output.nbytes > self.limits.memory:
            message = f"a tensor of {output.nbytes} bytes can't be kept; the limit is {self.limits.memory}"
            data = {"reason": "kept", "limit": self.limits.memory, "value": output.nbytes}
            raise TooLarge(message, data=data)
        shared = Output(output.name, output.spec, cast("Segment", output.memory).share())
        handle = secrets.token_hex(16)
        timer = asyncio.get_running_loop().call_later(self.limits.seconds, self._free, handle)
        self._kept[handle] = KeptTensor(handle, owner, shared, timer)
        mine = [each for each in self._kept.values() if each.owner == owner]
        while len(mine) > self.limits.tensors or sum(each.size for each in mine) > self.limits.memory:
            self._free(mine.pop(0).handle)
        return {**output.describe(), "handle": handle}

    def find(self, handle: object, owner: str) -> Output:
        """Return a tensor; raises `NotFound` for an unknown handle, one whose time is over, and one of another key."""
        found = self._kept.get(handle) if isinstance(handle, str) else None
        if found is None or found.owner != owner:
            message = "there is no such handle: it was never made, was dropped, or its time is over"
            raise NotFound(message, data={"reason": "unknown_handle"})
        return found.output

    def drop(self, handle: object, owner: str) -> None:
        """Forget a tensor and free its memory; raises as `find` does."""
        self.find(handle, owner)
        self._free(str(handle))

    def _free(self, handle: str) -> None:
        found = self._kept.pop(handle, None)
        if found is not None:
            found.timer.cancel()
            found.output.memory.release()
