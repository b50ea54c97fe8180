"""What is made once for many requests: what clients' texts mean, and values that they wait for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from app.caching import Shared, cached_if_short


def test_short_texts_are_cached_and_long_ones_are_not() -> None:
    """A function of texts is called once for the same short ones, and each time for more than 256 characters."""
    calls = []

    @cached_if_short
    def joined(one: str, two: str) -> str:
        calls.append((one, two))
        return one + two

    short, long = ("a" * 255, "b"), ("a" * 256, "b")
    for texts in (short, long, short, long):
        assert joined(*texts) == "".join(texts)
    assert calls == [short, long, long]


def test_errors_are_not_cached() -> None:
    """A text that is refused is refused again."""

    @cached_if_short
    def refuse(text: str) -> str:
        raise ValueError(text)

    for _ in range(2):
        with pytest.raises(ValueError, match="x"):
            refuse("x")


async def test_a_value_is_made_again_after_its_time_only() -> None:
    """Requests that come too soon wait, share the next making, and get what is newer than themselves."""
    times: list[float] = []
    loop, every = asyncio.get_running_loop(), 0.05

    async def make() -> float:
        times.append(loop.time())
        return times[-1]

    shared = Shared(make, every)
    first = await shared.get()
    asked = loop.time()
    assert set(await asyncio.gather(*(shared.get() for _ in range(100)))) == {times[1]}
    assert times[1] >= max(asked, first + every)
    assert len(times) == 2


async def test_the_first_to_ask_may_leave() -> None:
    """A request that ends while the value is made does not end the making for the others."""
    may_end = asyncio.Event()

    async def make() -> str:
        await may_end.wait()
        return "made"

    shared = Shared(make)
    first, second = (asyncio.create_task(shared.get()) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    may_end.set()
    assert await second == "made"


async def test_a_failure_is_not_kept() -> None:
    """All who wait get the error; the next request tries again."""
    answers: Iterator[str | MemoryError] = iter([MemoryError(), "made"])

    async def make() -> str:
        answer = next(answers)
        if isinstance(answer, MemoryError):
            raise answer
        return answer

    shared = Shared(make)
    failed = await asyncio.gather(shared.get(), shared.get(), return_exceptions=True)
    assert [type(each) for each in failed] == [MemoryError, MemoryError]
    assert await shared.get() == "made"


def test_event_loops_do_not_wait_for_each_other() -> None:
    """A value that another event loop began, and may never end, is made again."""
    begun: list[int] = []

    async def make() -> str:
        begun.append(threading.get_ident())
        if len(begun) == 1:
            await asyncio.Event().wait()
        return "made"

    shared = Shared(make)
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(shared.get(), 0.01))
    assert asyncio.run(shared.get()) == "made"
