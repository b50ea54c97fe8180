"""The shared page: what one side writes the other side reads."""

from __future__ import annotations

import os

from app.pool.buffers import anonymous_file
from app.pool.control import ControlPage


def test_a_stop_reaches_only_the_unit_that_it_names() -> None:
    """The flag names a serial, so a unit that comes after the stopped one is not stopped."""
    descriptor = anonymous_file()
    server, worker = ControlPage.create(descriptor), ControlPage(descriptor)
    os.close(descriptor)
    assert not worker.stops(1)
    server.stop(1)
    assert worker.stops(1)
    assert not worker.stops(2)
    server.close()
    worker.close()


def test_heartbeats_are_seen_on_the_other_side() -> None:
    """The server reads how often the worker showed that it is alive."""
    descriptor = anonymous_file()
    server, worker = ControlPage.create(descriptor), ControlPage(descriptor)
    os.close(descriptor)
    worker.beat()
    worker.beat()
    assert server.beats == 2
    server.close()
    worker.close()
