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
    if value is None or isinstance(value, (*_NOT_OURS, Cached)) or id(value) in seen:
        return 0
    seen.add(id(value))
    if isinstance(value, np.ndarray):
        header = sys.getsizeof(value) - (value.nbytes if value.base is None else 0)
        owner = value
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        if large is None:
            return header + owner.nbytes
        large[id(owner)] = owner.nbytes
        return header
    own = sys.getsizeof(value, 0)
    if isinstance(value, tuple | list):
        if len(value) <= SAMPLED:
            return own + sum(_measure(each, large, seen) for each in value)
        some = value[:: len(value) // SAMPLE]
        own += sum(_measure(each, None, set()) for each in some) * len(value) // len(some)
        if large is None:
            return own
        large[id(value)] = own
        return 0
    if isinstance(value, dict):
        return own + sum(_measure(each, large, seen) for pair in value.items() for each in pair)
    held = getattr(value, "__dict__", None)
    return own + (_measure(held, large, seen) if held else 0)


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
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Count the values."""
        return len(self._entries)

    def find(self, key: Hashable) -> _Entry | None:
        """Look a value up, which makes it the latest."""
        with self._lock:
            found = self._entries.get(key)
            if found is not None:
                self._entries.move_to_end(key)
            return found

    def keep(self, key: Hashable, value: object) -> None:
        """Keep a value as the latest one, unless it is too large, and let the oldest go for it."""
        entry = _Entry(value, measure((key, value)))
        if entry.size.total > self.limit // 2:
            return
        with self._lock:
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
        with self._lock:
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
