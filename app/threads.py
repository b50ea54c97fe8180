"""Large work runs in a thread, so that it does not block the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

__all__ = ["in_thread_if"]

P = ParamSpec("P")
T = TypeVar("T")


async def in_thread_if(large: bool, work: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
    """Call `work`, in a thread if it is large: for small work, switching would take longer than the work."""
    return await asyncio.to_thread(work, *args, **named) if large else work(*args, **named)
