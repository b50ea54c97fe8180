"""Large bodies that are received directly into their memory, through real sockets, in pieces of every size."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx
import numpy as np
import pytest

from tests.app.bare import connected, form, replies, written
from tests.app.resident import Resident, resident_service
from tests.app.samples import NPY, parts
from tests.faults.apis import prepare
from tests.problems import Case

# 1.4 MB of tensors: enough to be received directly.
LARGE = Case(
    name="large", n=5, src_channels=16, dst_channels=16, src_spatial=(48, 48), dst_spatial=(48, 48), kernel=(3, 3),
    pads_begin=(1, 1), pads_end=(1, 1),
)  # fmt: skip
INPUTS = LARGE.inputs()
EXPECTED = LARGE.expected(INPUTS)
HEALTH = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def resident() -> Iterator[Resident]:
    """A service in this process."""
    with resident_service(workers=1) as resident:
        yield resident


def request(api: str) -> tuple[bytes, bytes]:
    """Return a request of `/v2` or `/v1`: head and body."""
    call = prepare("oip binary" if api == "binary" else "rest npy", LARGE, INPUTS, EXPECTED)
    return call.head(), call.content


@pytest.mark.parametrize("api", ["binary", "form"])
@pytest.mark.parametrize("seed", range(4))
def test_pieces_of_every_size(resident: Resident, api: str, seed: int) -> None:
    """However a body is split on its way, its result is right, and so is the next one on the same connection."""
    rng = random.Random(seed)
    head, body = request(api)
    with connected(resident.url) as sock:
        for _ in range(2):
            resident.run(resident.service.admission.idle())
            sock.sendall(head)
            resident.until(lambda: resident.service.admission.requests == 1)
            at = 0
            while at < len(body):
                size = rng.choice((1, 7, 100, 5000, 300_000))
                sock.sendall(body[at : at + size])
                at += size
            ((status, found),) = replies(sock, 1)
            assert status == 200, found
            assert found.endswith(EXPECTED.tobytes())


def test_data_that_begins_like_a_boundary(resident: Resident) -> None:
    """Of a body that is cut behind a line break that is data, what follows is not written over it."""
    value = np.float32(35.25)  # whose third byte is a line break
    inputs = {"src": np.full_like(INPUTS["src"], value), "diff_dst": np.ones_like(INPUTS["diff_dst"])}
    head, body = form(LARGE.op, parts(LARGE, inputs))
    cut = body.index(value.tobytes() * 2) + 4003
    with connected(resident.url) as sock:
        sock.sendall(head + body[:cut])
        resident.until(lambda: resident.service.segments.stats().used > 0)
        sock.sendall(body[cut:])
        ((status, found),) = replies(sock, 1)
    assert status == 200, found
    assert found.endswith(LARGE.expected(inputs).tobytes())


def test_bodies_that_arrive_together(resident: Resident) -> None:
    """Several bodies share the turns of the event loop; each result is right, and so are those of the next requests."""
    requests = [request("binary"), request("form")] * 4
    with ExitStack() as stack, ThreadPoolExecutor(len(requests)) as pool:
        socks = [stack.enter_context(connected(resident.url)) for _ in requests]
        for _ in range(3):
            list(pool.map(lambda sock, request: sock.sendall(b"".join(request)), socks, requests))
            for sock in socks:
                ((status, found),) = replies(sock, 1)
                assert status == 200, found
                assert found.endswith(EXPECTED.tobytes())


@pytest.mark.parametrize("api", ["binary", "form"])
def test_requests_behind_a_large_body(resident: Resident, api: str) -> None:
    """Data after the body on the connection is another request, even if everything is sent at once."""
    head, body = request(api)
    with connected(resident.url) as sock:
        sock.sendall(head + body + HEALTH + head + body + HEALTH)
        found = replies(sock, 4)
    assert [status for status, _ in found] == [200] * 4, [body[:600] for _, body in found]
    assert found[0][1].endswith(EXPECTED.tobytes())
    assert found[2][1].endswith(EXPECTED.tobytes())


@pytest.mark.parametrize("api", ["binary", "form"])
@pytest.mark.parametrize("share", [0.1, 0.4, 0.6, 0.99999])
def test_a_client_that_leaves_inside_its_body(resident: Resident, api: str, share: float) -> None:
    """Nothing is kept of an incomplete body."""
    head, body = request(api)
    with connected(resident.url) as sock:
        sock.sendall(head + body[: int(share * len(body))])
        resident.until(lambda: resident.service.admission.requests == 1)
    resident.run(resident.service.admission.idle())
    resident.until(lambda: resident.service.segments.stats().used == 0)


def test_a_part_that_ends_too_early(resident: Resident) -> None:
    """A file shorter than its header says is a client error, whether the connection stays open or not."""
    files = parts(LARGE, INPUTS)
    name, (file, data, kind) = files[1]
    files[1] = (name, (file, data[:-1000], kind))
    head, body = form(LARGE.op, files)
    with connected(resident.url) as sock:
        sock.sendall(head + body)
        ((status, found),) = replies(sock, 1)
    assert status in {400, 422}, found
    resident.run(resident.service.admission.idle())
    resident.until(lambda: resident.service.segments.stats().used == 0)


def test_a_refusal_in_the_middle(resident: Resident) -> None:
    """An unknown part after a large one is rejected; the rest of the body is read and discarded."""
    files = parts(LARGE, INPUTS)
    files.insert(2, ("else", ("else.npy", files[1][1][1], NPY)))
    head, body = form(LARGE.op, files)
    with connected(resident.url) as sock:
        sock.sendall(head + body)
        ((status, found),) = replies(sock, 1)
    assert status == 422, found
    assert b"there is no part else" in found
    resident.run(resident.service.admission.idle())
    resident.until(lambda: resident.service.segments.stats().used == 0)


@pytest.mark.parametrize("refused", ["before its body", "inside its body"])
def test_a_client_that_only_sends_reads_its_refusal(resident: Resident, refused: str) -> None:
    """30 MB of a rejected call are read without holding memory, and the answer comes before an orderly close."""
    large = bytes(30 << 20)
    if refused == "before its body":
        headers = {"content-type": "text/plain"}
        head, body = written(
            httpx.Request("POST", f"http://localhost/v1/ops/{LARGE.op}", content=large, headers=headers)
        )
    else:
        first, *others = parts(LARGE, INPUTS)
        head, body = form(LARGE.op, [first, ("else", ("else.npy", large, NPY)), *others])
    with connected(resident.url) as sock:
        sock.sendall(head + body[: len(body) // 2])
        resident.until(lambda: resident.service.admission.requests == 0 and resident.service.segments.stats().used == 0)
        sock.sendall(body[len(body) // 2 :])
        ((status, found),) = replies(sock, 1)
        assert status in {415, 422}, found
        assert sock.recv(1) == b""
