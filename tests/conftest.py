"""What tests of every folder share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from hypothesis import HealthCheck, settings

from tests.live import LiveService, running_service

# A busy machine is no fault of the code: no limits of time for examples, or for making them.
settings.register_profile("any-speed", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any-speed")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that runs heavy tests."""
    parser.addoption("--all", dest="heavy", action="store_true", help="run the tests that are marked heavy, too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave heavy tests out, unless all are wanted or their file is named.

    Otherwise they come at both ends, the longest first, for pytest-xdist shares a list out in pieces and then moves
    what nobody has begun: two that take minutes should not wait for each other at the end of a run.
    """
    named = {Path(argument.split("::")[0]).resolve() for argument in config.args}
    heavy: list[pytest.Item] = []
    others: list[pytest.Item] = []
    left: list[pytest.Item] = []
    for item in items:
        if not item.get_closest_marker("heavy"):
            others.append(item)
        elif config.getoption("heavy") or item.path in named:
            heavy.append(item)
        else:
            left.append(item)
    heavy.sort(key=_minutes, reverse=True)
    items[:] = heavy[::2] + others + heavy[1::2]
    if left:
        config.hook.pytest_deselected(items=left)


def _minutes(heavy: pytest.Item) -> int:
    marker = heavy.get_closest_marker("heavy")
    return marker.kwargs.get("minutes", 0) if marker else 0


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
