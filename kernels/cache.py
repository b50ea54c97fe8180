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
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import update_wrapper
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, Generic, ParamSpec, TypeVar

import numpy as np

__all__ = ["CACHE", "SETTING", "Cache", "Cached", "Size", "cached", "in_passing", "measure"]

SETTING = "CONVGRAD_PLAN_MEMORY"

DEFAULT_BYTES = 64 << 20

SAMPLED, SAMPLE = 32, 16
"""Sequences of more elements are measured by some of them: measuring takes no longer than about a millisecond."""

P = ParamSpec("P")
T = TypeVar("T")

_NOT_OURS = (type, FunctionType, BuiltinFunctionType, ModuleType)
_PLAIN = {bool, int, float, str}


@dataclass(frozen=True)
class Size:
    """How large a value is: bytes of its small parts, and of each large one by its `id`, which others may share."""

    small: int
    large: dict[int, int]

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return self.small + sum(self.large.values())


def measure(value: object) -> Size:
    """Measure all that `value` reaches: arrays exactly, with what they are views of; long sequences by a sample."""
    large: dict[int, int] = {}
    return Size(_measure(value, large, set()), large)


def _measure(value: object, large: dict[int, int] | None, seen: set[int]) -> int:
    """Return the bytes of the small parts and note the large ones; without `large` all count."""
    total, left = 0, [value]  # of what is left to measure
    while left:  # a loop, because every new shape waits for it: calls would take several times as long
        value = left.pop()
        if value is None or id(value) in seen:
            continue
        seen.add(id(value))
        if type(value) in _PLAIN:
            total += sys.getsizeof(value)
        elif isinstance(value, np.ndarray):
            owner = value
            while isinstance(owner.base, np.ndarray):
                owner = owner.base
            total += sys.getsizeof(value) - (value.nbytes if value.base is None else 0)
            if large is None:
                total += owner.nbytes
            else:
                large[id(owner)] = owner.nbytes
        elif isinstance(value, tuple | list):
            own = sys.getsizeof(value)
            if len(value) <= SAMPLED:
                left += value
            else:
                some = value[:: len(value) // SAMPLE]
                own += sum(_measure(each, None, set()) for each in some) * len(value) // len(some)
            if len(value) <= SAMPLED or large is None:
                total += own
            else:
                large[id(value)] = own
        elif isinstance(value, dict):
            total += sys.getsizeof(value)
            left += [*value.keys(), *value.values()]
        elif not isinstance(value, (*_NOT_OURS, Cached)):
            total += sys.getsizeof(value, 0)
            left.append(getattr(value, "__dict__", None))
    return total


@dataclass(frozen=True)
class _Entry:
    value: Any
    size: Size


class Cache:
    """Keep values by their keys, in at most `limit` bytes together.

    Arrays and long sequences that several values share count once, for as long as one of them is here.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.nbytes = 0
        self._entries = OrderedDict[Hashable, _Entry]()
        self._sharers: dict[int, int] = {}
        self.lock = threading.RLock()
        """Held for a moment, in which no other lock is waited for."""

    def __len__(self) -> int:
        """Count the values."""
        return len(self._entries)

    def find(self, key: Hashable) -> _Entry | None:
        """Look a value up, which makes it the latest."""
        with self.lock:
            found = self._entries.get(key)
            if found is not None:
                self._entries.move_to_end(key)
            return found

    def keep(self, key: Hashable, value: object) -> None:
        """Keep a value as the latest one, unless it is too large, and let the oldest go for it."""
        entry = _Entry(value, measure((key, value)))
        if entry.size.total > self.limit // 2:
            return
        with self.lock:
            if key in self._entries:  # another thread was faster
                return
            self._entries[key] = entry
            self.nbytes += entry.size.small
            for part, nbytes in entry.size.large.items():
                self._sharers[part] = self._sharers.get(part, 0) + 1
                self.nbytes += nbytes if self._sharers[part] == 1 else 0
            while self.nbytes > self.limit:
                self._drop(next(iter(self._entries)))

    def forget(self, chosen: Callable[[Any], bool]) -> None:
        """Let go of all values whose keys are `chosen`."""
        with self.lock:
            for key in [key for key in self._entries if chosen(key)]:
                self._drop(key)

    def _drop(self, key: Hashable) -> None:
        size = self._entries.pop(key).size
        self.nbytes -= size.small
        for part, nbytes in size.large.items():
            self._sharers[part] -= 1
            if not self._sharers[part]:
                del self._sharers[part]
                self.nbytes -= nbytes


class _Passing(threading.local):
    """What this thread remembers only until the end of a block."""

    def __init__(self) -> None:
        self.values: dict[Hashable, Any] | None = None


_passing = _Passing()


@contextmanager
def in_passing() -> Iterator[None]:
    """What is made in the block, by this thread, is remembered until its end and no longer."""
    before, _passing.values = _passing.values, {}
    try:
        yield
    finally:
        _passing.values = before


class Cached(Generic[P, T]):
    """A function of hashable arguments that remembers what it gave in `CACHE`; made by `cached`."""

    __wrapped__: Callable[P, T]

    def __init__(self, make: Callable[P, T]) -> None:
        update_wrapper(self, make)

    def __call__(self, *given: P.args, **named: P.kwargs) -> T:
        """Return the remembered value, or compute it."""
        key = self, given, *named.items()
        found = CACHE.find(key)
        if found is not None:
            return found.value  # type: ignore[no-any-return]
        values = _passing.values
        if values is not None and key in values:
            return values[key]  # type: ignore[no-any-return]
        value = self.__wrapped__(*given, **named)
        if values is None:
            CACHE.keep(key, value)
        else:
            values[key] = value
        return value

    def cache_clear(self) -> None:
        """Forget all that this function gave."""
        CACHE.forget(lambda key: key[0] is self)


def cached(make: Callable[P, T]) -> Cached[P, T]:
    """Let a function remember what it gave: in `CACHE`, or where it runs `in_passing`, until the end of that."""
    return Cached(make)


def _limit(setting: str | None) -> int:
    """Read the setting."""
    if setting is None:
        return DEFAULT_BYTES
    if not setting.isdecimal():
        raise ValueError(f"{SETTING} must be a number of bytes, not {setting!r}")
    return int(setting)


CACHE = Cache(_limit(os.environ.get(SETTING)))
"""What this process remembers."""
