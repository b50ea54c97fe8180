"""Documents are bytes that are made once; metrics are made once for all who ask at the same time."""

from __future__ import annotations

import asyncio
import gzip
import threading
import time
from contextlib import ExitStack

import httpx
import pytest

from app.api.documents import Document
from app.replies.body import SMALL
from schemas.describe import describe, list_operations
from tests.app.bare import connected, replies
from tests.app.resident import Resident
from tests.app.samples import JSON
from tests.live import LiveService

PATHS = ["/openapi.json", "/openrpc.json", "/v1/ops", "/v1/ops/BiasAdd", "/docs", "/machine", "/web/base.css"]
EVERY_S = 0.05
"""How often the service makes its metrics at most."""
PLAIN = {"accept-encoding": "gzip;q=0, br"}


@pytest.mark.parametrize("path", PATHS)
def test_a_document_that_the_client_holds_is_not_sent_again(http: httpx.Client, path: str) -> None:
    """A document has a length and a tag, which gets 304, also if it is weak or in a list; gzip has another tag."""
    plain = http.get(path, headers=PLAIN)
    assert int(plain.headers["content-length"]) == len(plain.content)
    assert ("content-encoding" in plain.headers, plain.headers["vary"]) == (False, "accept-encoding")
    head = http.head(path, headers=PLAIN)
    assert (head.content, head.headers["content-length"]) == (b"", plain.headers["content-length"])
    packed = http.get(path, headers={"accept-encoding": "gzip"})
    assert (packed.content, packed.headers["content-encoding"]) == (plain.content, "gzip")
    assert int(packed.headers["content-length"]) == len(gzip.compress(plain.content, mtime=0))
    assert packed.headers["etag"] != plain.headers["etag"]
    for reply in (plain, packed):
        headers = PLAIN if reply is plain else {"accept-encoding": "gzip"}
        tag = reply.headers["etag"]
        for held in (tag, f"W/{tag}", f'"other", {tag}'):
            again = http.get(path, headers={**headers, "if-none-match": held})
            assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
        assert http.get(path, headers={**headers, "if-none-match": '"other"'}).status_code == 200


def test_descriptions_are_those_of_the_name(http: httpx.Client) -> None:
    """Each name of an operation has its own description, over HTTP and JSON-RPC."""
    for name in ("ConvolutionBackwardWeights", "ConvolutionBackpropFilters-1"):
        asked = {"jsonrpc": "2.0", "id": 1, "method": "ops.describe", "params": [name]}
        assert http.get(f"/v1/ops/{name}").json() == describe(name) == http.post("/rpc", json=asked).json()["result"]
    for path, method in (("/v1/ops", "ops.list"), ("/openrpc.json", "rpc.discover")):
        asked = {"jsonrpc": "2.0", "id": 1, "method": method}
        assert http.get(path).json() == http.post("/rpc", json=asked).json()["result"]
    assert http.get("/v1/ops").json() == list_operations()
    assert http.get("/v1/ops/Deconvolution").status_code == 404


async def test_a_document_is_made_once_and_in_a_thread() -> None:
    """Requests at once and later ones have the bytes of one making, which does not block the event loop."""
    makers: list[int] = []

    def make() -> bytes:
        makers.append(threading.get_ident())
        return b"document"

    document = Document(make, JSON)
    first = await asyncio.gather(*(document.content() for _ in range(100)))
    assert {id(content) for content in (*first, await document.content())} == {id(first[0])}
    assert len(makers) == 1
    assert makers[0] != threading.get_ident()


def test_metrics_are_made_once_for_all_who_ask(service: LiveService) -> None:
    """64 requests at once get the metrics of two makings: the second is for those who came after the first.

    On a busy machine they come later, and there are more makings, but none sooner than the service makes them again.
    """
    with ExitStack() as stack:
        sockets = [stack.enter_context(connected(service.url)) for _ in range(64)]
        began = time.monotonic()
        for sock in sockets:
            sock.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answers = [replies(sock, 1)[0] for sock in sockets]
    assert {status for status, _ in answers} == {200}
    assert len({body for _, body in answers}) <= 2 + (time.monotonic() - began) / EVERY_S


def test_a_client_that_does_not_read_holds_little(tight: Resident) -> None:
    """Of a large document, the service holds only a piece for a client that does not read it."""
    head = b"GET /docs/swagger-ui-bundle.js HTTP/1.1\r\nHost: localhost\r\n\r\n"
    size = len(httpx.get(f"{tight.url}/docs/swagger-ui-bundle.js").content)
    with connected(tight.url, little_room=True) as sock:
        sock.sendall(head * 16)  # more than the operating system's buffers take
        tight.until(lambda: any(each.transport.get_write_buffer_size() for each in tight.connections))
        unread = max(each.transport.get_write_buffer_size() for each in tight.connections)
        assert unread <= 2 * SMALL < size
        assert [len(body) for _, body in replies(sock, 16)] == [size] * 16
