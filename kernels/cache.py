"""What is remembered of problems: plans, schedules and prepared units, all together in a bounded number of bytes.

    @cached
    def schedule(problem: ConvProblem) -> Schedule: ...

Each process has one `CACHE`. What was not asked for the longest time goes first, and what would take half of the room
by itself is not kept at all. `CONVGRAD_PLAN_MEMORY` says how many bytes there are.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import wraps
from math import inf
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, ParamSpec, TypeVar

import numpy as np

__all__ = ["CACHE", "SETTING", "Cache", "cached", "measure"]

SETTING = "CONVGRAD_PLAN_MEMORY"

DEFAULT_BYTES = 64 << 20

SAMPLED, SAMPLE = 32, 16
"""Sequences of more elements are measured by some of them: measuring takes no longer than about a millisecond."""

P = ParamSpec("P")
T = TypeVar("T")

_NOT_OURS = (type, FunctionType, BuiltinFunctionType, ModuleType)


def measure(value: object) -> int:
    """Return the bytes of all that `value` reaches: arrays with what they are views of, long sequences by a sample."""
    total, left = 0, [value]  # of what is left to measure
    seen: set[int] = set()
    while left:  # a loop, because every new shape waits for it: calls would take several times as long
        value = left.pop()
        if value is None or id(value) in seen or isinstance(value, _NOT_OURS):
            continue
        seen.add(id(value))
        total += sys.getsizeof(value, 0)
        if isinstance(value, np.ndarray):
            left.append(value.base)
        elif isinstance(value, tuple | list) and len(value) > SAMPLED:
            some = value[:: len(value) // SAMPLE]
            total += sum(map(measure, some)) * len(value) // len(some)
        elif isinstance(value, tuple | list):
            left += value
        elif isinstance(value, dict):
            left += [*value.keys(), *value.values()]
        else:
            left.append(getattr(value, "__dict__", None))
    return total


class Cache:
    """Keep values by their keys, in at most `limit` bytes together; with no limit (`inf`) none is measured."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.nbytes = 0
        self._entries = OrderedDict[Hashable, tuple[Any, int]]()
        self.lock = threading.RLock()
        """Held for a moment, in which no other lock is waited for."""

    def __len__(self) -> int:
        """Count the values."""
        return len(self._entries)

    def find(self, key: Hashable) -> tuple[Any, int] | None:
        """Look a value up, with its bytes, which makes it the latest."""
        with self.lock:
            found = self._entries.get(key)
            if found is not None:
                self._entries.move_to_end(key)
            return found

    def keep(self, key: Hashable, value: object) -> None:
        """Keep a value as the latest one, unless it is too large, and let the oldest go for it."""
        size = measure((key, value)) if self.limit < inf else 0
        if size > self.limit // 2:
            return
        with self.lock:
            if key in self._entries:  # another thread was faster
                return
            self._entries[key] = value, size
            self.nbytes += size
            while self.nbytes > self.limit:
                self.nbytes -= self._entries.popitem(last=False)[1][1]

    def clear(self) -> None:
        """Forget all values."""
        with self.lock:
            self._entries.clear()
            self.nbytes = 0


def cached(make: Callable[P, T]) -> Callable[P, T]:
    """Remember in `CACHE` what a function of hashable arguments returns."""

    @wraps(make)
    def remembered(*given: P.args, **named: P.kwargs) -> T:
        key = (make, given, *named.items())
        found = CACHE.find(key)
        if found is not None:
            return found[0]  # type: ignore[no-any-return]
        value = make(*given, **named)
        CACHE.keep(key, value)
        return value

    return remembered


def _limit(setting: str | None) -> int:
    """Read the setting."""
    if setting is None:
        return DEFAULT_BYTES
    if not setting.isdecimal():
        raise ValueError(f"{SETTING} must be a number of bytes, not {setting!r}")
    return int(setting)


CACHE = Cache(_limit(os.environ.get(SETTING)))
"""What this process remembers."""
