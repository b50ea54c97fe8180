"""Malformed bodies: parts, files, content codings and base64, each with the error that it should get."""

from __future__ import annotations

import base64
import gzip
import io
import json
import zlib
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from tests.app import oip
from tests.app.resident import Resident
from tests.app.samples import JSON, NPY, document, npy, post, read, request_object, same_bits
from tests.hostile.apis import SECRET, TINY
from tests.hostile.wire import chunked, head, status, talk

INPUTS = TINY.inputs()
URL = f"/v1/ops/{TINY.op}"
REQUEST = json.dumps(request_object(TINY)).encode()


@pytest.fixture(autouse=True)
def the_next_call_works(http: httpx.Client) -> Iterator[None]:
    """After each of these tests a valid call on the same connections returns the right bits."""
    yield
    assert same_bits(read(post(http, TINY, INPUTS, NPY)), TINY.expected(INPUTS))


def part(name: str, content: bytes, *lines: str) -> bytes:
    """Return one part, its headers first."""
    told = [f'Content-Disposition: form-data; name="{name}"', *lines]
    return ("--X\r\n" + "\r\n".join(told) + "\r\n\r\n").encode() + content + b"\r\n"


GOOD = [part("request", REQUEST), *(part(name, npy(array)) for name, array in INPUTS.items())]
END = b"--X--\r\n"


def send(http: httpx.Client, body: bytes, kind: str = "multipart/form-data; boundary=X") -> httpx.Response:
    """Post a body as multipart."""
    answer = http.post(URL, content=body, headers={"content-type": kind})
    assert SECRET not in answer.text
    return answer


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"".join(GOOD) + END, 200),
        (b"\r\n" + b"".join(GOOD) + END + b"An epilogue.", 200),
        (b"A preamble.\r\n" + b"".join(GOOD) + END, 400),
        (GOOD[0] + GOOD[2] + GOOD[1] + END, 200),
        (b"".join(GOOD) + GOOD[1] + END, 422),
        (GOOD[0] * 2 + b"".join(GOOD[1:]) + END, 422),
        (b"".join(GOOD) + part(SECRET * 9, b"") + END, 422),
        (b"".join(GOOD) + part("", b"") + END, 422),
        (GOOD[0] + part("src", npy(INPUTS["src"]), "Content-Transfer-Encoding: base64") + END, 400),
        (GOOD[0] + part("src", b"", 'Content-Disposition: form-data; name="diff_dst"') + END, 422),
        (GOOD[0] + part("src", b"", *(f"X-{number}: a" for number in range(99))) + END, 400),
        (GOOD[0] + part("src", b"", "X: " + "a" * 9000) + END, 400),
        (GOOD[0] + part("src", b"", "X: \0") + END, 422),
        (GOOD[0] + b"--X\r\n\r\nno headers\r\n" + END, 400),
        (GOOD[0].replace(b"\r\n", b"\n") + END, 400),
        (b"".join(GOOD) + b"--X", 400),
        (b"".join(GOOD).replace(b"--X", b"--Y") + END, 400),
        (END, 400),
        (b"--X\r\n" * 9999, 400),
    ],
    ids=range(19),
)
def test_multipart_bodies(http: httpx.Client, body: bytes, expected: int) -> None:
    """Each part comes once, with plain headers and no transfer encoding; an epilogue is ignored."""
    answer = send(http, body)
    assert answer.status_code == expected, answer.text
    if expected != 200:
        assert answer.json()["status"] == expected


@pytest.mark.parametrize(
    "kind",
    [
        "multipart/form-data",
        "multipart/form-data; boundary=",
        f"multipart/form-data; boundary={'X' * 71}",
        "multipart/mixed; boundary=X",
        "multipart/form-data, application/json; boundary=X",
        "multipart/form-data; charset=utf-7; boundary=X",
    ],
)
def test_multipart_content_types(http: httpx.Client, kind: str) -> None:
    """A form without a valid boundary, or of another media type, is not read."""
    assert send(http, b"".join(GOOD) + END, kind).status_code == 415


def header(text: str, version: bytes = b"\1\0", length: int | None = None) -> bytes:
    """Return the head of a .npy file around a text."""
    size = len(text) if length is None else length
    return b"\x93NUMPY" + version + size.to_bytes(2 if version[0] == 1 else 4, "little") + text.encode()


def fields(descr: str = "'<f4'", order: str = "False", shape: str = "(1, 1, 4)", more: str = "") -> str:
    """Return the text of a header, each value as a Python literal."""
    return f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, {more}}}\n"


def pickled() -> bytes:
    """Return an array of objects, which would run code when loaded."""
    file = io.BytesIO()
    np.save(file, np.array([{SECRET: 1}], object), allow_pickle=True)
    return file.getvalue()


HEADS: dict[str, bytes] = {
    "objects": pickled(),
    "records": header(fields("[('a', '<f4'), ('b', '<i4')]")),
    "call": header(fields("__import__('os').system('true')")),
    "expression": header(fields(shape="(1, 1, 2 + 2)")),
    "negative": header(fields(shape="(-1, -1, 4)")),
    "float": header(fields(shape="(1., 1, 4)")),
    "bool": header(fields(shape="(True, True, 4)")),
    "list": header(fields(shape="[1, 1, 4]")),
    "number": header(fields(shape="4")),
    "nested": header(fields(shape="(" * 5000 + ")" * 5000)),
    "digits": header(fields(shape=f"({'9' * 5000},)")),
    "axes": header(fields(shape=f"({'1, ' * 5000})")),
    "order": header(fields(order="0")),
    "more": header(fields(more=f"'{SECRET}': 1")),
    "twice": header(fields(more="'shape': (1, 1, 4)")),
    "unicode": header(fields(shape="(\u0661, 1, 4)")),
    "unknown dtype": header(fields("'<f16'")),
    "strings": header(fields("'<U9'")),
    "no end": header(fields()[:-3]),
    "empty": header(""),
    "version 0": header(fields(), b"\0\0"),
    "version 9": header(fields(), b"\x09\0"),
    "length": header(fields(), b"\2\0", 2**32 - 1),
    "longer": header(fields(), length=9999),
    "magic": b"\x93NUMPZ\1\0" + header(fields())[8:],
    "zip": b"PK\x03\x04" + bytes(99),
    "nothing": b"",
}


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("api", ["part", "json"])
def test_invalid_npy_files(http: httpx.Client, api: str, name: str) -> None:
    """Headers that are not plain, or not of a supported tensor, are rejected early, and nothing in them is run."""
    content = HEADS[name] + INPUTS["src"].tobytes()
    if api == "part":
        answer = send(http, GOOD[0] + part("src", content) + GOOD[2] + END)
    else:
        body = document(TINY, INPUTS)
        body["inputs"]["src"] = {"npy": base64.b64encode(content).decode()}
        answer = http.post(URL, json=body)
    assert answer.status_code == (413 if name == "length" else 422), answer.text
    assert SECRET not in answer.text


@pytest.mark.parametrize(
    "data",
    [
        *("A", "AA", "AAA", "AAAA====", "=AAA", "A=AA", "AA=A", "AB==", "AAB=", "AA==AAAA"),
        *("AA AA", "AA\nAA", "AA-_", "\u00c1AAA", "\0AAA", "%41AAA", SECRET + "!AA"),
    ],
    ids=ascii,
)
@pytest.mark.parametrize("length", [0, 2000], ids=["short", "long"])
def test_invalid_base64(http: httpx.Client, data: str, length: int) -> None:
    """Text that is not canonical base64 is rejected, even at the end of a long string."""
    body = document(TINY, INPUTS)
    size = length // 4 * 3 + len(data) // 4 * 3 - data[-2:].count("=")
    body["inputs"]["src"] |= {"data": "A" * length + data, "dtype": "f32", "shape": [1, 1, max(size // 4, 1)]}
    answer = http.post(URL, json=body)
    assert answer.status_code == 422
    assert ["inputs", "src", "data"] in [found["loc"] for found in answer.json()["errors"]]
    assert SECRET not in answer.text


def binary() -> tuple[bytes, dict[str, str]]:
    """Return the right call for the binary API."""
    return oip.body(oip.head(TINY, INPUTS), INPUTS)


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_compression_bombs(resident: Resident, coding: str) -> None:
    """Decompression stops as soon as a body exceeds the limit, however large it would have become."""
    zeros = bytes(1 << 20)
    packer = zlib.compressobj(9, wbits=31 if coding == "gzip" else 15)
    bomb = packer.compress(b'{"inputs": [' + b" " * 1000) + b"".join(packer.compress(zeros) for _ in range(300))
    bomb += packer.flush()
    assert len(bomb) < 400_000
    with httpx.Client(base_url=resident.url, timeout=60.0) as client:
        for length in (1012, 400_000_000):
            answer = oip.post(client, TINY.op, bomb, {"content-encoding": coding, oip.HEAD_LENGTH: str(length)})
            assert answer.status_code == (400 if length == 1012 else 413)
            assert list(answer.json()) == ["error"]
    resident.until(lambda: not resident.service.admission.requests and not resident.service.segments.stats().used)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda packed: packed[:-1],
        lambda packed: packed[:-9],
        lambda packed: packed[:20],
        lambda packed: packed + b"x",
        lambda packed: packed[:-8] + bytes(8),
        lambda packed: packed[:2] + bytes(30),
        lambda packed: gzip.compress(packed),
        lambda packed: packed[:0],
    ],
    ids=range(8),
)
def test_broken_compressed_bodies(http: httpx.Client, spoil: Any) -> None:
    """A compressed body that is cut, corrupt or compressed twice is a client error."""
    content, headers = binary()
    packed = spoil(gzip.compress(content))
    answer = oip.post(http, TINY.op, packed, headers | {"content-encoding": "gzip"})
    assert (answer.status_code, list(answer.json())) == (400, ["error"])


@pytest.mark.parametrize("page", [URL, f"{URL}/validate", "/rpc"])
@pytest.mark.parametrize("coding", ["gzip", "br", "identity, gzip", "x", "chunked"])
def test_apis_without_content_codings(http: httpx.Client, page: str, coding: str) -> None:
    """APIs that take no content codings say so."""
    headers = {"content-type": JSON, "content-encoding": coding}
    assert http.post(page, content=gzip.compress(b"{}"), headers=headers).status_code == 415


@pytest.mark.parametrize(
    "value", ["0", "-1", "1", "x", "1e3", "", "1.0", "99999", "9" * 30, "\u0661".encode().decode("latin-1")]
)
def test_wrong_lengths_of_the_head(http: httpx.Client, value: str) -> None:
    """A length that is no number, or not that of the head, is a client error."""
    content, _ = binary()
    url = f"/v2/models/{TINY.op}/infer"
    lines = (
        f"inference-header-content-length: {value}".encode("latin-1"),
        b"transfer-encoding: chunked",
        b"connection: close",
    )
    reply = talk(str(http.base_url), head(url, *lines) + chunked(content))
    assert status(reply) == 400
    assert b'{"error":' in reply


@pytest.mark.parametrize(
    "name", ["content-type", "accept", "x-request-id", "content-encoding", "traceparent", "origin"]
)
@pytest.mark.parametrize("values", [(b"", b""), (b"a" * 9000, b","), (b"\xff\xfe", b';;;="""')], ids=range(3))
def test_repeated_and_malformed_headers(http: httpx.Client, name: str, values: tuple[bytes, bytes]) -> None:
    """No header value, nor a repeated header, causes a server error; a foreign origin may not call the service."""
    statuses = (200, 400, 403, 406, 415, 422) if name == "origin" else (200, 400, 406, 415, 422)
    lines = [name.encode() + b": " + value for value in values]
    for url in (URL, "/rpc", f"/v2/models/{TINY.op}/infer"):
        reply = talk(str(http.base_url), head(url, *lines, b"content-length: 2", b"connection: close") + b"{}")
        assert status(reply) in statuses, reply
