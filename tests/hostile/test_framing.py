"""Requests that are invalid as HTTP: they are rejected or cut off, and other callers do not notice."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest

from app.http.protocol import MAX_HEAD
from tests.app import oip
from tests.app.bare import connected
from tests.app.resident import Resident
from tests.app.samples import JSON, NPY, document, parts, post, read, same_bits
from tests.hostile.apis import INPUTS, TINY
from tests.hostile.wire import chunked, head, read_all, request, status, talk
from tests.live import LiveService

REST = f"/v1/ops/{TINY.op}"
QUESTION = b'{"jsonrpc":"2.0","method":"ops.list","id":1}'
RPC_CALL = json.dumps({"jsonrpc": "2.0", "method": TINY.op, "params": document(TINY, INPUTS), "id": 1}).encode()
LAST = b"connection: close"


@pytest.fixture(autouse=True)
def the_next_call_works(http: httpx.Client) -> Iterator[None]:
    """After each of these tests a valid call returns the right bits."""
    yield
    assert same_bits(read(post(http, TINY, INPUTS, NPY)), TINY.expected(INPUTS))


def test_valid_requests_by_hand(service: LiveService) -> None:
    """The requests that the other tests corrupt are valid."""
    assert status(talk(service.url, request("/rpc", QUESTION, LAST))) == 200
    assert status(talk(service.url, head("/rpc", b"transfer-encoding: chunked", LAST) + chunked(QUESTION))) == 200


def test_blanks_around_a_value(service: LiveService) -> None:
    """Blanks around the value of a field are no part of it (RFC 9110, 5.5)."""
    reply = talk(service.url, request("/rpc", QUESTION, b"x-request-id: \t mine \t ", LAST))
    assert b"x-request-id: mine\r\n" in reply


LENGTHS = [
    b"10", b"-1", b"+44", b"0x2c", b"44, 44", b"", "٤٤".encode(), b"1" + b"0" * 5000, b"0" * 5000 + b"44",
    b"%d" % 2**64,
]  # fmt: skip
CODINGS = [b"identity", b"xchunked", b"chunked, gzip"]
RIGHT = b"content-length: 44"


@pytest.mark.parametrize(
    "lines",
    [
        *([b"content-length: " + length] for length in LENGTHS),
        *([b"transfer-encoding: " + coding] for coding in CODINGS),
        *([RIGHT, line] for line in (RIGHT, b"transfer-encoding: chunked", b"x-nul: a\0b")),
        [b"content-length : 44"],
        [RIGHT, b"x-folded: a", b" b"],
    ],
    ids=lambda lines: repr(lines)[1:40],
)
def test_invalid_lengths_and_headers(service: LiveService, lines: list[bytes]) -> None:
    """A body whose end is uncertain is rejected with 400, and nothing after it on the connection is answered."""
    reply = talk(service.url, head("/rpc", *lines) + QUESTION + request("/rpc", QUESTION))
    replies = [line for line in reply.split(b"\r\n") if b"HTTP/1.1" in line]
    assert replies[-1].endswith(b"400 Bad Request"), reply
    assert len(replies) <= 2
    assert b" 50" not in b"".join(replies)


@pytest.mark.parametrize(("zeros", "expected"), [(1, 200), (5000, 400), (9000, 400)])
def test_a_length_with_zeros(service: LiveService, zeros: int, expected: int) -> None:
    """A length may begin with a zero; no page is called where it has thousands."""
    before = len(service.log)
    reply = talk(service.url, head("/rpc", b"content-length: " + b"0" * zeros + b"%d" % len(QUESTION), LAST) + QUESTION)
    assert (status(reply), reply.count(b"HTTP/1.1 ")) == (expected, 1), reply
    assert (b"x-request-id" in reply) == (expected == 200)
    assert not [line for line in service.log[before:] if "Traceback" in line or "Error" in line]


@pytest.mark.parametrize(
    "name", ["content-type", "accept", "x-request-id", "content-encoding", "traceparent", "origin"]
)
@pytest.mark.parametrize("values", [(b"", b""), (b"a" * 9000, b","), (b"\xff\xfe", b';;;="""')], ids=range(3))
def test_repeated_and_malformed_headers(service: LiveService, name: str, values: tuple[bytes, bytes]) -> None:
    """No header value, nor a repeated header, causes a server error; a foreign origin may not call the service."""
    statuses = (200, 400, 403, 406, 415, 422) if name == "origin" else (200, 400, 406, 415, 422)
    lines = [name.encode() + b": " + value for value in values]
    for url in (REST, "/rpc", f"/v2/models/{TINY.op}/infer"):
        reply = talk(service.url, request(url, b"{}", *lines, LAST))
        assert status(reply) in statuses, reply


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"%X;name=value\r\n%s\r\n0;x\r\ntrailer: 1\r\n\r\n" % (len(QUESTION), QUESTION), 200),
        (b"0" * 5000 + b"%x\r\n%s\r\n000\r\n\r\n" % (len(QUESTION), QUESTION), 200),
        (b"".join(b"1\r\n%c\r\n" % byte for byte in QUESTION) + b"0\r\n\r\n", 200),
        (b"0\r\n\r\n", 200),
        (b"f" * 20 + b"\r\n" + QUESTION, 400),
        (b"-1\r\n" + QUESTION, 400),
        (b"zz\r\n" + QUESTION, 400),
        (b"%x\r\n%s0\r\n\r\n" % (len(QUESTION), QUESTION), 400),
    ],
)
def test_chunked_bodies(service: LiveService, body: bytes, expected: int) -> None:
    """Extensions, trailers, leading zeros and chunks of one byte are valid; sizes that are not numbers are not."""
    assert status(talk(service.url, head("/rpc", b"transfer-encoding: chunked", LAST) + body)) == expected


@pytest.mark.parametrize("piece", [b"x: " + b"a" * 1000 + b"\r\n", b"a" * 1000], ids=["many", "long"])
def test_a_head_without_end(service: LiveService, piece: bytes) -> None:
    """A head without an end is rejected once it is too long; the rest is not parsed."""
    with connected(service.url) as sock:
        sock.sendall(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nx: ")
        with pytest.raises(OSError, match=r"reset|Broken pipe"):
            sock.sendall(piece * 100_000)


def test_a_long_head_is_answered(service: LiveService) -> None:
    """A client that sends a head that is too long and waits for the answer gets one."""
    with connected(service.url) as sock:
        sock.sendall(b"GET /healthz HTTP/1.1\r\nx: ")
        for _ in range(17):  # only the last one is too much: the service does not close a connection while data arrives
            sock.sendall(b"a" * 1000)
        assert status(read_all(sock)) == 400


LONG = 60_000


@pytest.mark.parametrize(
    "lines", [[b"a:b"] * (LONG // 3), [b"x: " + b";" * LONG], [b"Accept: " + b";" * (LONG // 10)] * 10]
)
def test_long_heads(service: LiveService, lines: list[bytes]) -> None:
    """A head with more bytes than the limit, in one field or in many, is rejected, and the answer names the limit."""
    reply = talk(service.url, head("/healthz", LAST, *lines, method="GET"))
    assert status(reply) == 400
    assert b"exceeds %d bytes" % MAX_HEAD in reply
    shorter = b"x: " + b";" * (MAX_HEAD - 100)
    assert status(talk(service.url, head("/healthz", LAST, shorter, method="GET"))) == 200


@pytest.mark.parametrize("piece", ["a", "%", "%41", "/", "?a=1&", "/v1/ops/"])
def test_long_targets(service: LiveService, piece: str) -> None:
    """A target with more bytes than the limit is rejected before it is parsed."""
    target = "/" + piece * (LONG // len(piece))
    assert status(talk(service.url, head(target, LAST, method="GET"))) == 400
    shorter = "/" + piece * ((MAX_HEAD - 100) // len(piece))
    assert status(talk(service.url, head(shorter, LAST, method="GET"))) in (200, 404)


@pytest.mark.parametrize(
    ("method", "target", "expected"),
    [
        *(("GET", f"{origin}/healthz", 200) for origin in ("http://localhost", "HTTP://LOCALHOST")),
        *(("GET", target, 200) for target in ("http://localhost:1/healthz?a=b", "/healthz#x")),
        *(("GET", target, 400) for target in ("http://localhost", "http://localhost?x", "http://", "healthz")),
        *(("GET", target, 400) for target in ("http://[::1/healthz", f"http://localhost:{'9' * 20}/healthz")),
        *(("GET", target, 404) for target in ("*", "/%", "/%00", "/%ff%fe", "/v1/ops/%2e%2e%2fhealthz")),
        *(("CONNECT", target, 400) for target in ("localhost:80", "/healthz")),
        ("OPTIONS", "*", 404),
        ("PRI", "*", 400),
        ("QUERY", "/healthz", 405),
    ],
)
def test_targets(service: LiveService, method: str, target: str, expected: int) -> None:
    """Each form of a target is answered as HTTP says, or rejected, and nothing is logged as an error."""
    before = len(service.log)
    reply = talk(service.url, head(target, method=method) + head("/healthz", LAST, method="GET"))
    assert (status(reply), reply.count(b"HTTP/1.1 ")) == (expected, 1 if expected == 400 else 2), reply
    assert not [line for line in service.log[before:] if "Traceback" in line or "ERROR" in line]


@pytest.mark.parametrize(
    ("start", "piece"),
    [(b"0\r\n", b"a: b\r\n" * 1000), (b"0\r\na: ", b"a" * 6000), (b"1;", b"a" * 6000)],
    ids=["trailers", "long trailer", "extension"],
)
def test_trailers_and_extensions_without_end(service: LiveService, start: bytes, piece: bytes) -> None:
    """Trailers and extensions of chunks without an end are rejected like heads without an end."""
    with connected(service.url) as sock:
        sock.sendall(head("/rpc", b"transfer-encoding: chunked") + b"1\r\n{\r\n" + start)
        with pytest.raises(OSError, match=r"reset|Broken pipe"):
            sock.sendall(piece * 2000)


def test_trailers_are_no_headers(service: LiveService) -> None:
    """A trailer does not replace a header that is missing."""
    trailer = b"0\r\nx-request-id: trailer\r\n\r\n"
    body = chunked(QUESTION).removesuffix(b"0\r\n\r\n") + trailer
    reply = talk(service.url, head("/rpc", b"transfer-encoding: chunked", LAST) + body)
    assert status(reply) == 200
    assert b"x-request-id: trailer" not in reply


@pytest.mark.parametrize(
    "path", ["/rpc/", "/v1/ops/", f"{REST}/", "/healthz/", "//v1/ops", "/v1/../v1/ops", "/%2e%2e/"]
)
def test_no_redirect_to_the_requested_host(service: LiveService, path: str) -> None:
    """A path that nearly matches is not found, and no answer redirects to the host in the request."""
    reply = talk(service.url, head(path, LAST, method="GET"))
    assert status(reply) == 404
    assert b"location" not in reply


def _whole_requests() -> dict[str, bytes]:
    form = httpx.Request("POST", "http://localhost", files=parts(TINY, INPUTS))
    content, headers = oip.body(oip.head(TINY, INPUTS), INPUTS)
    return {
        "json": request(REST, json.dumps(document(TINY, INPUTS)).encode(), b"content-type: " + JSON.encode()),
        "multipart": request(REST, form.read(), b"content-type: " + form.headers["content-type"].encode()),
        "rpc": request("/rpc", RPC_CALL),
        "oip": request(
            f"/v2/models/{TINY.op}/infer", content, *(f"{name}: {value}".encode() for name, value in headers.items())
        ),
    }


@pytest.mark.parametrize("api", list(_whole_requests()))
def test_requests_that_stop_anywhere(resident: Resident, api: str) -> None:
    """A client that stops sending, wherever that is, gets no result, and afterwards nothing is held for it."""
    whole = _whole_requests()[api]
    for end in range(0, len(whole) - 4, 13):
        assert status(talk(resident.url, whole[:end], end=True)) in (0, 400), end
    assert status(talk(resident.url, whole.replace(b"host: localhost", LAST, 1))) == 200
    resident.until(lambda: not resident.service.admission.requests and not resident.service.segments.stats().used)


@pytest.mark.parametrize("api", list(_whole_requests()))
def test_bodies_that_are_cut_anywhere(resident: Resident, api: str) -> None:
    """A body truncated anywhere, with a length that matches, gets its API's error, and the connection stays open."""
    start, _, body = _whole_requests()[api].partition(b"\r\n\r\n")
    method, _, url = start.split(b"\r\n")[0].partition(b" ")
    headers = [line.decode().split(": ", 1) for line in start.split(b"\r\n")[3:]]
    path = url.split()[0].decode()
    with httpx.Client(base_url=resident.url, timeout=60.0) as client:
        for end in range(0, len(body.rstrip(b"\r\n")), 5):
            answer = client.request(method.decode(), path, content=body[:end], headers=dict(headers))
            found = answer.json()
            match api:
                case "rpc":
                    assert (answer.status_code, found["error"]["code"], found["id"]) == (200, -32700, None), end
                case "oip":
                    assert (answer.status_code, list(found)) == (400, ["error"]), end
                case _:
                    assert answer.status_code == found["status"] == 400, (end, found)
                    assert found["code"] in ("parse_error", "invalid_request"), end
    resident.until(lambda: not resident.service.admission.requests and not resident.service.segments.stats().used)
