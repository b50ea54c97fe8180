"""Bad requests as data: each is written for every API where it makes sense, with the answer that it should get.

A row changes a valid call: its attributes, tensors and members, the text of its JSON, or the whole body. To add one,
append it to `ROWS`; `test_table.py` does the rest.
"""

from __future__ import annotations

import base64
import gzip
import json
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tests.app.samples import JSON
from tests.hostile.apis import INPUTS, RAW, SECRET, TINY, VALID, Answer, Content, Row, in_json, node, npy_file
from tests.hostile.encoded import NOT_JSON, in_base64

__all__ = ["ROWS"]

_Send = Callable[[bytes, dict[str, str]], Content]
_Loc = list[str | int]

# The APIs whose tensors are base64, and those whose body is one document, or begins with one.
_TEXT = ("json", "validate", "verify", "tolerance", "rpc", "batch", "job", "submit", "graph")
_DOCUMENTS = ("json", "validate", "verify", "tolerance", "rpc", "oip", "graph", "job", "submit", "upload")
_FEW = ("json", "parts", "rpc", "oip", "graph")
_SINGLE, _ONE = (*_TEXT[:-1], "parts"), ("json", "rpc", "upload")

_OK: Answer = (200, None, None)
_MALFORMED: Answer = (400, "parse_error", None)
_INVALID: Answer = (400, "invalid_request", None)
_TOO_LARGE: Answer = (413, "too_large", None)
_UNSUPPORTED: Answer = (422, "unsupported", ["inputs", "src"])
_OTHER_TYPE: Answer = (415, "unsupported_media_type", None)


def _wrong(*loc: str | int) -> Answer:
    return 422, "invalid_params", list(loc)


def _half(body: bytes, headers: dict[str, str]) -> Content:
    return body[: len(body) // 2], headers


def _instead(content: bytes, **more: str) -> _Send:
    """Return what sends this instead of the body, with more headers; of a binary request all of it is the head."""

    def send(_: bytes, headers: dict[str, str]) -> Content:
        length = {name: str(len(content)) for name in headers if name.startswith("inference")}
        return content, headers | length | {name.replace("_", "-"): value for name, value in more.items()}

    return send


def _typed(kind: str) -> _Send:
    return lambda body, headers: (body, headers | {"content-type": kind})


def _headed(length: str) -> _Send:
    return lambda body, headers: (body, headers | {"inference-header-content-length": length})


def _gzip(content: bytes) -> _Send:
    """Return what sends this, as gzip, instead of the body."""
    coded = {"content-type": JSON, "content-encoding": "gzip"}
    return lambda _, headers: (content, coded | {"accept": headers.get("accept", JSON)})


def _repacked(change: Callable[[bytes], bytes], coding: str = "gzip") -> _Send:
    """Return what sends the body compressed, after a change of that."""
    pack = zlib.compress if coding == "deflate" else gzip.compress
    return lambda body, headers: (change(pack(body)), headers | {"content-encoding": coding})


def _graph_of(*nodes: Mapping[str, Any], **members: Any) -> dict[str, Any]:
    return {"graph": {"graph": nodes}, **members}


def _with_stride(*strides: Any) -> dict[str, Any]:
    return _graph_of(node(0, VALID, layout_type="strided", stride=strides), layout="memory")


def _bias(number: int, **more: Any) -> dict[str, Any]:
    given = [{"id": 3 * number, "dtype": "f32", "shape": [1, 1]}, {"id": 3 * number + 1, "dtype": "f32", "shape": [1]}]
    outputs = [{"id": 3 * number + 2, "dtype": "f32"}]
    return {"id": number, "kind": "BiasAdd", "inputs": given, "outputs": outputs} | more


def _part(name: str, content: bytes, *lines: str) -> bytes:
    told = [f'Content-Disposition: form-data; name="{name}"', *lines]
    return ("--X\r\n" + "\r\n".join(told) + "\r\n\r\n").encode() + content + b"\r\n"


def _empty(src_channels: int, dst_channels: int) -> dict[str, dict[str, Any]]:
    return {
        name: {"shape": [0, channels, size], "data": b""}
        for name, channels, size in (("src", src_channels, 4), ("diff_dst", dst_channels, 6))
    }


def _npy(
    descr: str = "'<f4'", shape: str = "(1, 1, 4)", more: str = "", version: bytes = b"\1\0", size: int = 0
) -> bytes:
    """Return the head of a .npy file, each value as a Python literal, and its length if that is not the right one."""
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, {more}}}\n".encode()
    return b"\x93NUMPY" + version + (size or len(text)).to_bytes(2 if version[0] == 1 else 4, "little") + text


_FILE = base64.b64encode(npy_file("f32", [1, 1, 4], bytes(16))).decode()
_GIVEN = {
    name: in_json({"dtype": "f32", "shape": list(array.shape), "data": array.tobytes()})
    for name, array in INPUTS.items()
}


def _as_npy(head: bytes) -> dict[str, Any]:
    return {"inputs": {"src": {"npy": base64.b64encode(head + INPUTS["src"].tobytes()).decode()}}}


_MANY = 4100
_ZEROS = b'{"inputs":[{"name":"src","datatype":"FP32","shape":[1,1,8388608],"data":[' + b"0," * (8 << 20)
_LONG = "x" * 100_000
_SRC = {"dtype": "f32", "shape": [1, 1, 4]}
_SRC_DATA: _Loc = ["inputs", "src", "data"]
_SRC_FILE: _Loc = ["inputs", "src", "npy"]
_SMALL_TENSORS = {f"t{n}": {**_SRC, "data": bytes(48_000)} for n in range(300)}

_FORM = "multipart/form-data; boundary=X"
_REQUEST = _part("request", json.dumps({"attributes": TINY.attributes()}).encode())
_FILES = {name: npy_file("f32", list(array.shape), array.tobytes()) for name, array in INPUTS.items()}
_SRC_PART, _DST_PART = (_part(name, file) for name, file in _FILES.items())
_SRC_FILES: list[tuple[str, _Loc, bytes]] = [
    ("a byte short", ["inputs", "src"], _FILES["src"][:-1]),
    ("a byte long", ["inputs", "src"], _FILES["src"] + b"x"),
    ("that ends in its head", ["inputs", "src"], _FILES["src"][:30]),
    ("without bytes", ["inputs", "src"], b""),
    ("of two unnamed bytes", ["inputs", "src"], _npy("'|V2'") + bytes(8)),
    ("of float16", ["inputs", "diff_dst", "dtype"], _npy("'<f2'") + bytes(8)),
]
_CALL, _END = _REQUEST + _SRC_PART + _DST_PART, b"--X--\r\n"

_MANY_TAPS = {
    "strides": [1, 1, 1], "dilations": [1, 1, 1], "pads_begin": [7, 7, 7], "pads_end": [7, 7, 7],
    "output_padding": [0, 0, 0], "weights_shape": [1, 1, 15, 15, 15],
}  # fmt: skip
_PIXELS: dict[str, Any] = {"shape": [1000, 1, 1, 1, 1], "data": np.ones(1000, np.float32).tobytes()}
_NO_GRADIENT = {
    "dtype": "f32", "shape": _MANY_TAPS["weights_shape"], "data": np.arange(15**3, dtype=np.float32).tobytes(),
}  # fmt: skip

_SHAPES: list[tuple[_Loc, _Loc, list[int], list[list[Any]]]] = [
    (["src", "shape", 2], ["src"], [2], [[1, 1, n] for n in (2**63, 2**64, -1, True, 1.0, "4", None, [4])]),
    (["src", "shape", 2], ["src"], [], [[2**63 - 1, 2**63 - 1, 0]]),
    (["src", "shape"], ["src"], [], [[2**32, 2**32, 4], [2**62, 4, 1], [2**63 - 1, 2, 1], [1, 1, 2**61], [1] * 65]),
    (["src", "shape", 2], ["src", "shape", 2], [], [[1, 1, 0]]),
    (["src", "shape", 1], ["src", "shape", 1], [], [[1, 0, 4]]),
    (["src", "shape"], ["src", "shape"], [], [[1, 4]]),
    (["diff_dst", "shape", 0], ["diff_dst", "shape", 0], [], [[0, 1, 4]]),
    (["diff_dst", "shape"], ["diff_dst", "shape"], [], [[1, 1, 1, 4]]),
]
"""Places of a wrong shape of src: of most APIs, of a file, and after that of the shape in a graph."""
_OPTIONS: list[Any] = [{"speed": 1}, {"encoding": "hex"}, *({"deadline_ms": each} for each in (0, 1.5, True))]
_OPTIONS += [{"reference": "yes"}, []]
_NUMBERS: list[Any] = [[1], [0] * 5, ["1", 2, 3, 4], [None, 2, 3, 4], [{}, 2, 3, 4], [1, 2, 3, 3.5e38], [[1, 2, 3, 4]]]
_NUMBERS += [[[[1, 2, True, 4]]], [[[1, 2, 3], [4]]], [[[1, 2, 3, [4]]]], [[[[1, 2, 3, 4]]]], {}]
_DESCRIBED: list[Any] = [{"dtype": "f16"}, {"dtype": "f32", "shape": [1, 2]}, 5, _GIVEN["src"]]
_HEADS: list[tuple[Answer, dict[str, bytes]]] = [
    ((422, "unsupported", _SRC_FILE), {"objects": _npy("'|O'"), "strings": _npy("'<U9'")}),
    ((413, "too_large", ["inputs", "src"]), {"a huge head": _npy(version=b"\2\0", size=2**32 - 1)}),
    (_wrong(*_SRC_FILE), {
        "records": _npy("[('a', '<f4')]"), "an expression": _npy(shape="(1, 1, 2 + 2)"),
        "a longer head": _npy(size=9999),
        "a call": _npy("__import__('os').system('true')"), "deep tuples": _npy(shape="(" * 5000 + ")" * 5000),
        "5000 digits": _npy(shape=f"({'9' * 5000},)"), "4000 digits": _npy(shape=f"(1, 1, {'9' * 4000})"),
        "underscores": _npy(shape="(1, 1_0, 4)"), "Arabic digits": _npy(shape="(\u0661, 1, 4)"),
        "two shapes": _npy(more="'shape': (1, 1, 4)"), "more": _npy(more=f"'{SECRET}': 1"),
        "version 9": _npy(version=b"\x09\0"), "a zip file": b"PK\x03\x04" + bytes(99), "nothing else": b"",
    }),
]  # fmt: skip
_PARTS: list[tuple[str, Answer, bytes]] = [
    ("objects", _UNSUPPORTED, _npy("'|O'")),
    ("a huge head", (413, "too_large", ["inputs", "src"]), _npy(version=b"\2\0", size=2**32 - 1)),
    ("a call", _wrong("inputs", "src"), _npy("__import__('os').system('true')")),
    ("a longer head", _wrong("inputs", "src"), _npy(size=9999)),
]  # fmt: skip
_LONG_NUMBERS: list[tuple[str, list[str | int], dict[str, Any], dict[str, Any], dict[str, Any], tuple[str, ...]]] = [
    ("groups", ["attributes", "groups"], {"groups": RAW}, {}, {}, _FEW),
    ("strides", ["attributes", "strides", 0], {"strides": [RAW]}, {}, {}, _FEW),
    ("shape", ["inputs", "src", "shape", 2], {}, {}, {"src": {"shape": [1, 1, RAW]}}, ("json", "rpc")),
    ("deadline", ["options", "deadline_ms"], {}, {"options": {"deadline_ms": RAW}}, {}, ("json", "parts", "rpc")),
]  # fmt: skip

_NAMES: list[Row] = [
    *(Row(f"thousands of {what} members", _wrong(f"{name}0"), members={f"{name}{n}": 1 for n in range(_MANY)},
          others={"rpc": _wrong("params"), "batch": _wrong("params"), "oip": _OK})  # OIP: unknown members are ignored
      for what, name in {"unknown": "member", "misspelt": "attributes"}.items()),
    Row("thousands of unknown attributes", _wrong("attributes"), attributes={f"a{n}": 1 for n in range(_MANY)}),
    Row("misspelt attributes", _wrong("attributes", "stride0s"), attributes={f"stride{n}s": 1 for n in range(50)}),
    Row("thousands of unknown inputs", _wrong("inputs"), apis=_TEXT, others={"graph": _wrong("inputs", "x0")},
        tensors={f"x{n}": {"dtype": "f32", "shape": [1], "data": b"1234"} for n in range(2000)}),
    Row("thousands of unknown options", _wrong("options", "o0"), others={"oip": _OK},
        members={"options": {f"o{n}": 1 for n in range(_MANY)}}),
    Row("thousands of unknown members of a tensor", _wrong("inputs", "src"), apis=_TEXT,
        tensors={"src": {f"shape{n}": 1 for n in range(_MANY)}}),
    Row("a long name", _wrong("attributes", "?"), attributes={_LONG: 1}),
    Row("a secret name", _wrong("attributes", "?"), attributes={SECRET * 9: 1}),
    Row("a long string", _wrong("attributes", "auto_pad"), attributes={"auto_pad": _LONG}),
    Row("a secret string", _wrong("attributes", "auto_pad"), attributes={"auto_pad": SECRET}),
    *(Row(f"an attribute {name!a}", _wrong("attributes", shown), attributes={name: 1}, apis=_FEW)
      for name, shown in {"": "", "\0": "?", "é": "?", "__proto__": "__proto__", "STRIDES": "STRIDES"}.items()),
]  # fmt: skip

_VALUES: list[Row] = [
    *(Row(f"strides: {str(value)[:40]}", _wrong("attributes", "strides", *loc), attributes={"strides": value})
      for value, loc in [
          ([[[1]]], [0]), ([{"a": [1]}], [0]), ([2**63], [0]), ([10**300], [0]), ([0], [0]), ([-1], [0]), ([True], [0]),
          ([1.0], [0]), ([1, 1], []), ([1] * 50_000, []), ({"type": "s64[]", "value": [1]} | {"x": 1}, []), (1, []),
      ]),
    *(Row(f"{name}: {value!r}", _wrong("attributes", name), attributes={name: value}, apis=_FEW)
      for name in ("groups", "auto_pad", "data_format", "weights_format")
      for value in (2**63, -(2**63) - 1, True, 1.5, [1], {"a": 1}, "\0")),
    *(Row(f"{name}: [{value!r}]"[:50], _wrong("attributes", name, 0), attributes={name: [value] * size}, apis=_FEW)
      for name, size in {"pads_begin": 1, "pads_end": 1, "dilations": 1, "output_padding": 1,
          "weights_shape": 3}.items()
      for value in (-(2**63) - 1, 10**300, True, 1e308, {"a": [1]}, "\0")),
    *(Row(f"{name}: [2**63 - 1]", answer, attributes={name: [2**63 - 1] * (3 if name == "weights_shape" else 1)},
          apis=("json", "validate", "parts", "rpc", "oip"), others={"parts": answer, "oip": answer})
      for name, answer in {
          "strides": _wrong("attributes", "strides", 0), "dilations": _wrong("attributes", "dilations", 0),
          "output_padding": _wrong("attributes", "output_padding", 0), "weights_shape": _wrong("attributes",
          "weights_shape"),
          "pads_begin": _wrong("inputs", "diff_dst", "shape", 2), "pads_end": _wrong("inputs", "diff_dst", "shape", 2),
      }.items()),
    Row("attributes: a list", _wrong("attributes"), members={"attributes": []}, apis=_SINGLE),
    Row("inputs: a number", _wrong("inputs"), members={"inputs": 1}, others={"oip": _INVALID}),
    Row("options: a string", _wrong("options"), members={"options": "x"}, others={"oip": _OK}),
    Row("graph: a list", _wrong("graph"), members={"graph": []}, apis=("graph",)),
    Row("shape: a string", _wrong("inputs", "src", "shape"), tensors={"src": {"shape": "x"}}, apis=(*_TEXT, "oip"),
        others={"oip": _wrong("inputs", "src", "shape")}),
    Row("dtype: a number", _wrong("inputs", "src", "dtype"), tensors={"src": {"dtype": 1}}, apis=_TEXT),
    Row("data: a number", _wrong(*_SRC_DATA), tensors={"src": {"data": 1}}, apis=_TEXT),
    Row("winograd", _wrong("options", "algorithm"), members={"options": {"algorithm": "winograd"}},
        apis=(*_SINGLE, "graph")),
    Row("winograd, inferred", _wrong("options", "algorithm"), attributes={"algorithm": "winograd"}, apis=("oip",)),
    *(Row(f"options: {options}", _wrong("options", *options), members={"options": options}, apis=_TEXT)
      for options in _OPTIONS),
    *(Row(f"inputs: {str(inputs)[:50]}", _wrong("inputs", *loc), members={"inputs": inputs}, apis=("json", "rpc"))
      for inputs, loc in [
          ([], []), ({"src": "AAAA"}, ["src"]), ({"src": 5}, ["src"]), ({"src": [[1.0]]}, ["src"]),
          ({"src": {}}, ["src", "dtype"]), ({"src": {"dtype": "f32", "data": ""}}, ["src", "shape"]),
          ({"src": {"shape": [1], "data": ""}}, ["src", "dtype"]),
          ({"src": {"npy": "AAAA"}}, ["src", "npy"]),
          ({"src": {"dtype": "bf16", "npy": _FILE}}, ["src", "npy"]),
          ({"src": {"shape": [1, 1, 4], "npy": _FILE}}, ["src", "shape"]),
      ]),
    *(Row(f"weights_shape: {str(shape)[:50]}", _wrong("inputs", "weights_shape", *loc), apis=("json", "rpc"),
          members={"inputs": {**_GIVEN, "weights_shape": shape}})
      for shape, loc in [
          *(([1, 1, size], [2]) for size in ("3", 3.0, True, 2**31, -3)), (5, []), ("1, 1, 3", []),
          ({"dtype": "f32", "shape": [1], "data": "AAAAAA=="}, []), ({"npy": _FILE}, []),
          ({"dtype": "s32", "shape": [3]}, []),
      ]),
]  # fmt: skip

_TENSORS: list[Row] = [
    *(Row(f"base64 after {length} letters: {text!a}", _wrong(*_SRC_DATA), apis=_ONE,
          tensors={"src": in_base64("A" * length, text)})
      for text in ("A", "AA", "AAA", "AAAA====", "=AAA", "A=AA", "AA=A", "AB==", "AAB=", "AA==AAAA", "AA AA", "AA\nAA",
                   "AA-_", "\u00c1AAA", "\0AAA", "%41AAA", SECRET + "!AA")
      for length in (0, 2000)),
    Row("bad base64", _wrong(*_SRC_DATA), tensors={"src": {"data": "A" * 21 + "!=="}}, apis=_TEXT),
    Row("bad base64 in a long string", _wrong(*_SRC_DATA), tensors={"src": {"data": "A" * 90_000 + "!AA="}},
        apis=_TEXT),
    Row("no data", _wrong("inputs", "src"), tensors={"src": {"data": None}}, apis=(*_TEXT, "oip"),
        others={"validate": _OK}),
    Row("a missing input", _wrong("inputs", "diff_dst"), tensors={"diff_dst": None}),
    Row("data and a file", _wrong("inputs", "src"), tensors={"src": {"npy": "AAAA"}}, apis=_TEXT),
    *(Row(f"the dtype {dtype}", (422, "unsupported", ["inputs", "src", "dtype"]), tensors={"src": {"dtype": dtype}},
          apis=(*_TEXT[:-1], "oip"), others={"oip": (422, "unsupported", ["inputs", "src", "datatype"])})
      for dtype in ("s32", "s64", "f8", "float32")),
    *(Row(f"numbers: {data}", _wrong(*_SRC_DATA), tensors={"src": {"data": data}}, apis=(*_TEXT, "oip", "upload"))
      for data in _NUMBERS),
    *(Row(f"numbers that are not JSON: {raw.decode()}", _MALFORMED, tensors={"src": {"data": RAW}}, raw=raw,
          apis=(*_TEXT, "oip", "upload"))
      for raw in (b"[1, NaN, 3, 4]", b"[-Infinity]", b"[1, 2, 3, 4,]", b"[[[1, 2, 3, 4,]]]", b"[1,, 2]", b"[,1]",
                  b"[1 2]", b"[+1]", b"[01]", b"[-]", b"[1[2]]", b"[1, 2}")),
    Row("a million numbers", _wrong(*_SRC_DATA), tensors={"src": {"shape": [1, 1, 1_000_001], "data": [1]}},
        apis=_ONE),
    Row("too few bytes", _wrong(*_SRC_DATA), tensors={"src": {"data": bytes(15)}}),
    Row("too many bytes", _wrong(*_SRC_DATA), tensors={"src": {"data": bytes(100_000)}}),
    Row("a shape of 32 TB", _wrong(*_SRC_DATA), tensors={"src": {"shape": [1, 1, 2**43]}}),
    Row("a shape of more than 64 bits", _wrong("inputs", "src", "shape"), tensors={"src": {"shape": [2**40, 2**40, 4]}},
        others={"parts": _wrong("inputs", "src"), "oip": _wrong("inputs", "src", "shape")}),
    *(Row(f"a shape {str(shape)[:40]}", _wrong("inputs", *loc), apis=_FEW, others={
          "oip": _wrong("inputs", *loc), "parts": _wrong("inputs", *part), "graph": _wrong("inputs", "0", "shape",
          *axis)},
          tensors={"src": {"shape": shape} | ({"data": b""} if 0 in shape else {})})
      for loc, part, axis, shapes in _SHAPES
      for shape in shapes),
    *(Row(f"a shape {shape}", _wrong(*_SRC_DATA), tensors={"src": {"shape": shape}}, apis=("json", "parts", "rpc",
          "oip"))
      for shape in ([], [1] * 6)),
    *(Row(f"a .npy file of {name}", answer, members=_as_npy(head), apis=_ONE)
      for answer, heads in _HEADS
      for name, head in heads.items()),
    *(Row(f"a part of a .npy file of {name}", answer, apis=("parts",),
          send=_instead(_REQUEST + _part("src", head + INPUTS["src"].tobytes()) + _DST_PART + _END, content_type=_FORM))
      for name, answer, head in _PARTS),
    Row("thousands of small tensors", _wrong("attributes", "x"), apis=("json", "rpc", "batch", "graph"),
        attributes={"x": list(map(in_json, _SMALL_TENSORS.values()))}),
    Row("an empty batch with weights of 6 GB", (413, "too_large", ["outputs", "diff_weights"]),
        attributes={"weights_shape": [1 << 15, 1 << 14, 3]},
        tensors=_empty(1 << 14, 1 << 15), apis=("json", "validate", "parts", "rpc", "batch", "oip", "job", "submit")),
    Row("a result larger than the spool", (507, "overloaded", None), tensors=_empty(1 << 12, 1 << 12),
        attributes={"weights_shape": [1 << 12, 1 << 12, 3]}, apis=("job", "submit")),
]  # fmt: skip

_JSON: list[Row] = [
    *(Row(name, _MALFORMED, attributes={"strides": RAW}, raw=raw)
      for name, raw in {
          "NaN": b"NaN", "Infinity": b"[-Infinity]", "5000 digits": b"9" * 5000,
          "zeros": b"0" * 5000 + b"3",
          "very deep nesting": b"[" * 60_000 + b"]" * 60_000,
          "half of a surrogate pair": b'"\\ud83d"', "invalid UTF-8": b'"\xff\xfe"', "a control character": b'"\0"',
      }.items()),
    *(Row(f"4000 digits: {name}", _wrong(*loc), attributes=attributes, members=members, tensors=tensors,
          raw=b"-" + b"9" * 4000,
          apis=apis)
      for name, loc, attributes, members, tensors, apis in _LONG_NUMBERS),
    *(Row(f"a body of {name}", _MALFORMED, send=_instead(body), apis=_DOCUMENTS) for name, body in NOT_JSON.items()),
    Row("no body", _MALFORMED, send=_instead(b""), apis=_DOCUMENTS, others={"oip": _INVALID}),
    *(Row(f"a body that is {body.decode()!a}", _wrong(), send=_instead(body), apis=_DOCUMENTS,
          others={"rpc": _INVALID, "oip": _INVALID})
      for body in (b"true", b"1", b"-0.0", b'"x"', b"[]", '"\U0001f600"'.encode())),
    *(Row(f"JSON in {kind}", _OTHER_TYPE, send=_instead(b"{}", content_type=kind), apis=_DOCUMENTS)
      for kind in ("application/json; charset=utf-16", 'application/json;a="b" ;Charset = "latin-1"')),
    *(Row(name, _wrong("attributes", "strides", *loc), attributes={"strides": RAW}, raw=raw)
      for name, raw, loc in (("1e400", b"1e400", []), ("the same name twice", b'{"a":1,"a":2}', []),
                             ("deep nesting", b"[" * 65 + b"]" * 65, [0]))),
    Row("a long document", _wrong("attributes", "x"), attributes={"x": [_LONG] * 3}),
    Row("a long list", _wrong("attributes", "x"), attributes={"x": RAW}, raw=b"[" + b"1," * 200_000 + b"1]"),
    Row("millions of values", _TOO_LARGE, attributes={"x": RAW}, raw=b"[" + b"1," * (1 << 22) + b"1]"),
]  # fmt: skip

_BODIES: list[Row] = [
    Row("half of the body", _MALFORMED, send=_half, others={"oip": _INVALID}),
    Row("another content type", _OTHER_TYPE, send=_typed("text/plain")),
    Row("a long content type", _OTHER_TYPE, send=_typed("multipart/form-data" + ";" * 8000)),
    *(Row(name, _OTHER_TYPE, send=_gzip(content), others={"oip": answer})
      for name, content, answer in [
          ("empty gzip members", gzip.compress(b"") * 32_000, _MALFORMED),
          ("too many gzip members", gzip.compress(b"") * 40_000, _MALFORMED),
          ("a compression bomb", gzip.compress(b" " * (65 << 20), 1), _TOO_LARGE),
          ("compressed numbers", gzip.compress(_ZEROS, 1), _TOO_LARGE),
          ("compressed blanks among numbers", gzip.compress(_ZEROS.replace(b"0,", b"  ")), _MALFORMED),
      ]),
    *(Row(f"the coding {coding}", _OTHER_TYPE, send=_repacked(bytes, coding), apis=(*_SINGLE, "graph"))
      for coding in ("gzip", "br", "identity, gzip", "x", "chunked")),
    *(Row(f"the coding {coding} of an inference", _OTHER_TYPE, send=_repacked(bytes, coding), apis=("oip",))
      for coding in ("br", "gzip, gzip", "zstd", "x")),
    *(Row(f"{coding} {name}", _MALFORMED, send=_repacked(change, coding), apis=("oip",))
      for coding in ("gzip", "deflate")
      for name, change in {
          "without its end": lambda packed: packed[:-1], "of 20 bytes": lambda packed: packed[:20],
          "with more after it": lambda packed: packed + b"x",
          "of a wrong checksum": lambda packed: packed[:-8] + bytes(8),
          "of zeros": lambda packed: packed[:2] + bytes(30), "twice": gzip.compress, "of nothing": lambda _: b"",
      }.items()),
    *(Row(f"a head of {length[:40]!r} bytes", _MALFORMED if length == "1" else _INVALID, send=_headed(length),
          apis=("oip",))
      for length in ("0", "-1", "1", "x", "1e3", "", "1.0", "99999", "9" * 30, "9" * 5000, "0" * 5000 + "3", "1_0",
          "+1")),
    *(Row(f"a form with {name}", answer, send=_instead(body, content_type=_FORM), apis=("parts",),
          others={"parts": answer})
      for name, answer, body in [
          ("all parts", _OK, _CALL + _END),
          ("a preamble", _MALFORMED, b"A preamble.\r\n" + _CALL + _END),
          ("an epilogue", _OK, b"\r\n" + _CALL + _END + b"An epilogue."),
          ("parts in another order", _OK, _REQUEST + _DST_PART + _SRC_PART + _END),
          ("a file twice", _wrong("inputs", "src"), _CALL + _SRC_PART + _END),
          ("a file under both of its names", _wrong("inputs", "input_forward"),
           _CALL + _part("input_forward", _FILES["src"]) + _END),
          ("an unknown file", _wrong("inputs", "bias"), _CALL + _part("bias", _FILES["src"]) + _END),
          ("a file too few", _wrong("inputs", "diff_dst"), _REQUEST + _SRC_PART + _END),
          ("the request last", _INVALID, _SRC_PART + _DST_PART + _REQUEST + _END),
          ("no request", _INVALID, _SRC_PART + _DST_PART + _END),
          ("half of a request", _MALFORMED, _part("request", b"{") + _SRC_PART + _DST_PART + _END),
          ("a list as the request", _wrong(), _part("request", b"[]") + _SRC_PART + _DST_PART + _END),
          *((f"a request that describes src as {described}", _wrong("inputs", "src"),
             _part("request", json.dumps({"attributes": TINY.attributes(), "inputs": {"src": described}}).encode())
             + _SRC_PART + _DST_PART + _END)
            for described in _DESCRIBED),
          *((f"a file {name}", _wrong(*loc), _REQUEST + _part("src", file) + _DST_PART + _END)
            for name, loc, file in _SRC_FILES),
          ("a file of complex numbers", _UNSUPPORTED,
           _REQUEST + _part("src", _npy("'<c8'") + bytes(32)) + _DST_PART + _END),
          ("a part without a name", _INVALID, _CALL + b"--X\r\nContent-Disposition: form-data\r\n\r\na\r\n" + _END),
          ("another disposition", _INVALID, _CALL.replace(b"form-data;", b"attachment;") + _END),
          ("half of its last part", _MALFORMED, _CALL[:-20]),
          ("the request twice", _wrong("inputs", "request"), _REQUEST + _CALL + _END),
          ("a long unknown name", _wrong("inputs", "?"), _CALL + _part(SECRET * 9, b"") + _END),
          ("an empty name", _wrong("inputs", ""), _CALL + _part("", b"") + _END),
          ("a transfer encoding", _INVALID,
           _REQUEST + _part("src", _FILES["src"], "Content-Transfer-Encoding: base64") + _END),
          ("two names for a part", _wrong("inputs", "diff_dst"),
           _REQUEST + _part("src", b"", 'Content-Disposition: form-data; name="diff_dst"') + _END),
          ("many headers", _MALFORMED, _REQUEST + _part("src", b"", *(f"X-{n}: a" for n in range(99))) + _END),
          ("a long header", _MALFORMED, _REQUEST + _part("src", b"", "X: " + "a" * 9000) + _END),
          ("a zero byte in a header", _wrong("inputs", "src"), _REQUEST + _part("src", b"", "X: \0") + _END),
          ("a part without headers", _INVALID, _REQUEST + b"--X\r\n\r\nno headers\r\n" + _END),
          ("bare line feeds", _MALFORMED, _REQUEST.replace(b"\r\n", b"\n") + _END),
          ("an open boundary", _MALFORMED, _CALL + b"--X"),
          ("another boundary", _MALFORMED, _CALL.replace(b"--X", b"--Y") + _END),
          ("no part", _INVALID, _END),
          ("boundaries alone", _MALFORMED, b"--X\r\n" * 9999),
      ]),
    *(Row(f"a form in {kind[:60]}", _OTHER_TYPE, apis=("parts",), send=_instead(_CALL + _END, content_type=kind))
      for kind in ("multipart/form-data", "multipart/form-data; boundary=", f"multipart/form-data; boundary={'X' * 71}",
                   "multipart/mixed; boundary=X", "multipart/form-data, application/json; boundary=X",
                   "multipart/form-data; charset=utf-7; boundary=X")),
]  # fmt: skip

_WORK: list[Row] = [  # much work for few bytes
    Row("a wrong result of 1,000 images and 3,375 taps", _OK, attributes=_MANY_TAPS, apis=("verify",),
        tensors={"src": _PIXELS, "diff_dst": _PIXELS, "diff_weights": _NO_GRADIENT}),
    Row("1,000 images and 3,375 taps by the reference", _OK, attributes=_MANY_TAPS, apis=("json", "parts", "rpc",
        "batch"),
        tensors={"src": _PIXELS, "diff_dst": _PIXELS}, members={"options": {"reference": True}}),
]  # fmt: skip

_NONE: dict[str, Any] = {}
_SIZED = {"binary_data_size": 16}
_PARAMETERS: list[tuple[_Loc, dict[str, Any]]] = [
    (["attributes", "stride"], {"stride": 1}),
    (["attributes", "strides"], {"strides": "2,x"}),
    (["attributes", "strides", 0], {"strides": [2.0]}),
    (["parameters", "timeout"], {"timeout": "soon"}),
    (["parameters", "timeout"], {"timeout": -1}),
    (["options", "reference"], {"reference": "yes"}),
    (["parameters", "binary_data_output"], {"binary_data_output": "yes"}),
]
_OUTPUTS: list[list[dict[str, Any]]] = [
    [{"name": "dw"}],
    [{"name": "diff_weights"}] * 2,
    [{"name": "diff_weights", "parameters": {"classification": 3}}],
    [{"name": "diff_weights", "parameters": {"binary_data": 1}}],
]
_OF_OIP: list[tuple[str, Answer, dict[str, Any], dict[str, Any]]] = [
    *((f"inputs: {inputs}"[:40], _INVALID, {"inputs": inputs}, _NONE)
      for inputs in (None, [1], [{"shape": [1]}], [{"name": "a"}] * 65)),
    ("an unknown input", _wrong("inputs", "srcs", "shape"), {"inputs": [{"name": "srcs"}]}, {}),
    ("an input twice", _wrong("inputs", "src"),
     {"inputs": [{"name": "src", "shape": [1, 1, 4], "datatype": "FP32", "data": [0] * 4}] * 2}, {}),
    ("no shape", _wrong("inputs", "src", "shape"), {}, {"shape": None}),
    ("no datatype", _wrong("inputs", "src", "datatype"), {}, {"datatype": 0}),
    *((f"binary_data_size: {size!r}", _wrong("inputs", "src"), {}, {"parameters": {"binary_data_size": size}})
      for size in (4, "16", -1)),
    ("two places", _wrong("inputs", "src"), {}, {"data": [1.0], "parameters": _SIZED}),
    ("half of a region", _wrong("parameters", "src"), {},
     {"data": None, "parameters": {"shared_memory_region": "a"}}),
    ("a region while they are disabled", (422, "unsupported", None), {},
     {"data": None, "parameters": {"shared_memory_region": "a", "shared_memory_byte_size": 16}}),
    ("parameters: a list", _INVALID, {"parameters": [1]}, {}),
    ("parameters of an input: a text", _INVALID, {}, {"parameters": "x"}),
    *((f"parameters: {given}", _wrong(*loc), {"parameters": TINY.attributes() | given}, _NONE)
      for loc, given in _PARAMETERS),
    ("an id that is no string", _INVALID, {"id": 7}, {}),
    *((f"outputs: {outputs}"[:70], _wrong("outputs", outputs[0]["name"]), {"outputs": outputs}, _NONE)
      for outputs in _OUTPUTS),
]  # fmt: skip

_GRAPHS: list[tuple[str, Answer, dict[str, Any]]] = [
    ("a huge stride of an axis of one", _OK, _with_stride(2**63 - 1, 2**63 - 1, 1)),
    ("a huge stride of a longer axis", (413, "too_large", ["graph"]), _with_stride(1, 1, 2**62)),
    ("a negative stride", _wrong("graph", 0, "outputs", 0, "stride"), _with_stride(4, 4, -1)),
    ("thousands of dimensions", _wrong("graph", 0, "outputs", 0, "shape"),
     _graph_of(node(0, VALID, layout_type="strided", shape=[9] * 40_000, stride=[9] * 40_000))),
    ("thousands of outputs", _wrong("outputs"), _graph_of(*map(_bias, range(900)), outputs=["x"] * 20_000)),
    ("a thousand ops of an unknown kind", _wrong("graph", 0, "kind"),
     _graph_of(*(_bias(n, kind=f"BiasAd{n}") for n in range(1000)))),
    ("a thousand ops with misspelt attributes", _wrong("graph", 0, "attributes", "data_format0"),
     _graph_of(*(_bias(n, attrs={f"data_format{k}": 1 for k in range(4)}) for n in range(900)))),
]  # fmt: skip

ROWS: list[Row] = [VALID, *_NAMES, *_VALUES, *_TENSORS, *_JSON, *_BODIES, *_WORK]
ROWS += [Row(name, answer, members=members, apis=("graph",)) for name, answer, members in _GRAPHS]
ROWS += [
    Row(f"an inference with {name}", answer, members=members, tensors={"src": src},
        apis=("oip",), others={"oip": answer})
    for name, answer, members, src in _OF_OIP
]  # fmt: skip
