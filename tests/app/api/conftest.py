"""Fixtures shared by the tests of the APIs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import convgrad
from tests.live import LiveService


@pytest.fixture
def client(service: LiveService) -> Iterator[convgrad.Client]:
    """The Python client of the service."""
    with convgrad.Client(service.url) as client:
        yield client
