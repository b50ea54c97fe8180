"""Fixtures for the client's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import convgrad
from convgrad import Client, Retry
from tests.convgrad.server import Server, running

QUICK = Retry(attempts=3, first_wait=0.001, longest_wait=0.002, budget=5.0)


@pytest.fixture
def server() -> Iterator[Server]:
    """A server that follows the contract."""
    server = Server()
    with running(server):
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    """A client for that server, with short waits between attempts."""
    with Client(server.url, retry=QUICK) as client:
        yield client


@pytest.fixture(scope="module", params=["service", "process"])
def live(request: pytest.FixtureRequest) -> Iterator[Client]:
    """A client of the real service, and one that computes in this process: they are exchangeable."""
    where = convgrad.local() if request.param == "process" else Client(request.getfixturevalue("service").url)
    with where as client:
        yield client
