"""Valid inputs to start from, generated in code, and dictionary words for each parser's language."""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from convgrad._frames import encode
from schemas.describe import example
from schemas.tables import find_operation, operation_names
from tests.app.samples import document
from tests.app.samples import npy as npy_file
from tests.fuzz.apis import BOUNDARY
from tests.problems import Case

__all__ = ["FRAME_WORDS", "JSON_WORDS", "MCP_WORDS", "MULTIPART_WORDS", "NPY_WORDS", "OIP_WORDS", "PATH_WORDS"]
__all__ += ["RPC_WORDS", "assembly", "frames", "jobs", "json_tensors", "lists", "mcp", "multipart", "npy", "oip"]
__all__ += ["paths", "rest", "rpc", "tensors"]

# Its tensors are just long enough to be decoded as they arrive.
TINY = Case(
    op="ConvTransposeBackwardWeights", n=1, src_channels=1, dst_channels=1, src_spatial=(120,), dst_spatial=(122,),
    kernel=(3,),
)  # fmt: skip

_NUMBERS = (b"0", b"-1", b"1e400", b"-0.0", b"1e308", b"2147483648", b"9223372036854775807", b"18446744073709551616")
_JSON = (b"null", b"true", b"NaN", b"Infinity", b"[]", b"{}", b'""', b"[[[[", b"\\ud800", b"\\u0000", b"\\/", b"\xff")
_TENSOR = (b'"dtype":', b'"shape":', b'"data":"', b'"npy":"', b'"f32"', b'"bf16"', b'"s32"', b"AAAA", b"AA==", b"AAA=")
_MEMBERS = tuple(
    b'"%s":' % name.encode()
    for name in ("attributes", "inputs", "options", "encoding", "deadline_ms", "reference", "graph", "kind", "attrs")
)

NPY_WORDS = (
    *(b"'descr': ", b"'fortran_order': ", b"'shape': ", b"'<f4'", b"'>f2'", b"'|V2'", b"'|O'", b"True", b"False"),
    *(b"()", b"(3,)", b"(3)", b"L", b"\x93NUMPY\x01\x00", b"\x93NUMPY\x02\x00", b"\x93NUMPY\x03\x00", *_NUMBERS),
)
FRAME_WORDS = (
    *(b"CGG1", b'{"type":', b'"begin"', b'"tile"', b'"progress"', b'"end"', b'"error"', b'"offset":', b'"shape":'),
    *(b'"dtype":"f32"', b'"tiles":', b'"sha256":"', b'"seq":', b'"code":', b'"message":', *_NUMBERS, *_JSON),
)
JSON_WORDS = (*_JSON, *_NUMBERS, *_TENSOR, *_MEMBERS, b'"strides":[', b'"auto_pad":"same_upper"', b'"groups":')
RPC_WORDS = (
    *JSON_WORDS,
    *(b'{"jsonrpc":"2.0","method":"ops.validate","id":1}', b'"params":', b'"ops.list"', b'"id":', b'"rpc.discover"'),
    *(b'"notifications/cancelled"', b'"requestId":'),
)
MCP_WORDS = (
    *(*_JSON, *_NUMBERS, b'"method":"', b'"params":', b'"name":"', b'"arguments":', b'"_meta":', b'"progressToken":'),
    *(b'"seed":', b'"handle":"', b'"path":"', b'"shape":', b'"element":', b'"check":"', b'"cursor":"', b'"id":null'),
    *(b'"tools/call"', b'"resources/read"', b'"prompts/get"', b'"initialize"', b'"completion/complete"', *_MEMBERS),
)
PATH_WORDS = (b"..", b"/", b"./", b"link", b"loop", b"folder", b"outside", b"real.npy", b"\0", b"~", b"\xff", b"x" * 99)
MULTIPART_WORDS = (
    *(b"\r\n--" + BOUNDARY, b"--", b"\r\n\r\n", b'Content-Disposition: form-data; name="', b'"; filename="'),
    *(b"Content-Transfer-Encoding: base64", *JSON_WORDS, *NPY_WORDS),
)
OIP_WORDS = (
    *(*_JSON, *_NUMBERS, b'"inputs":[', b'"outputs":[', b'"parameters":{', b'"binary_data_size":', b'"datatype":'),
    *(b'"FP32"', b'"BF16"', b'"INT64"', b'"data":[', b'"data":[[', b"],[", b",", b'"timeout":', b'"binary_data":true'),
)


def _headed(bodies: Iterator[bytes], firsts: Iterator[int], seconds: Iterator[int]) -> list[bytes]:
    """Prefix each body with the two bytes that select how it is sent."""
    return [bytes((first, second)) + body for body, first, second in zip(bodies, firsts, seconds, strict=False)]


def _arrays() -> Iterator[np.ndarray[Any, Any]]:
    for kind, shape in itertools.product(("<f4", ">f4", "<f2", "<i4", ">i8", "V2"), ((), (0,), (2, 3), (1, 2, 3))):
        yield np.zeros(shape, kind)
    yield np.asfortranarray(np.zeros((2, 3), "<f4"))


def _text(value: Any) -> bytes:
    return json.dumps(value).encode()


def npy() -> list[bytes]:
    """Return files as written by NumPy."""
    return [bytes((number,)) + npy_file(array) for number, array in enumerate(_arrays())]


def _headers() -> list[dict[str, Any]]:
    begin = {"type": "begin", "op": "x", "output": "y", "dtype": "f32", "shape": [2, 2], "tiles": 2, "resolved": {}}
    sha256 = "374708fff7719dd5979ec875d56cd2286f6d3cf7ec317a3b25632aab28ec37bb"  # of 16 zeros
    return [
        begin,
        {"type": "progress", "done": 0, "total": 2},
        {"type": "tile", "seq": 0, "offset": [0, 0], "shape": [1, 2]},
        {"type": "tile", "seq": 1, "offset": [1, 0], "shape": [1, 2]},
        {"type": "end", "tiles": 2, "sha256": sha256, "stats": {}},
        {"type": "error", "code": "worker_lost", "message": "x", "data": {}},
    ]


def frames() -> list[bytes]:
    """Return one frame of each kind, and a complete stream."""
    made = [
        b"".join(bytes(piece) for piece in encode(header, b"\0" * 8 * (header["type"] == "tile")))
        for header in _headers()
    ]
    return [bytes((how,)) + text for how, text in enumerate([*made, b"".join(made)])]


def assembly() -> list[bytes]:
    """Return a complete stream, and one that fails, as alternating lines of header and body."""
    *good, error = [_text(header) + b"\n" + b"\0" * 8 * (header["type"] == "tile") for header in _headers()]
    return [b"\0" + b"\n".join(good), b"\1" + b"\n".join([good[0], error])]


def _documents() -> list[bytes]:
    """Return calls in JSON: base64, `.npy`, only described, dumped by oneDNN Graph, long and short."""
    inputs = TINY.inputs()
    described = [example(find_operation(name)) for name in operation_names()]
    long = {"inputs": {"src": {"dtype": "f32", "shape": [300], "data": base64.b64encode(b"\0" * 1200).decode()}}}
    op = {"id": 0, "kind": TINY.op, "attrs": {"strides": {"type": "s64[]", "value": [1]}}, "inputs": [], "outputs": []}
    calls = [document(TINY, inputs, as_numbers=True, encoding="list"), document(TINY, inputs)]
    calls.append(document(TINY, inputs, as_npy=True, encoding="npy", deadline_ms=9000))
    return [_text(value) for value in (*described, *calls, long, op, {"graph": [op]})]


def json_tensors() -> list[bytes]:
    """Return documents with tensors."""
    return [bytes((how,)) + text for how, text in enumerate(_documents())]


def lists() -> list[bytes]:
    """Return documents with lists of numbers."""
    shaped = {"datatype": "FP32", "shape": [2, 2]}
    tensors = [
        {"name": "src", "data": [1, 2.5, -3e4, 0]} | shaped,
        {"name": "src", "data": [[1, 2], [3, 4]]} | shaped,
        {"name": "src", "shape": [0], "datatype": "INT64", "data": []},
        {"data": [[1e30, 2]], "name": "late"},
        {"dtype": "bf16", "shape": [2, 1], "data": [["NaN"], ["-Infinity"]]},
    ]
    return [bytes((how,)) + _text({"inputs": [tensor]}) for how, tensor in enumerate(tensors)]


def rpc() -> list[bytes]:
    """Return calls, validations, a batch, notifications and queries."""
    call = json.loads(_documents()[-5])
    described = example(find_operation(TINY.op))
    asked = {"jsonrpc": "2.0", "id": 1}
    messages: list[Any] = [
        asked | {"method": TINY.op, "params": call},
        asked | {"method": TINY.op, "params": [call["attributes"], call["inputs"]]},
        asked | {"method": "ops.validate", "params": {"op": TINY.op, **described}},
        asked | {"method": "ops.describe", "params": ["ConvTranspose"]},
        {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 1}},
        [asked | {"method": "ops.list"}, 1, {"jsonrpc": "2.0", "method": "x"}],
    ]
    return _headed(map(_text, messages), itertools.repeat(0), itertools.count(0, 3))


def rest() -> list[bytes]:
    """Return calls and validations of every operation."""
    return _headed(iter(_documents()), itertools.count(32), itertools.count(0, 7)) + _headed(
        iter(_documents()[-5:-3]), itertools.repeat(operation_names().index(TINY.op)), iter((8, 16))
    )


def multipart() -> list[bytes]:
    """Return a call in parts, with and without files."""
    request = json.loads(_documents()[-5])
    parts = [("request", _text(request | {"inputs": {}}))]
    parts += [(name, npy_file(array)) for name, array in TINY.inputs().items()]
    form = b'--%s\r\nContent-Disposition: form-data; name="%s"; filename="f"\r\n\r\n%s\r\n'
    written = [form % (BOUNDARY, name.encode(), content) for name, content in parts]
    end = b"--%s--\r\n" % BOUNDARY
    bodies = [b"".join(written) + end, written[0] + end, form % (BOUNDARY, b"request", _text(request)) + end]
    op = operation_names().index(TINY.op)
    return _headed(iter(bodies * 2), itertools.repeat(op), itertools.count(0, 9))


def jobs() -> list[bytes]:
    """Return calls that become jobs, in both forms, and a graph."""
    forms, op = [data[2:] for data in multipart()[:3]], operation_names().index(TINY.op)
    return [
        *_headed(iter(_documents()), itertools.count(), itertools.repeat(4)),
        *_headed(iter(_documents()[-5:-2]), itertools.repeat(op), itertools.repeat(4)),
        *_headed(iter(forms), itertools.repeat(op), itertools.repeat(20)),
        *_headed(iter(_documents()[-1:]), iter((0,)), iter((36,))),
    ]


def tensors() -> list[bytes]:
    """Return uploads, in both forms."""
    given = [{"dtype": "f32", "shape": [2], "data": [1, 2.5]}, {"dtype": "bf16", "shape": [2], "data": "AAAAAA=="}]
    files = [npy_file(np.zeros((2, 3), "<f4")), npy_file(np.zeros(3, "<f2"))]
    part = b'--%s\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n'
    forms = [
        part % (BOUNDARY, b"request", b"{}") + part % (BOUNDARY, b"tensor", file) + b"--%s--\r\n" % BOUNDARY
        for file in files
    ]
    bodies = [_text({"inputs": {"tensor": each}}) for each in given]
    return _headed(iter(bodies * 2), itertools.repeat(0), itertools.repeat(4)) + _headed(
        iter(forms * 2), itertools.repeat(0), iter((20, 20, 17, 18))
    )


def mcp() -> list[bytes]:
    """Return messages of both revisions: tools, resources, the prompt."""
    version, own = "2026-07-28", "io.modelcontextprotocol/"
    meta = {f"{own}protocolVersion": version, f"{own}clientCapabilities": {}, "progressToken": 1}
    seeds = {"src": {"seed": 1, "shape": [1, 1, 120]}, "diff_dst": {"seed": 2, "shape": [1, 1, 122]}}
    call = {"op": TINY.op, "attributes": TINY.attributes(), "inputs": seeds}
    tools = {
        "describe": {"op": TINY.op}, "validate": call, "explain": call | {"element": [0, 0, 1]}, "compute": call,
        "check_begin": {"takes": {"ops": ["BiasAdd"]}, "cases": 1},
    }  # fmt: skip
    asked: list[tuple[str, dict[str, Any]]] = [
        ("tools/call", {"name": name, "arguments": each}) for name, each in tools.items()
    ]
    asked += [("resources/read", {"uri": "convgrad://faults"}), ("prompts/get", {"name": "write_and_prove_a_kernel"})]
    asked += [(name, {}) for name in ("tools/list", "resources/list", "prompts/list", "ping", "server/discover")]
    messages = [{"jsonrpc": "2.0", "id": 1, "method": name, "params": {"_meta": meta} | each} for name, each in asked]
    messages.append({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 1}})
    return [
        *_headed(map(_text, messages), itertools.repeat(0), itertools.repeat(4)),
        *_headed(map(_text, messages), itertools.repeat(1), itertools.repeat(0)),
    ]


def paths() -> list[bytes]:
    """Return paths of files in the allowed folder, out of it, and of none."""
    return [*b"real.npy folder/real.npy ../outside.npy link loop hidden /etc/passwd none.npy".split(), b""]


def oip() -> list[bytes]:
    """Return inference requests: binary, with the head on a separate line, and lists of numbers."""
    inputs = TINY.inputs()
    named = [(name, {"name": name, "shape": list(array.shape), "datatype": "FP32"}) for name, array in inputs.items()]
    numbers = [head | {"data": inputs[name].ravel().tolist()} for name, head in named]
    binary = [head | {"parameters": {"binary_data_size": inputs[name].nbytes}} for name, head in named]
    parameters = TINY.attributes()
    data = b"".join(array.tobytes().replace(b"\n", b"\0") for array in inputs.values())
    outputs = [{"name": "diff_weights", "parameters": {"binary_data": True}}]
    bodies = [
        _text({"inputs": numbers, "parameters": parameters}),
        _text({"id": "a", "inputs": binary, "outputs": outputs, "parameters": parameters}) + b"\n" + data,
    ]
    op = operation_names().index(TINY.op)
    return _headed(iter(bodies * 3), itertools.repeat(op), iter((0, 24, 8, 56, 40, 19)))
