"""What tests of every folder share."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.live import LiveService, running_service


@pytest.fixture(scope="session")
def service() -> Iterator[LiveService]:
    """The real service in a process of its own, ready; it has `url` and `pid`."""
    with running_service() as service:
        yield service


@pytest.fixture(scope="session")
def http(service: LiveService) -> Iterator[httpx.Client]:
    """A plain HTTP client of that service."""
    with httpx.Client(base_url=service.url, timeout=60.0) as client:
        yield client
