"""The shared control page: what one side writes, the other side reads."""

from __future__ import annotations

import os

from app.pool.buffers import anonymous_file
from app.pool.control import ControlPage


def test_a_stop_does_not_affect_later_units() -> None:
    """The flag names the last serial to stop, so a unit that comes after it is not stopped."""
    descriptor = anonymous_file()
    server, worker = ControlPage.create(descriptor), ControlPage(descriptor)
    os.close(descriptor)
    assert not worker.stops(1)
    server.stop(2)
    assert worker.stops(1)
    assert worker.stops(2)
    assert not worker.stops(3)
    server.close()
    worker.close()


def test_heartbeats_are_seen_on_the_other_side() -> None:
    """The server reads the number of the worker's heartbeats."""
    descriptor = anonymous_file()
    server, worker = ControlPage.create(descriptor), ControlPage(descriptor)
    os.close(descriptor)
    worker.beat()
    worker.beat()
    assert server.beats == 2
    server.close()
    worker.close()


def test_the_answer_to_a_probe_is_seen_on_the_other_side() -> None:
    """The server reads which probe the worker answered last; at first there is none."""
    descriptor = anonymous_file()
    server, worker = ControlPage.create(descriptor), ControlPage(descriptor)
    os.close(descriptor)
    assert server.answered == 0
    worker.answer(7)
    assert server.answered == 7
    assert server.beats == 0
    server.close()
    worker.close()
