"""The plugin for pytest, found by its entry point: a client that computes in the process of the tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from convgrad._local import LocalClient

__all__ = ["convgrad_client"]


@pytest.fixture(scope="session")
def convgrad_client() -> Iterator[LocalClient]:
    """A client that computes in this process (`convgrad.local`)."""
    from convgrad._local import local

    with local(progress=False) as client:
        yield client
