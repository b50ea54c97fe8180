"""The lab, and a service's engine in it; without the lab, which needs root, the tests are left out."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.app.cluster.site import Site
from tests.cluster.lab import HEAD, Lab


def pytest_ignore_collect() -> bool | None:
    """Leave these tests out unless `scripts/test-cluster` runs them."""
    return None if "CLUSTER_LAB" in os.environ else True


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    """Two nodes, both running."""
    made = Lab()
    try:
        made.start(1)
        made.start(2)
        yield made
    finally:
        made.close()


@pytest.fixture(scope="session")
def measured(lab: Lab) -> dict[str, float]:
    """The constants of the cost model, measured between the two nodes before an engine takes the processors."""
    command = [sys.executable, "-m", "benchmarks.cluster", "--address", HEAD]
    lines = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout.splitlines()
    assert lines[-5] == "another node"
    return {name: float(value) for name, value in map(str.split, lines[-4:])}


@pytest.fixture(scope="session")
def session_site(lab: Lab, measured: dict[str, float]) -> Iterator[Site]:
    """An engine on node 1."""
    with Site.open(HEAD) as made:
        yield made


@pytest.fixture
def site(session_site: Site, lab: Lab) -> Iterator[Site]:
    """The engine with both nodes whole before the test, whatever the last one broke."""
    session_site.whole()
    yield session_site
    lab.mend(2)
    if not lab.pids(2):
        lab.start(2)
