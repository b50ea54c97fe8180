"""Fixtures for the tests with malicious callers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.app.resident import Resident, resident_service


@pytest.fixture(scope="session")
def resident() -> Iterator[Resident]:
    """A service in this process, with small limits, so that a test can check what a call leaves behind."""
    with resident_service(workers=1, body_limit=4 << 20, memory_limit=64 << 20) as resident:
        yield resident
