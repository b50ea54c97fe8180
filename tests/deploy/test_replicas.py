"""Two replicas behind nginx: calls of every API survive a rolling restart."""

from __future__ import annotations

import asyncio
import os
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.deploy.replicas import Replica, free_ports, passed_on, proxy
from tests.faults.chaos import CALLS, Tally, load, prepare_all

pytestmark = pytest.mark.skipif("CONVGRAD_NGINX" not in os.environ, reason="needs nginx: scripts/test-replicas runs it")

_CALLS = 2000
_CLIENTS = 8


@pytest.fixture
def replicas() -> Iterator[list[Replica]]:
    """Two replicas that are ready."""
    with ExitStack() as stack:
        yield [stack.enter_context(Replica(port)) for port in free_ports(2)]


class _RollingRestart(threading.Thread):
    """Restart the replicas one after the other until told to stop, and each at least once."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        super().__init__()
        self._replicas = replicas
        self._stop_soon = threading.Event()
        self.seconds: list[float] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            while not self._stop_soon.is_set():
                for replica in self._replicas:
                    begin = time.monotonic()
                    replica.restart()
                    self.seconds.append(time.monotonic() - begin)
        except BaseException as error:  # noqa: BLE001 - the test raises it
            self.error = error

    def stop(self) -> None:
        """End after this round."""
        self._stop_soon.set()
        self.join()
        if self.error is not None:
            raise self.error


@pytest.mark.timeout(1200)
def test_a_rolling_restart_loses_no_call(
    replicas: list[Replica], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of 2,000 or more calls by 8 clients that never retry all return the right bits while both replicas restart."""
    tally, restarting = Tally(), _RollingRestart(replicas)
    calls = prepare_all(CALLS) + 2 * prepare_all(CALLS[:1])
    with proxy(tmp_path, [each.port for each in replicas]) as url:
        begin = time.monotonic()
        restarting.start()
        try:
            asyncio.run(load(url, calls, tally, count=_CALLS, at_once=_CLIENTS))
            while restarting.is_alive() and len(restarting.seconds) < len(replicas):  # on a busy machine
                asyncio.run(load(url, calls, tally, count=100, at_once=_CLIENTS))
            took = time.monotonic() - begin
            during = len(restarting.seconds)
        finally:
            restarting.stop()
    with capfd.disabled():
        milliseconds = [1000 * each for each in statistics.quantiles(tally.seconds, n=100)]
        print(f"\ncalls: {tally.count} by {_CLIENTS} clients without retries, in {took:.1f} s")
        print(f"restarts during them: {during}, of {statistics.median(restarting.seconds):.1f} s (median)")
        print(
            f"lost: {len(tally.lost)}, wrong: {len(tally.wrong)}, passed on to another replica: {passed_on(tmp_path)}"
        )
        print(f"time of a call: median {milliseconds[49]:.0f} ms, p99 {milliseconds[98]:.0f} ms")
        print("\n".join(tally.lost[:5]))
    assert (tally.lost, tally.wrong) == ([], [])
    assert tally.right.total() >= _CALLS
    assert {status for each in replicas for status in each.statuses} == {0}


def test_metrics_are_not_public(replicas: list[Replica], tmp_path: Path) -> None:
    """nginx forwards health but no metrics, which would be those of any one replica."""
    with proxy(tmp_path, [each.port for each in replicas]) as url, httpx.Client(base_url=url) as client:
        assert [client.get(path).status_code for path in ("/healthz", "/readyz", "/metrics")] == [200, 200, 404]


def test_a_client_cannot_forge_its_address(tmp_path: Path) -> None:
    """A replica sees the client's own address, whatever `X-Forwarded-For` it sends."""
    forged = {"X-Forwarded-For": "203.0.113.9"}
    with Replica(*free_ports(1)) as replica, proxy(tmp_path, [replica.port]) as url:
        assert httpx.get(f"{url}/v1/ops", headers=forged).status_code == 200
    (line,) = [line for line in replica.logged if "/v1/ops" in line]
    assert "203.0.113.9" not in line
    assert "address=127.0.0.1" in line
