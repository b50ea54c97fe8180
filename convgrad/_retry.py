"""When to ask again. Calls are pure, so that is always safe; the question is only whether it helps."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from convgrad._errors import (
    BrokenStream,
    ConnectFailed,
    ConvgradError,
    DeadlineExceeded,
    Overloaded,
    RateLimited,
    ShuttingDown,
)

__all__ = ["Budget", "Retry"]

# The service enforces the deadline itself; this long we wait for it to say so.
_GRACE = 2.0
_WORTH_IT = (ConnectFailed, Overloaded, RateLimited, ShuttingDown, BrokenStream)


@dataclass(frozen=True, slots=True)
class Retry:
    """Say how often and how long a client tries; all times are in seconds.

    A refused connection, a 429 or 503 and a connection that breaks are tried again, nothing else: not
    timeouts, which would only load the service twice. The wait doubles from `first_wait` to `longest_wait`,
    half of it by chance, and is never shorter than the service's Retry-After. No wait begins that would end
    after `budget`.
    """

    attempts: int = 5
    first_wait: float = 0.1
    longest_wait: float = 5.0
    budget: float = 30.0


class Budget:
    """Count the attempts and the time of one call, `deadline` seconds long where there is one."""

    def __init__(
        self, retry: Retry, deadline: float | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._retry = retry
        self._clock = clock
        self._made = 0
        self._over = math.inf if deadline is None else clock() + deadline
        self._last_start = min(self._over, clock() + retry.budget)

    def wait_after(self, error: ConvgradError) -> float:
        """Return the seconds to wait before the next attempt; raises `error` when there shall be none."""
        self._made += 1
        wait = max(self._backoff(), getattr(error, "retry_after", None) or 0.0)
        hopeless = not isinstance(error, _WORTH_IT) or self._made >= self._retry.attempts
        if hopeless or self._clock() + wait > self._last_start:
            raise error
        return wait

    def read_timeout(self, usual: float | None) -> float | None:
        """Return how long to wait for bytes: not past the deadline."""
        if self._over == math.inf:
            return usual
        left = max(0.0, self._over - self._clock()) + _GRACE
        return left if usual is None else min(usual, left)

    def check(self) -> None:
        """Raise `DeadlineExceeded` when the deadline is over."""
        if self._clock() > self._over + _GRACE:
            raise DeadlineExceeded("the deadline was over before the whole result had come")

    def _backoff(self) -> float:
        longest = min(self._retry.longest_wait, self._retry.first_wait * 2.0 ** (self._made - 1))
        # Jitter keeps clients that failed together from coming back together.
        return longest * random.uniform(0.5, 1.0)  # noqa: S311 - chance, not a secret
