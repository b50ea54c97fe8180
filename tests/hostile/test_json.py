"""JSON that is invalid, or valid but unusual: all APIs agree on it, and no error repeats its content."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.app.samples import JSON, NPY, document, post, read, same_bits
from tests.hostile.apis import SECRET, TINY

INPUTS = TINY.inputs()
PAGES = (f"/v1/ops/{TINY.op}", f"/v1/ops/{TINY.op}/validate", "/rpc", f"/v2/models/{TINY.op}/infer")


@pytest.fixture(autouse=True)
def the_next_call_works(http: httpx.Client) -> Iterator[None]:
    """After each of these tests a valid call on the same connections returns the right bits."""
    yield
    assert same_bits(read(post(http, TINY, INPUTS, NPY)), TINY.expected(INPUTS))


def send(http: httpx.Client, page: str, body: bytes, **headers: str) -> tuple[int, Any]:
    """Post a body; return the status, and the slug or JSON-RPC code of an error."""
    answer = http.post(page, content=body, headers={"content-type": JSON} | headers)
    assert SECRET not in answer.text
    found = answer.json()
    if page == "/rpc":
        assert answer.status_code == 200
        return 200, found["error"]["code"] if "error" in found else None
    return answer.status_code, found.get("code") or (list(found) if answer.status_code != 200 else None)


NOT_JSON: dict[str, bytes] = {
    "nothing": b"",
    "white space": b" \n\t ",
    "two documents": b"{}{}",
    "comma": b'{"a":1,}',
    "comment": b"{}//",
    "single quotes": b"{'a':1}",
    "bare name": b"{a:1}",
    "NaN": b'{"a":NaN}',
    "Infinity": b'{"a":-Infinity}',
    "digits": b'{"a":' + b"9" * 5000 + b"}",
    "leading zero": b'{"a":01}',
    "plus": b'{"a":+1}',
    "hexadecimal": b'{"a":0x10}',
    "half a pair": b'{"a":"\\ud83d"}',
    "half a pair as a name": b'{"\\ude00":1}',
    "unknown escape": b'{"a":"\\x41"}',
    "control character": b'{"a":"\x01"}',
    "line break in a string": b'{"a":"\n"}',
    "open string": b'{"a":"' + SECRET.encode(),
    "open list": b'{"a":[1,2',
    "much too deep": b"[" * 60_000,
    "deep objects": b'{"a":' * 20_000,
    "latin-1": '{"é":1}'.encode("latin-1"),
    "UTF-16": '{"a":1}'.encode("utf-16"),
    "UTF-32": '{"a":1}'.encode("utf-32"),
    "overlong": b'{"a":"\xc0\xaf"}',
    "surrogates in UTF-8": b'{"a":"\xed\xa0\xbd"}',
    "zip": b"PK\x03\x04" + bytes(500),
}


@pytest.mark.parametrize("name", NOT_JSON)
@pytest.mark.parametrize("page", PAGES)
def test_invalid_json(http: httpx.Client, page: str, name: str) -> None:
    """It is a parse error at every API, whole and in pieces."""
    expected = (200, -32700) if page == "/rpc" else (400, ["error"] if page.startswith("/v2") else "parse_error")
    body = NOT_JSON[name]
    assert send(http, page, body) == expected
    if page.startswith("/v2") and body:
        assert send(http, page, body + b"\0" * 24, **{"inference-header-content-length": str(len(body))}) == expected


@pytest.mark.parametrize("kind", ["application/json; charset=utf-16", 'application/json;a="b" ;Charset = "latin-1"'])
@pytest.mark.parametrize("page", PAGES)
def test_text_in_other_charsets(http: httpx.Client, page: str, kind: str) -> None:
    """JSON is UTF-8: a request that declares another charset is rejected with 415, whatever its bytes are."""
    assert http.post(page, content=b"{}", headers={"content-type": kind}).status_code == 415


@pytest.mark.parametrize(
    "body", [b"null", b"true", b"1", b"-0.0", b'"x"', b"[]", b"[[]]", b"[1]", b'"\xf0\x9f\x98\x80"'], ids=repr
)
@pytest.mark.parametrize("page", PAGES[1:])
def test_json_that_is_not_a_request(http: httpx.Client, page: str, body: bytes) -> None:
    """Valid JSON that is not a request gets a client error, never a server error."""
    answer = http.post(page, content=body, headers={"content-type": JSON})
    if page != "/rpc":
        assert answer.status_code in (400, 422)
        return
    found = answer.json()
    for entry in found if isinstance(found, list) else [found]:
        assert entry["error"]["code"] == -32600
        assert entry["id"] is None


def odd_but_right() -> dict[str, bytes]:
    """The right call, written so that only a careless parser fails on it."""
    text = json.dumps(document(TINY, INPUTS))
    pairs = json.loads(text)
    return {
        "byte order mark": b"\xef\xbb\xbf" + text.encode(),
        "white space": json.dumps(pairs, indent=9).encode() + b"\r\n\t " * 50,
        "all escaped": escaped(text).encode(),
        "null members": json.dumps(pairs | {"options": None}).encode(),
        "reversed": json.dumps({name: pairs[name] for name in reversed(pairs)}).encode(),
        "data first": json.dumps(
            pairs | {"inputs": {name: dict(reversed(value.items())) for name, value in pairs["inputs"].items()}}
        ).encode(),
    }


def escaped(text: str) -> str:
    """Escape every letter inside the strings of a document."""
    parts = text.split('"')
    return '"'.join(
        "".join(f"\\u{ord(char):04x}" for char in part) if number % 2 else part for number, part in enumerate(parts)
    )


@pytest.mark.parametrize("name", odd_but_right())
def test_unusual_but_valid_json(http: httpx.Client, name: str) -> None:
    """The same document in another notation is the same call."""
    answer = http.post(PAGES[0], content=odd_but_right()[name], headers={"content-type": JSON})
    assert same_bits(read(answer), TINY.expected(INPUTS))


IDS: list[Any] = [
    *(0, -1, 2**53 + 1, 2**64, 10**300, -0.0, 1e308, 0.5),
    *("", "\0", "é\U0001f600", "a" * 4096, '"\\', None),
]


@pytest.mark.parametrize("given", IDS, ids=lambda given: repr(given)[:20])
def test_ids_come_back_as_they_are(http: httpx.Client, given: Any) -> None:
    """An id keeps its value and its type, however large it is."""
    found = http.post(
        "/rpc", json={"jsonrpc": "2.0", "method": "ops.describe", "params": [TINY.op], "id": given}
    ).json()
    assert "result" in found
    assert (found["id"], type(found["id"])) == (given, type(given))


@pytest.mark.parametrize("given", [True, [], {}, [1], {"a": 1}, "a" * 4097], ids=lambda given: repr(given)[:20])
def test_values_that_can_not_be_ids(http: httpx.Client, given: Any) -> None:
    """A value that can't be an id makes the request invalid, and the answer's id null."""
    found = http.post("/rpc", json={"jsonrpc": "2.0", "method": "ops.list", "id": given}).json()
    assert (found["error"]["code"], found["id"]) == (-32600, None)


@pytest.mark.parametrize(
    "message",
    [
        {"jsonrpc": 2.0, "method": "ops.list"},
        {"jsonrpc": "2.0 ", "method": "ops.list"},
        {"method": "ops.list"},
        {"jsonrpc": "2.0"},
        {"jsonrpc": "2.0", "method": None},
        {"jsonrpc": "2.0", "method": ["ops.list"]},
        {"jsonrpc": "2.0", "method": "ops.list", "params": 1},
        {"jsonrpc": "2.0", "method": "ops.list", "params": SECRET},
        {"jsonrpc": "2.0", "method": "ops.list", "params": None},
    ],
)
def test_invalid_messages(http: httpx.Client, message: Any) -> None:
    """A message that breaks any rule of the specification is an invalid request, answered with its id."""
    found = http.post("/rpc", json=message | {"id": "x"}).json()
    assert (found["error"]["code"], found["id"]) == (-32600, "x")
    assert SECRET not in str(found)


@pytest.mark.parametrize(
    "method", ["", "rpc.", "__init__", "\0", "é" * 999, f"{TINY.op} ", TINY.op.lower() + "\n", "../" * 99, SECRET * 9]
)
def test_unknown_methods(http: httpx.Client, method: str) -> None:
    """An unknown method is "not found", and a long name is not repeated."""
    answer = http.post("/rpc", json={"jsonrpc": "2.0", "method": method, "id": 1})
    assert answer.json()["error"]["code"] == -32601
    assert SECRET not in answer.text


def test_valid_and_invalid_items_in_one_batch(http: httpx.Client) -> None:
    """In a batch with valid, invalid and notification items each gets its own answer, in order, or none."""
    right = {"jsonrpc": "2.0", "method": TINY.op, "params": document(TINY, INPUTS)}
    batch = [right | {"id": 1}, 1, None, [], {}, right, right | {"id": "b", "method": "x"}, right | {"id": 1}]
    found = http.post("/rpc", json=batch).json()
    assert [entry["id"] for entry in found] == [1, None, None, None, None, "b", 1]
    assert [entry.get("error", {}).get("code") for entry in found] == [None, *[-32600] * 4, -32601, None]


def test_invalid_notifications_get_no_answer(http: httpx.Client) -> None:
    """An invalid notification gets no answer either."""
    answer = http.post("/rpc", json={"jsonrpc": "2.0", "method": "x", "params": {"inputs": SECRET}})
    assert (answer.status_code, answer.content) == (204, b"")
