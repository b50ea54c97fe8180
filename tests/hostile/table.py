"""Bad requests as data: each is written for every API where it makes sense, with the answer that it should get.

A row changes a valid call: its attributes, tensors and members, the text of its JSON, or the whole body. To add one,
append it to `ROWS`; `test_table.py` does the rest.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from app.replies.errors import MAPPING
from tests.app.samples import JSON
from tests.hostile.apis import TINY, npy_file

__all__ = ["APIS", "ROWS", "Answer", "Row", "ask"]

Answer = tuple[int, str | None, list[str | int] | None]
"""Status, code and `errors[0].loc` of a reply; a valid call has neither code nor loc."""

Content = tuple[bytes, dict[str, str]]
"""A body and its headers."""

APIS = ("json", "validate", "verify", "parts", "rpc", "batch", "oip", "graph")
_TEXT = ("json", "validate", "verify", "rpc", "batch", "graph")
"""The APIs whose tensors are base64."""

_RPC_CODE = {cls.code: reply.rpc_code for cls, reply in MAPPING.items()}
_PAGES = {
    "json": f"/v1/ops/{TINY.op}",
    "validate": f"/v1/ops/{TINY.op}/validate",
    "verify": f"/v1/ops/{TINY.op}/verify",
    "parts": f"/v1/ops/{TINY.op}",
    "rpc": "/rpc",
    "batch": "/rpc",
    "oip": f"/v2/models/{TINY.op}/infer",
    "graph": "/v1/graphs",
}
_RESULT, _IDS = "diff_weights", {"src": "0", "diff_dst": "1"}
_INPUTS = TINY.inputs()
_EXPECTED = TINY.expected(_INPUTS)

RAW = "@raw@"
"""Replaced by the row's `raw`, quotes included, once the request is text."""


@dataclass(frozen=True)
class Row:
    """One bad request, and its answers.

    `answer` is that of most APIs, in the names of a single call; `others` are those of the other ones, as they are.
    """

    name: str
    answer: Answer
    attributes: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    members: Mapping[str, Any] = field(default_factory=dict)
    raw: bytes = b""
    send: Callable[[bytes, dict[str, str]], Content] | None = None
    apis: tuple[str, ...] = APIS
    others: Mapping[str, Answer] = field(default_factory=dict)

    def expected(self, api: str) -> Answer:
        """Return the answer of an API: a graph has other locs, JSON-RPC one status, binary tensors no members."""
        status, code, loc = self.others.get(api, self.answer)
        if loc and api not in self.others:
            if api == "graph" and loc[0] == "attributes":
                loc = ["graph", 0, *loc]
            elif api == "graph" and loc[0] == "inputs":
                loc = ["inputs", *(_IDS.get(str(name), name) for name in loc[1:2]), *loc[2:]]
            elif api in ("parts", "oip") and loc[0] == "inputs":
                loc = loc[:2]
        return (200 if api in ("rpc", "batch") and status != 415 else status), code, loc


def ask(http: httpx.Client, api: str, row: Row) -> Answer:
    """Send the request to an API; return its answer, after checking that the reply has its API's form and is short."""
    body, headers = _WRITERS.get(api, _json)(row, api)
    if row.send is not None:
        body, headers = row.send(body, headers)
    reply = http.post(_PAGES[api], content=body, headers=headers)
    assert len(reply.content) < 50_000
    return _rpc_answer(reply) if _PAGES[api] == "/rpc" else _answer(reply)


def _answer(reply: httpx.Response) -> Answer:
    if reply.status_code == 200:
        return 200, None, None
    assert reply.headers["content-type"] == "application/problem+json", reply.text
    return reply.status_code, *_fault(reply.json(), reply.json()["detail"])


def _rpc_answer(reply: httpx.Response) -> Answer:
    answer = reply.json() if reply.headers["content-type"] == JSON else {}
    if isinstance(answer, list) and len(answer) == 3:
        first, answer, last = answer
        assert "result" in first
        assert "result" in last
    if "error" not in answer:
        return _answer(reply)
    error = answer["error"]
    assert error["code"] == _RPC_CODE[error["data"]["code"]]
    return reply.status_code, *_fault(error["data"], error["message"])


def _fault(data: Mapping[str, Any], message: str) -> tuple[str, list[str | int] | None]:
    errors = data.get("errors", [])
    assert len(errors) <= 64
    if data.get("omitted"):
        assert f"{len(errors) + data['omitted'] - 1:,} more broken rules, 63 of which are listed" in message
    return data["code"], errors[0]["loc"] if errors else data.get("loc")


def _tensors(row: Row, api: str) -> dict[str, dict[str, Any]]:
    arrays = _INPUTS | ({_RESULT: _EXPECTED} if api == "verify" else {})
    right = {
        name: {"dtype": "f32", "shape": list(array.shape), "data": array.tobytes()} for name, array in arrays.items()
    }
    return {name: right.get(name, {}) | dict(row.tensors.get(name, {})) for name in right | dict(row.tensors)}


def _in_json(tensor: Mapping[str, Any]) -> dict[str, Any]:
    encoded = {name: base64.b64encode(value).decode() for name, value in tensor.items() if isinstance(value, bytes)}
    return dict(tensor) | encoded


def _request(row: Row, api: str) -> dict[str, Any]:
    tensors = {name: _in_json(tensor) for name, tensor in _tensors(row, api).items()}
    return {"attributes": TINY.attributes() | dict(row.attributes), "inputs": tensors} | dict(row.members)


def _dump(row: Row, value: Any) -> bytes:
    return json.dumps(value).encode().replace(f'"{RAW}"'.encode(), row.raw)


def _json(row: Row, api: str) -> Content:
    return _dump(row, _request(row, api)), {"content-type": JSON}


def _rpc(row: Row, api: str) -> Content:
    message = {"jsonrpc": "2.0", "id": 1, "method": TINY.op, "params": _request(row, api)}
    good = message | {"params": _request(_VALID, api)}
    return _dump(row, [good, message, good] if api == "batch" else message), {"content-type": JSON}


def _parts(row: Row, api: str) -> Content:
    request = {"attributes": TINY.attributes() | dict(row.attributes)} | dict(row.members)
    parts = {"request": _dump(row, request)}
    for name, tensor in _tensors(row, api).items():
        parts[name] = npy_file(tensor["dtype"], tensor["shape"], tensor["data"])
    body = b"".join(
        b'--X\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n' % (name.encode(), content)
        for name, content in parts.items()
    )
    return body + b"--X--\r\n", {"content-type": "multipart/form-data; boundary=X"}


def _oip(row: Row, api: str) -> Content:
    inputs, binary = [], b""
    for name, tensor in _tensors(row, api).items():
        size = {"binary_data_size": len(tensor["data"])}
        datatype = {"f32": "FP32"}.get(tensor["dtype"], tensor["dtype"])
        inputs.append({"name": name, "shape": tensor["shape"], "datatype": datatype, "parameters": size})
        binary += tensor["data"]
    document = {"inputs": inputs, "parameters": TINY.attributes() | dict(row.attributes)} | dict(row.members)
    head = _dump(row, document)
    lengths = {"inference-header-content-length": str(len(head)), "accept": "application/problem+json"}
    return head + binary, lengths


def _node(number: int, row: Row, **logical: Any) -> dict[str, Any]:
    """Return the call as an op of a dumped graph; `logical` are more members of its result."""
    tensors = [{"id": 3 * number + at, "dtype": "f32", "shape": list(a.shape)} for at, a in enumerate(_INPUTS.values())]
    result = {"id": 3 * number + 2, "dtype": "f32", "shape": list(_EXPECTED.shape)}
    attributes = TINY.attributes() | dict(row.attributes)
    return {"id": number, "kind": TINY.op, "attrs": attributes, "inputs": tensors, "outputs": [result | logical]}


def _graph(row: Row, api: str) -> Content:
    tensors = {_IDS.get(name, name): _in_json(tensor) for name, tensor in _tensors(row, api).items()}
    request = {"graph": {"graph": [_node(0, row)]}, "inputs": tensors} | dict(row.members)
    return _dump(row, request), {"content-type": JSON}


_WRITERS = {"parts": _parts, "rpc": _rpc, "batch": _rpc, "oip": _oip, "graph": _graph}
_VALID = Row("a valid call", (200, None, None))

# What the rows are made of.

_MALFORMED: Answer = (400, "parse_error", None)
_OK: Answer = (200, None, None)


def _wrong(*loc: str | int) -> Answer:
    return 422, "invalid_params", list(loc)


def _half(body: bytes, headers: dict[str, str]) -> Content:
    return body[: len(body) // 2], headers


def _gzip(content: bytes) -> Callable[[bytes, dict[str, str]], Content]:
    """Return what sends this, as gzip, instead of the body."""
    coded = {"content-type": JSON, "content-encoding": "gzip"}
    return lambda _, headers: (content, coded | {"accept": headers.get("accept", JSON)})


def _graph_of(*nodes: Mapping[str, Any], **members: Any) -> dict[str, Any]:
    return {"graph": {"graph": nodes}, **members}


def _with_stride(*strides: Any) -> dict[str, Any]:
    return _graph_of(_node(0, _VALID, layout_type="strided", stride=strides), layout="memory")


def _bias(number: int, **more: Any) -> dict[str, Any]:
    given = [{"id": 3 * number, "dtype": "f32", "shape": [1, 1]}, {"id": 3 * number + 1, "dtype": "f32", "shape": [1]}]
    return {
        "id": number,
        "kind": "BiasAdd",
        "inputs": given,
        "outputs": [{"id": 3 * number + 2, "dtype": "f32"}],
    } | more


_MANY = 4100
_ZEROS = b'{"inputs":[{"name":"src","datatype":"FP32","shape":[1,1,8388608],"data":[' + b"0," * (8 << 20)
_LONG = "x" * 100_000
_SRC = {"dtype": "f32", "shape": [1, 1, 4]}
_SRC_DATA = ["inputs", "src", "data"]
_SMALL_TENSORS = {f"t{n}": {**_SRC, "data": bytes(48_000)} for n in range(300)}

_MANY_TAPS = {
    "strides": [1, 1, 1],
    "dilations": [1, 1, 1],
    "pads_begin": [7, 7, 7],
    "pads_end": [7, 7, 7],
    "output_padding": [0, 0, 0],
    "weights_shape": [1, 1, 15, 15, 15],
}
_PIXELS: dict[str, Any] = {"shape": [1000, 1, 1, 1, 1], "data": np.ones(1000, np.float32).tobytes()}
_NO_GRADIENT = {
    "dtype": "f32",
    "shape": _MANY_TAPS["weights_shape"],
    "data": np.arange(15**3, dtype=np.float32).tobytes(),
}

ROWS: list[Row] = [
    _VALID,
    # Names.
    Row(
        "thousands of unknown members",
        _wrong("member0"),
        members={f"member{n}": 1 for n in range(_MANY)},
        others={"rpc": _wrong("params"), "batch": _wrong("params"), "oip": _OK},  # OIP: unknown members are ignored
    ),
    Row(
        "thousands of misspelt members",
        _wrong("attributes0"),
        members={f"attributes{n}": 1 for n in range(_MANY)},
        others={"rpc": _wrong("params"), "batch": _wrong("params"), "oip": _OK},
    ),
    Row("thousands of unknown attributes", _wrong("attributes"), attributes={f"a{n}": 1 for n in range(_MANY)}),
    Row("misspelt attributes", _wrong("attributes", "stride0s"), attributes={f"stride{n}s": 1 for n in range(50)}),
    Row(
        "thousands of unknown inputs",
        _wrong("inputs"),
        tensors={f"x{n}": {"dtype": "f32", "shape": [1], "data": b"1234"} for n in range(2000)},
        apis=("json", "validate", "verify", "rpc", "batch", "graph"),
        others={"graph": _wrong("inputs", "x0")},
    ),
    Row(
        "thousands of unknown options",
        _wrong("options", "o0"),
        members={"options": {f"o{n}": 1 for n in range(_MANY)}},
        others={"oip": _OK},
    ),
    Row(
        "thousands of unknown members of a tensor",
        _wrong("inputs", "src"),
        tensors={"src": {f"shape{n}": 1 for n in range(_MANY)}},
        apis=_TEXT,
    ),
    Row("a long name", _wrong("attributes", "?"), attributes={_LONG: 1}),
    Row("a long string", _wrong("attributes", "auto_pad"), attributes={"auto_pad": _LONG}),
    # Types and ranges.
    *(
        Row(f"strides: {str(value)[:40]}", _wrong("attributes", "strides", *loc), attributes={"strides": value})
        for value, loc in [
            ([[[1]]], [0]),
            ([{"a": [1]}], [0]),
            ([2**63], [0]),
            ([10**300], [0]),
            ([0], [0]),
            ([-1], [0]),
            ([True], [0]),
            ([1.0], [0]),
            ([1, 1], []),
            ([1] * 50_000, []),
            ({"type": "s64[]", "value": [1]} | {"x": 1}, []),
            (1, []),
        ]
    ),
    *(
        Row(f"groups: {value!r}", _wrong("attributes", "groups"), attributes={"groups": value})
        for value in (2**63, -(2**63) - 1, True, 1.5, [1], {"a": 1})
    ),
    Row(
        "attributes: a list",
        _wrong("attributes"),
        members={"attributes": []},
        apis=("json", "validate", "verify", "parts", "rpc", "batch"),
    ),
    Row(
        "inputs: a number",
        _wrong("inputs"),
        members={"inputs": 1},
        others={"oip": (400, "invalid_request", None)},
    ),
    Row("options: a string", _wrong("options"), members={"options": "x"}, others={"oip": _OK}),
    Row("graph: a list", _wrong("graph"), members={"graph": []}, apis=("graph",)),
    Row(
        "shape: a string",
        _wrong("inputs", "src", "shape"),
        tensors={"src": {"shape": "x"}},
        apis=(*_TEXT, "oip"),
        others={"oip": _wrong("inputs", "src", "shape")},
    ),
    Row("dtype: a number", _wrong("inputs", "src", "dtype"), tensors={"src": {"dtype": 1}}, apis=_TEXT),
    Row("data: a number", _wrong(*_SRC_DATA), tensors={"src": {"data": 1}}, apis=_TEXT),
    # Tensors.
    Row("bad base64", _wrong(*_SRC_DATA), tensors={"src": {"data": "A" * 21 + "!=="}}, apis=_TEXT),
    Row(
        "bad base64 in a long string", _wrong(*_SRC_DATA), tensors={"src": {"data": "A" * 90_000 + "!AA="}}, apis=_TEXT
    ),
    Row("too few bytes", _wrong(*_SRC_DATA), tensors={"src": {"data": bytes(15)}}),
    Row("too many bytes", _wrong(*_SRC_DATA), tensors={"src": {"data": bytes(100_000)}}),
    Row("a shape of 32 TB", _wrong(*_SRC_DATA), tensors={"src": {"shape": [1, 1, 2**43]}}),
    Row(
        "a shape of more than 64 bits",
        _wrong("inputs", "src", "shape"),
        tensors={"src": {"shape": [2**40, 2**40, 4]}},
        others={"parts": _wrong("inputs", "src"), "oip": _wrong("inputs", "src", "shape")},
    ),
    Row(
        "thousands of small tensors",
        _wrong("attributes", "x"),
        attributes={"x": list(map(_in_json, _SMALL_TENSORS.values()))},
        apis=("json", "rpc", "batch", "graph"),
    ),
    Row(
        "an empty batch with weights of 6 GB",
        (413, "too_large", ["outputs", "diff_weights"]),
        attributes={"weights_shape": [1 << 15, 1 << 14, 3]},
        tensors={
            "src": {"shape": [0, 1 << 14, 4], "data": b""},
            "diff_dst": {"shape": [0, 1 << 15, 6], "data": b""},
        },
        apis=("json", "validate", "parts", "rpc", "batch", "oip"),
    ),
    # JSON.
    *(
        Row(name, _MALFORMED, attributes={"strides": RAW}, raw=raw)
        for name, raw in [
            ("NaN", b"NaN"),
            ("Infinity", b"[-Infinity]"),
            ("5000 digits", b"9" * 5000),
            ("very deep nesting", b"[" * 60_000 + b"]" * 60_000),
            ("half of a surrogate pair", b'"\\ud83d"'),
            ("invalid UTF-8", b'"\xff\xfe"'),
            ("a control character", b'"\0"'),
        ]
    ),
    *(
        Row(name, _wrong("attributes", "strides", *loc), attributes={"strides": RAW}, raw=raw)
        for name, raw, loc in [
            ("1e400", b"1e400", []),
            ("the same name twice", b'{"a":1,"a":2}', []),
            ("deep nesting", b"[" * 65 + b"]" * 65, [0]),
        ]
    ),
    Row("a long document", _wrong("attributes", "x"), attributes={"x": [_LONG] * 3}),
    Row("a long list", _wrong("attributes", "x"), attributes={"x": RAW}, raw=b"[" + b"1," * 200_000 + b"1]"),
    Row(
        "millions of values",
        (413, "too_large", None),
        attributes={"x": RAW},
        raw=b"[" + b"1," * (1 << 22) + b"1]",
    ),
    # Much work for few bytes.
    Row(
        "a wrong result of 1,000 images and 3,375 taps",
        _OK,
        attributes=_MANY_TAPS,
        tensors={"src": _PIXELS, "diff_dst": _PIXELS, _RESULT: _NO_GRADIENT},
        apis=("verify",),
    ),
    Row(
        "1,000 images and 3,375 taps by the reference",
        _OK,
        attributes=_MANY_TAPS,
        tensors={"src": _PIXELS, "diff_dst": _PIXELS},
        members={"options": {"reference": True}},
        apis=("json", "parts", "rpc", "batch"),
    ),
    # Bodies.
    Row("half of the body", _MALFORMED, send=_half, others={"oip": (400, "invalid_request", None)}),
    Row(
        "another content type",
        (415, "unsupported_media_type", None),
        send=lambda body, headers: (body, headers | {"content-type": "text/plain"}),
    ),
    Row(
        "a long content type",
        (415, "unsupported_media_type", None),
        send=lambda body, headers: (body, headers | {"content-type": "multipart/form-data" + ";" * 8000}),
    ),
    *(
        Row(
            name,
            (415, "unsupported_media_type", None),
            send=_gzip(content),
            others={"oip": answer},
        )
        for name, content, answer in [
            ("empty gzip members", gzip.compress(b"") * 32_000, _MALFORMED),
            ("too many gzip members", gzip.compress(b"") * 40_000, _MALFORMED),
            ("a compression bomb", gzip.compress(b" " * (65 << 20), 1), (413, "too_large", None)),
            ("compressed numbers", gzip.compress(_ZEROS, 1), (413, "too_large", None)),
            ("compressed blanks among numbers", gzip.compress(_ZEROS.replace(b"0,", b"  ")), _MALFORMED),
        ]
    ),
    # Graphs.
    Row(
        "a huge stride of an axis of one",
        _OK,
        members=_with_stride(2**63 - 1, 2**63 - 1, 1),
        apis=("graph",),
    ),
    Row(
        "a huge stride of a longer axis",
        (413, "too_large", ["graph"]),
        members=_with_stride(1, 1, 2**62),
        apis=("graph",),
    ),
    Row(
        "a negative stride",
        _wrong("graph", 0, "outputs", 0, "stride"),
        members=_with_stride(4, 4, -1),
        apis=("graph",),
    ),
    Row(
        "thousands of dimensions",
        _wrong("graph", 0, "outputs", 0, "shape"),
        members=_graph_of(_node(0, _VALID, layout_type="strided", shape=[9] * 40_000, stride=[9] * 40_000)),
        apis=("graph",),
    ),
    Row(
        "thousands of outputs",
        _wrong("outputs"),
        members=_graph_of(*map(_bias, range(900)), outputs=["x"] * 20_000),
        apis=("graph",),
    ),
    Row(
        "a thousand ops of an unknown kind",
        _wrong("graph", 0, "kind"),
        members=_graph_of(*(_bias(n, kind=f"BiasAd{n}") for n in range(1000))),
        apis=("graph",),
    ),
    Row(
        "a thousand ops with misspelt attributes",
        _wrong("graph", 0, "attributes", "data_format0"),
        members=_graph_of(*(_bias(n, attrs={f"data_format{k}": 1 for k in range(4)}) for n in range(900))),
        apis=("graph",),
    ),
]
