"""When to retry. Every call may be repeated except the one that begins a sealed check (`Request.repeatable`)."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Union

from convgrad._errors import (
    BrokenStream,
    ConnectFailed,
    ConvgradError,
    DeadlineExceeded,
    Overloaded,
    RateLimited,
    ShuttingDown,
)

if TYPE_CHECKING:
    import httpx

__all__ = ["DEFAULT_TIMEOUT", "DEFAULT_URL", "Budget", "Retry", "Timeout"]

DEFAULT_URL = "http://127.0.0.1:8000"

Timeout = Union[float, tuple[float, float, float, float], "httpx.Timeout", None]
"""Seconds for everything, or for connecting, reading, writing and a free connection, as httpx has them."""

DEFAULT_TIMEOUT: Timeout = (5.0, 330.0, 60.0, 60.0)
"""A computation may be silent for as long as the service lets it run, by default five minutes."""

# The service enforces the deadline itself; we wait this much longer for its error.
_GRACE = 2.0
_RETRIED = (ConnectFailed, Overloaded, RateLimited, ShuttingDown, BrokenStream)


@dataclass(frozen=True, slots=True)
class Retry:
    """How often and how long a client retries; all times are in seconds.

    Only failed and broken connections and the statuses 429, 502 and 503 are retried, not timeouts, which would load the
    service twice. The wait doubles from `first_wait` to `longest_wait`, is shortened at random by up to a half, and is
    at least the service's Retry-After. The client never waits past `budget` seconds after the first attempt. While the
    service is starting, which takes up to a minute if it has to compile its kernels, the client waits up to `startup`
    seconds; these attempts don't count.
    """

    attempts: int = 5
    first_wait: float = 0.1
    longest_wait: float = 5.0
    budget: float = 30.0
    startup: float = 120.0


class Budget:
    """The attempts and the time left for one call; `deadline` is in seconds."""

    def __init__(
        self, retry: Retry, deadline: float | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._retry = retry
        self._clock = clock
        self._made = 0
        self._begun = clock()
        self._over = math.inf if deadline is None else clock() + deadline
        self._last_start = min(self._over, clock() + retry.budget)

    def wait_after(self, error: ConvgradError) -> float:
        """Return the seconds to wait before the next attempt; raises `error` when no attempt is left."""
        if self._retry.attempts > 1 and error.data.get("reason") == "starting":
            wait = max(self._retry.first_wait, getattr(error, "retry_after", None) or 0.0)
            if self._clock() + wait > min(self._over, self._begun + self._retry.startup):
                raise error
            self._last_start = min(self._over, self._clock() + wait + self._retry.budget)
            return wait
        self._made += 1
        wait = max(self._backoff(), getattr(error, "retry_after", None) or 0.0)
        is_full = str(error.data.get("reason")).startswith("spool")  # until jobs are deleted, or expire
        final = not isinstance(error, _RETRIED) or is_full or self._made >= self._retry.attempts
        if final or self._clock() + wait > self._last_start:
            raise error
        return wait

    def read_timeout(self, usual: float | None) -> float | None:
        """Return how long to wait for data: `usual`, but not past the deadline."""
        if self._over == math.inf:
            return usual
        left = max(0.0, self._over - self._clock()) + _GRACE
        return left if usual is None else min(usual, left)

    def check(self) -> None:
        """Raise `DeadlineExceeded` if the deadline has passed."""
        if self._clock() > self._over + _GRACE:
            raise DeadlineExceeded("the deadline passed before the whole result arrived")

    def _backoff(self) -> float:
        longest = min(self._retry.longest_wait, self._retry.first_wait * 2.0 ** (self._made - 1))
        # Jitter keeps clients that failed together from retrying together.
        return longest * random.uniform(0.5, 1.0)  # noqa: S311 - not a secret
