"""What the tests of the client share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from convgrad import Client, Retry
from tests.convgrad.server import Server, running

QUICK = Retry(attempts=3, first_wait=0.001, longest_wait=0.002, budget=5.0)


@pytest.fixture
def server() -> Iterator[Server]:
    """A server that speaks the contract."""
    server = Server()
    with running(server):
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    """A client of that server which does not wait long between attempts."""
    with Client(server.url, retry=QUICK) as client:
        yield client
