"""The server's end of a socket: order, back-pressure, descriptors, and the end of the stream."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable

import pytest
import uvloop

from app.pool import messages
from app.pool.channel import Channel
from app.pool.messages import Forget, Hello, Message, MessageDecoder, Spawn
from tests.app.pool.proc import descriptors, opened_since, target

Scenario = Callable[[], Awaitable[None]]


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Scenario], None]:
    """Run a scenario on either event loop."""

    def runner(scenario: Scenario) -> None:
        with asyncio.Runner(loop_factory=request.param) as loop:

            async def bounded() -> None:
                async with asyncio.timeout(30):
                    await scenario()

            loop.run(bounded())

    return runner


def test_messages_sent_before_the_end_are_delivered(run: Callable[[Scenario], None]) -> None:
    """All messages are delivered first, then the end, once."""

    async def scenario() -> None:
        got: list[Message | str] = []
        over = asyncio.Event()

        def ended() -> None:
            got.append("end")
            over.set()

        channel = Channel(lambda message, _: got.append(message), ended)
        messages.send(channel.peer, Hello())
        messages.send(channel.peer, Spawn(1))
        channel.hand_over()
        await over.wait()
        channel.drain()
        assert got == [Hello(), Spawn(1), "end"]
        channel.close()
        channel.close()

    run(scenario)


def test_a_peer_that_does_not_read_does_not_block(run: Callable[[Scenario], None]) -> None:
    """Messages that do not fit the socket are queued with copies of their descriptors, and all arrive in order."""

    async def scenario() -> None:
        channel = Channel(lambda *_: None, lambda: None)
        bulk = Forget(tuple(range(100_000)))
        for number in range(6):
            descriptor = os.memfd_create(f"bulk-{number}")
            channel.send(bulk, [descriptor])
            os.close(descriptor)  # at once: a queued message has a copy
        channel.send(Hello())

        def read() -> list[str]:
            decoder, names = MessageDecoder(), []
            for _ in range(6):
                found = messages.receive(channel.peer, decoder)
                assert found is not None
                assert found[0] == bulk
                names += [target(number).split()[0] for number in found[1]]
                for number in found[1]:
                    os.close(number)
            assert messages.receive(channel.peer, decoder) == (Hello(), [])
            return names

        assert await asyncio.to_thread(read) == [f"/memfd:bulk-{number}" for number in range(6)]
        channel.close()

    run(scenario)


def test_closing_closes_every_descriptor(run: Callable[[Scenario], None]) -> None:
    """Descriptors that were not sent yet are closed with the channel; sending afterwards does nothing."""

    async def scenario() -> None:
        await asyncio.sleep(0)
        before = descriptors()
        channel = Channel(lambda *_: None, lambda: None)
        for _ in range(6):
            descriptor = os.memfd_create("bulk")
            channel.send(Forget(tuple(range(100_000))), [descriptor])
            os.close(descriptor)
        channel.close()
        channel.send(Hello())
        assert not opened_since(before)

    run(scenario)


def test_sending_to_a_dead_peer_does_not_raise(run: Callable[[Scenario], None]) -> None:
    """Messages to a dead peer are dropped; the end of the stream reports its death."""

    async def scenario() -> None:
        over = asyncio.Event()
        channel = Channel(lambda *_: None, over.set)
        channel.hand_over()
        channel.send(Hello())
        await over.wait()
        channel.close()

    run(scenario)
