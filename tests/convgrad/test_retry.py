"""When a call is retried, with a clock that the tests advance."""

from __future__ import annotations

import pytest

from convgrad import (
    BrokenStream,
    ConnectFailed,
    ConvgradError,
    DeadlineExceeded,
    InternalError,
    InvalidParams,
    Overloaded,
    RateLimited,
    Retry,
    ShuttingDown,
    TimedOut,
    WorkerLost,
)
from convgrad._retry import Budget


class Clock:
    """A clock that shows the time set by a test."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


@pytest.mark.parametrize("cls", [ConnectFailed, Overloaded, RateLimited, ShuttingDown, BrokenStream])
def test_transient_errors_are_retried(cls: type[ConvgradError]) -> None:
    """Temporary rejections and broken connections allow another attempt."""
    assert Budget(Retry()).wait_after(cls("x")) > 0


@pytest.mark.parametrize("cls", [TimedOut, InvalidParams, InternalError, WorkerLost, DeadlineExceeded])
def test_permanent_errors_are_not_retried(cls: type[ConvgradError]) -> None:
    """Timeouts, and errors that would occur again, are raised at once."""
    error = cls("x")
    with pytest.raises(cls) as caught:
        Budget(Retry()).wait_after(error)
    assert caught.value is error


def test_waits_double_up_to_the_longest() -> None:
    """Each wait is between half and all of a length that doubles up to the maximum."""
    budget = Budget(Retry(attempts=7, first_wait=1.0, longest_wait=8.0, budget=100.0), clock=Clock())
    for longest in (1, 2, 4, 8, 8, 8):
        assert longest / 2 <= budget.wait_after(ConnectFailed("x")) <= longest
    with pytest.raises(ConnectFailed):
        budget.wait_after(ConnectFailed("x"))


def test_no_wait_ends_after_the_budget() -> None:
    """A wait that would end after the budget, or after the call's deadline, is not started."""
    for retry, deadline in ((Retry(budget=10), None), (Retry(budget=100), 10.0)):
        clock = Clock()
        budget = Budget(retry, deadline, clock=clock)
        clock.now += 5
        assert budget.wait_after(Overloaded("x", retry_after=4)) == 4
        clock.now += 4
        with pytest.raises(Overloaded):
            budget.wait_after(Overloaded("x", retry_after=4))


def test_the_deadline_bounds_reading() -> None:
    """Reading times out at the deadline plus the time that the service needs to report it."""
    clock = Clock()
    budget = Budget(Retry(), 10.0, clock=clock)
    assert budget.read_timeout(None) == 12.0
    assert budget.read_timeout(3.0) == 3.0
    budget.check()
    clock.now += 11
    assert budget.read_timeout(60.0) == 2.0
    budget.check()
    clock.now += 2
    with pytest.raises(DeadlineExceeded):
        budget.check()


def test_a_starting_service_is_waited_out() -> None:
    """While the service starts, attempts don't count, for as long as `startup` says; then they do."""
    clock = Clock()
    began, budget = clock.now, Budget(Retry(attempts=2, startup=60.0, budget=5.0), clock=clock)
    starting = Overloaded("starting", data={"reason": "starting", "retry_after": 2.0})
    for _ in range(25):
        clock.now += budget.wait_after(starting)
    assert clock.now == began + 50.0
    budget.wait_after(Overloaded("full", data={"reason": "queue"}))
    with pytest.raises(Overloaded, match="full"):
        budget.wait_after(Overloaded("full", data={"reason": "queue"}))
    late = Budget(Retry(startup=60.0), clock=clock)
    clock.now += 59.0
    with pytest.raises(Overloaded, match="starting"):
        late.wait_after(starting)
    with pytest.raises(Overloaded, match="starting"):
        Budget(Retry(attempts=1)).wait_after(starting)
