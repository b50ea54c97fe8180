"""Fixtures and options shared by all tests."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import httpx
import pytest
from hypothesis import HealthCheck, settings

from tests.live import LiveService, running_service

# A busy machine must not fail a test: no deadline for examples or for generating them.
settings.register_profile("any-speed", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any-speed")

# Shells start what runs in the background without it, and what the tests start and interrupt would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that run the heavy tests."""
    parser.addoption("--all", dest="heavy", action="store_true", help="run the tests that are marked heavy, too")
    parser.addoption("--release", action="store_true", help="run the tests that are marked release, and heavy ones")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests that take long, unless an option is given or their file is named; spread the others."""
    named = {Path(argument.split("::")[0]).resolve() for argument in config.args}
    heavy: list[pytest.Item] = []
    others: list[pytest.Item] = []
    left: list[pytest.Item] = []
    for item in items:
        option = next((name for name in ("release", "heavy") if item.get_closest_marker(name)), None)
        if option is None:
            others.append(item)
        elif config.getoption(option) or config.getoption("release") or item.path in named:
            heavy.append(item)
        else:
            left.append(item)
    heavy.sort(key=_minutes, reverse=True)
    items[:] = _spread(heavy, others, getattr(config, "workerinput", {}).get("workercount", 1))
    if left:
        config.hook.pytest_deselected(items=left)


def _spread(heavy: list[pytest.Item], others: list[pytest.Item], processes: int) -> list[pytest.Item]:
    """Let each process begin with its share of the heavy tests, longest first.

    pytest-xdist gives each process an equal part of the list and moves tests that haven't started to those that are
    done, so that the short ones fill the time that is left.
    """
    spread: list[pytest.Item] = []
    total, short = len(heavy) + len(others), iter(others)
    for process in range(processes):
        part = (total - len(spread)) // (processes - process)
        mine = heavy[process::processes]
        spread += [*mine, *islice(short, max(0, part - len(mine)))]
    return spread


def _minutes(heavy: pytest.Item) -> int:
    marker = heavy.get_closest_marker("heavy")
    return marker.kwargs.get("minutes", 0) if marker else 0


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveService]:
    """The real service with a small spool for jobs, ready, in its own process; it has `url` and `pid`."""
    with running_service("--spool", str(tmp_path_factory.mktemp("spool")), "--spool-key-limit", "64MiB") as service:
        yield service


@pytest.fixture(scope="session")
def http(service: LiveService) -> Iterator[httpx.Client]:
    """A plain HTTP client for that service."""
    with httpx.Client(base_url=service.url, timeout=60.0) as client:
        yield client
