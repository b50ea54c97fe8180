"""The memory cost of one large call: its tensors once plus a constant, through every API."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

import httpx
import pytest

from benchmarks.service_servers import PeakMemory
from benchmarks.startup import held_mib
from tests.faults.leaving import prepared
from tests.live import running_service
from tests.problems import Case

MIB = 2**20
BOUND_MIB = 64
CASE = Case(
    name="memory", n=16, src_channels=64, dst_channels=64, src_spatial=(56, 56), dst_spatial=(56, 56), kernel=(3, 3),
    pads_begin=(1, 1), pads_end=(1, 1),
)  # fmt: skip
TENSORS_MIB = 4 * (prod(CASE.src_shape) + prod(CASE.dst_shape) + prod(CASE.weights_shape)) / MIB


@dataclass
class Watched:
    """A service in its own processes, and the memory it used before the first large call."""

    url: str
    pid: int
    idle_mib: float


@pytest.fixture(scope="module")
def watched() -> Iterator[Watched]:
    """A service with two workers that have answered some small calls."""
    small = prepared("rest json", replace(CASE, n=4, src_channels=16, dst_channels=16))  # large enough for workers
    with running_service("--workers", "2") as service:
        with httpx.Client(base_url=service.url, timeout=60.0) as http:
            for _ in range(20):
                assert http.post(small.path, content=small.content, headers=small.headers).status_code == 200
        yield Watched(service.url, service.pid, held_mib(service.pid))


@pytest.mark.heavy
@pytest.mark.parametrize("api", ["oip binary", "rest frames", "rest json", "rpc json"])
def test_a_large_call_costs_its_tensors_once(watched: Watched, api: str) -> None:
    """All processes together never use more than at rest plus the call's tensors once plus 64 MiB.

    Beside those of JSON there may be its text, and the strings of that.
    """
    call = prepared(api, CASE)
    with (
        httpx.Client(base_url=watched.url, timeout=60.0) as http,
        PeakMemory(lambda: held_mib(watched.pid), every_s=0.005) as watch,
    ):
        for _ in range(3):
            response = http.post(call.path, content=call.content, headers=call.headers)
            assert response.status_code == 200, response.text[:500]
            assert api != "rpc json" or "result" in response.json()
    over = watch.peak - watched.idle_mib
    print(f"{api}: {over:.1f} MiB over idle, tensors {TENSORS_MIB:.1f} MiB")
    text = 2 * len(call.content) / MIB if "json" in api else 0.0
    assert TENSORS_MIB / 2 < over < TENSORS_MIB + text + BOUND_MIB
