"""What small requests cost in memory: a service with little of it, and what its process takes at most."""

from __future__ import annotations

import gzip
import json
import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.app import oip
from tests.app.bare import connected
from tests.app.samples import FRAMES, JSON, NPY, SSE, Array, document, wait_for
from tests.live import LiveService, running_service
from tests.problems import Case

pytestmark = pytest.mark.heavy

MIB = 1 << 20
LIMIT = 512 * MIB
OP = "ConvTransposeBackwardWeights"
# What the process may take beside the pool's memory: its connections, and pages of the heap.
MARGIN = 24 * MIB
USED = 'bytes{state="used"}'


@contextmanager
def limited() -> Iterator[LiveService]:
    """Run a service with 512 MiB for tensors, in its own process."""
    with running_service("--memory-limit", str(LIMIT), "--workers", "2") as service:
        yield service


@pytest.fixture(scope="module")
def shared() -> Iterator[LiveService]:
    """The same service for several tests, which find its pool filled by those before."""
    with limited() as service:
        yield service


def memory(service: LiveService, name: str) -> int:
    """Return a figure of the process from `/proc`, in bytes."""
    (size,) = re.findall(rf"{name}:\s+(\d+) kB", Path(f"/proc/{service.pid}/status").read_text())
    return 1024 * int(size)


def pool(service: LiveService, name: str) -> float:
    """Return a figure of the pool from its metrics, in bytes."""
    page = httpx.get(f"{service.url}/metrics").text
    (size,) = re.findall(rf"^convgrad_shared_memory_{re.escape(name)} (.*)$", page, re.MULTILINE)
    return float(size)


def case(n: int, size: int, taps: int, channels: tuple[int, int]) -> Case:
    """Return a call whose output has taps x taps x channels numbers."""
    return Case(
        op=OP, n=n, src_channels=channels[0], dst_channels=channels[1], src_spatial=(size, size),
        dst_spatial=(size + taps - 1,) * 2, kernel=(taps, taps), data_format="NXC", weights_format="XOI",
    )  # fmt: skip


def inputs(case: Case) -> dict[str, Array]:
    """Return its inputs; the numbers of its output are long."""
    src, diff_dst = case.input_shapes.values()
    return {"src": np.full(src, 0.1, np.float32), "diff_dst": np.ones(diff_dst, np.float32)}


def call(*sizes: Any) -> dict[str, Any]:
    """Return the request object of such a call."""
    return document(case(*sizes), inputs(case(*sizes)))


def inference(*sizes: Any) -> dict[str, Any]:
    """Return the inference request of such a call, for its output as numbers and another one as bytes."""
    outputs = [{"name": "diff_weights"}, {"name": "diff_bias", "parameters": {"binary_data": True}}]
    return oip.head(case(*sizes), inputs(case(*sizes)), binary=False, outputs=outputs)


def read_some(sock: socket.socket) -> bytes:
    """Read the beginning of a reply, so that more of it has been made than the sockets hold."""
    found = b""
    while len(found) < 64 << 10:
        found += sock.recv(4096)
    return found


# Two tiles whose rows are not beside each other; JSON of 3.9 MB; many numbers in the head of a reply.
TILES, SHORT, NUMBERS = call(8, 4, 3, (512, 512)), call(1, 1, 1, (850, 850)), inference(1, 1, 1, (850, 850))
COMPUTE, INFER = f"/v1/ops/{OP}", f"/v2/models/{OP}/infer"


@pytest.mark.parametrize(
    ("path", "request_object", "accept", "clients"),
    [
        *((COMPUTE, TILES, accept, 40) for accept in (SSE, FRAMES, JSON, NPY, "multipart/form-data")),
        (COMPUTE, SHORT, JSON, 40),
        (INFER, NUMBERS, "*/*", 10),
    ],
)
def test_unread_replies_hold_little_beside_their_tensors(
    shared: LiveService, path: str, request_object: dict[str, Any], accept: str, clients: int
) -> None:
    """Clients that stop reading cost the outputs of their calls, which the memory limit counts, and a megabyte each."""
    body, before = json.dumps(request_object).encode(), memory(shared, "RssAnon")
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {JSON}\r\nAccept: {accept}\r\n"
    with ExitStack() as open_while:
        socks = [open_while.enter_context(connected(shared.url, little_room=True)) for _ in range(clients)]
        for sock in socks:
            sock.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        assert all(read_some(sock).startswith(b"HTTP/1.1 200") for sock in socks)
        # The calls have not ended: the memory limit would not count text that still waits to be sent.
        wait_for(lambda: pool(shared, USED) >= clients * 850 * 850 * 4)
        assert memory(shared, "RssAnon") - before < clients * MIB + MARGIN
    wait_for(lambda: pool(shared, USED) == 0)


def test_compressed_numbers_cost_little() -> None:
    """Numbers that inflate a thousandfold take no more memory than the longest JSON, with and without their shape."""
    described = json.dumps({"name": "src", "datatype": "FP32", "shape": [1, 1, 40 << 20]})[1:-1].encode()
    data = b'"data":[' + b"0," * ((40 << 20) - 1) + b"0]"
    with limited() as service:
        before = memory(service, "VmHWM")
        for members in ([described, data], [data, described]):
            body = gzip.compress(b'{"inputs":[{' + b",".join(members) + b"}]}")
            assert len(body) < 100_000
            for headers in ({}, {"inference-header-content-length": str(1 << 40)}):
                headers = headers | {"content-encoding": "gzip"}
                reply = httpx.post(f"{service.url}/v2/models/{OP}/infer", content=body, headers=headers, timeout=60)
                assert reply.status_code == 413, reply.text
                assert "at most" in reply.json()["error"]
        assert memory(service, "VmHWM") - before < 64 * MIB + MARGIN


def test_an_empty_batch_counts_with_its_result() -> None:
    """A few bytes whose result is large: beyond the limit nothing is allocated, below it the pool has all that is."""
    with limited() as service:
        url, before = f"{service.url}/v1/ops/{OP}", memory(service, "VmHWM")
        for accept in (SSE, FRAMES, JSON, NPY):
            refused = httpx.post(url, json=call(0, 4, 3, (4096, 4096)), headers={"accept": accept})
            assert (refused.status_code, refused.json()["reason"], refused.json()["limit"]) == (413, "memory", LIMIT)
        assert pool(service, "peak_bytes") == 0
        for accept in (SSE, FRAMES, JSON, NPY):
            given: dict[str, Any] = {"json": call(0, 4, 3, (4096, 2048)), "headers": {"accept": accept}}
            with httpx.stream("POST", url, **given, timeout=60) as reply:
                assert reply.status_code == 200
                second = httpx.post(url, **given)
                assert (second.status_code, second.json()["reason"]) == (503, "memory")
            wait_for(lambda: pool(service, USED) == 0)
        assert memory(service, "VmHWM") - before < LIMIT + MARGIN
