"""The `/v2` API's answers to wrong requests: always `{"error": ".."}`, never a 500, and before tensors are read."""

from __future__ import annotations

import gzip
import json
import re
import socket
import zlib
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest

from tests.app import oip
from tests.app.bare import connected, written
from tests.app.resident import Resident
from tests.app.samples import SMALL, same_bits
from tests.live import LiveService

INPUTS = SMALL.inputs()
OP = SMALL.op
Change = Callable[[dict[str, Any]], object]


def changed(change: Change, *, binary: bool = True) -> tuple[bytes, dict[str, str]]:
    """Return the body and headers of a valid request whose JSON is changed by `change`."""
    document = oip.head(SMALL, INPUTS, binary=binary)
    change(document)
    return oip.body(document, INPUTS if binary else {})


def src(document: dict[str, Any]) -> dict[str, Any]:
    """Return the src of a request."""
    found: dict[str, Any] = document["inputs"][0]
    return found


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v2/nothing", 404),
        ("GET", "/v2/models", 404),
        ("GET", "/v2/models/nope", 404),
        ("GET", "/v2/models/nope/config", 404),
        ("GET", "/v2/models/nope/ready", 404),
        ("GET", "/v2/models/nope/stats", 404),
        ("POST", "/v2/models/nope/infer", 404),
        ("POST", "/v2/models/ConvTranspose/versions/2/infer", 404),
        ("GET", "/v2/models/ConvTranspose/versions/latest", 404),
        ("GET", "/v2/models/%00/ready", 404),
        ("GET", "/v2/models/ConvTranspose/infer", 405),
        ("POST", "/v2", 405),
        ("DELETE", "/v2/models/ConvTranspose", 405),
        ("PUT", "/v2/repository/index", 405),
        ("POST", "/v2/health/live", 405),
        ("GET", "/v2/systemsharedmemory/status", 400),
        ("POST", "/v2/systemsharedmemory/unregister", 400),
    ],
)
def test_unknown_pages_are_404(http: httpx.Client, method: str, path: str, status: int) -> None:
    """An unknown page, model or version is 404, a wrong method 405, a disabled extension 400."""
    response = http.request(method, path)
    oip.error(response, status)
    assert ("allow" in response.headers) == (status == 405)


WRONG: dict[str, tuple[Change, str]] = {
    "inputs missing": (lambda d: d.pop("inputs"), "inputs must be a list"),
    "inputs no list": (lambda d: d.update(inputs={}), "inputs must be a list"),
    "input no object": (lambda d: d["inputs"].append(1), "must be an object with a name"),
    "input without name": (lambda d: src(d).pop("name"), "must be an object with a name"),
    "many inputs": (lambda d: d.update(inputs=[{"name": "a"}] * 65), "at most 64"),
    "input unknown": (lambda d: src(d).update(name="srcs"), "did you mean src"),
    "input twice": (lambda d: d["inputs"].append(dict(src(d))), "src is given twice"),
    "input absent": (lambda d: d["inputs"].pop(), "diff_dst is required"),
    "shape missing": (lambda d: src(d).pop("shape"), "the shape of src must be a list"),
    "shape of floats": (lambda d: src(d).update(shape=[2.0, 4, 5, 4]), "must be an integer"),
    "shape negative": (lambda d: src(d).update(shape=[-2, 4, 5, 4]), "must be from 0"),
    "shape huge": (lambda d: src(d).update(shape=[2**62, 2**62]), "fewer than 2\\^63 bytes"),
    "shape long": (lambda d: src(d).update(shape=[1] * 13), "at most 12 dimensions"),
    "datatype missing": (lambda d: src(d).pop("datatype"), "needs a datatype"),
    "datatype unknown": (lambda d: src(d).update(datatype="FP8"), "FP32, FP16 or BF16"),
    "datatype of NumPy": (lambda d: src(d).update(datatype="float32"), "; use FP32$"),
    "datatype of integers": (lambda d: src(d).update(datatype="INT32"), "f32, f16 or bf16"),
    "size wrong": (lambda d: src(d)["parameters"].update(binary_data_size=4), "binary_data_size of src is 4"),
    "size no integer": (lambda d: src(d)["parameters"].update(binary_data_size="640"), "must be an integer"),
    "size negative": (lambda d: src(d)["parameters"].update(binary_data_size=-1), "must be an integer"),
    "two places": (lambda d: src(d).update(data=[1.0]), "more than one"),
    "no place": (lambda d: src(d).pop("parameters"), "src needs data"),
    "region half": (lambda d: src(d).update(parameters={"shared_memory_region": "a"}), "needs both"),
    "region off": (
        lambda d: src(d).update(parameters={"shared_memory_region": "a", "shared_memory_byte_size": 640}),
        "disabled",
    ),
    "parameters no object": (lambda d: d.update(parameters=[1]), "must be an object"),
    "input parameters no object": (lambda d: src(d).update(parameters="x"), "must be an object"),
    "attribute unknown": (lambda d: d["parameters"].update(stride=1), "; use strides"),
    "attribute wrong": (lambda d: d["parameters"].update(strides="2,x"), "strides must be a list"),
    "attribute of floats": (lambda d: d["parameters"].update(strides=[2.0, 2.0]), "must be an integer"),
    "two rules": (lambda d: d["parameters"].update(strides=[0, 2], groups=0), "strides.*; groups"),
    "timeout text": (lambda d: d["parameters"].update(timeout="soon"), "timeout must be microseconds"),
    "timeout negative": (lambda d: d["parameters"].update(timeout=-1), "timeout must be microseconds"),
    "reference": (lambda d: d["parameters"].update(reference="yes"), "reference must be true or false"),
    "binary output": (lambda d: d["parameters"].update(binary_data_output="yes"), "must be a bool"),
    "id no string": (lambda d: d.update(id=7), "id must be a string"),
    "output unknown": (
        lambda d: d.update(outputs=[{"name": "dw"}]),
        "it has diff_weights, diff_bias, diff_src; use diff_weights$",
    ),
    "output twice": (lambda d: d.update(outputs=[{"name": "diff_weights"}] * 2), "name each output once"),
    "classification": (
        lambda d: d.update(outputs=[{"name": "diff_weights", "parameters": {"classification": 3}}]),
        "classification",
    ),
    "output binary": (
        lambda d: d.update(outputs=[{"name": "diff_weights", "parameters": {"binary_data": 1}}]),
        "must be a bool",
    ),
}


def test_an_unknown_input_of_an_operation_without_a_shape(http: httpx.Client) -> None:
    """It is an unknown input, not a shape with wrong values."""
    inputs = [{"name": "x", "shape": [1, 1, 4, 4], "datatype": "FP32", "data": [0] * 16}]
    message = oip.error(http.post("/v2/models/Convolution/infer", json={"inputs": inputs}), 400)
    assert "x is not an input of Convolution; use src" in message


@pytest.mark.parametrize("case", WRONG)
def test_wrong_heads(http: httpx.Client, case: str) -> None:
    """The error names the broken rule of the request object."""
    change, words = WRONG[case]
    content, headers = changed(change)
    message = oip.error(oip.post(http, OP, content, headers), 400)
    assert re.search(words, message), message


NUMBERS: dict[str, tuple[str, str]] = {
    "too few": ("[1]", "has 1 numbers, but the shape needs 160"),
    "too many": ("[" + "1," * 160 + "1]", "data of src"),
    "text": ('["1"]', "only numbers"),
    "bool": ("[true]", "only numbers"),
    "null": ("[null]", "only numbers"),
    "object": ("[{}]", "only numbers"),
    "NaN": ("[NaN]", "not JSON"),
    "two in one": ("[1 2]", "not JSON"),
    "two commas": ("[1,,2]", "not JSON"),
    "comma first": ("[,1]", "not JSON"),
    "comma last": ("[1,]", "not JSON"),
    "plus": ("[+1]", "not JSON"),
    "zero first": ("[01]", "not JSON"),
    "minus alone": ("[-]", "not JSON"),
    "out of range": ("[" + ",".join(["1e39"] * 160) + "]", "outside the range"),
    "far out of range": ("[1e999]", "outside the range"),
    "many digits": (f"[{'1' * 600}, 1]", "data of src"),
    "brackets": ("[1[2]]", "not JSON"),
    "ragged": ("[" + ",".join(["[1,1]"] * 80) + "]", "nested like its shape"),
    "deep": ("[" * 40 + "1" + "]" * 40, "nested"),
    "no list": ("7", "must be a list of numbers"),
    "string": ('"AAAA"', "must be a list of numbers"),
}


@pytest.mark.parametrize("order", ["data last", "data first"])
@pytest.mark.parametrize("case", NUMBERS)
def test_wrong_numbers(http: httpx.Client, case: str, order: str) -> None:
    """A tensor in JSON must be numbers, as many as its shape needs, flat or nested like the shape."""
    text, words = NUMBERS[case]
    document = oip.head(SMALL, INPUTS, binary=False)
    entry = document["inputs"][0]
    entry["data"] = "@"
    if order == "data first":
        document["inputs"][0] = dict(reversed(entry.items()))
    content = json.dumps(document).replace('"@"', text).encode()
    assert words in oip.error(oip.post(http, OP, content), 400)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"7", b'"a', b"\xff\xfe", b'{"inputs": [}', b"NaN", b"{}{}"])
def test_invalid_request_bodies(http: httpx.Client, content: bytes) -> None:
    """A body that is not a JSON object is rejected with 400."""
    oip.error(oip.post(http, OP, content), 400)


@pytest.mark.parametrize("length", ["", "-1", "0", "1.5", "x", "²", "9" * 30, "999999"])
def test_wrong_head_lengths(http: httpx.Client, length: str) -> None:
    """Inference-Header-Content-Length must be a number of bytes, and at most the length of the body."""
    content, _ = changed(lambda _: None)
    headers = {oip.HEAD_LENGTH: length.encode()}
    oip.error(oip.post(http, OP, content, headers), 400)  # type: ignore[arg-type]


def test_bodies_of_another_length(http: httpx.Client) -> None:
    """A body with fewer or more bytes than its tensors is rejected, with and without a Content-Length."""
    content, headers = changed(lambda _: None)
    for wrong in (content[:-1], content + b"x", content[: int(headers[oip.HEAD_LENGTH])]):
        assert "bytes" in oip.error(oip.post(http, OP, wrong, headers), 400)
        assert "bytes" in oip.error(oip.post(http, OP, iter([wrong[:50], wrong[50:]]), headers), 400)
    short = iter([content[:20]])
    assert "the body is shorter than" in oip.error(oip.post(http, OP, short, headers), 400)
    assert oip.HEAD_LENGTH in oip.error(oip.post(http, OP, content[: int(headers[oip.HEAD_LENGTH])]), 400)


@pytest.mark.parametrize("kind", ["text/plain", "multipart/form-data; boundary=x", "application/x-npy"])
def test_unknown_content_types(http: httpx.Client, kind: str) -> None:
    """A content type that is not an inference request's is 415."""
    content, headers = changed(lambda _: None)
    oip.error(oip.post(http, OP, content, headers | {"content-type": kind}), 415)


@pytest.mark.parametrize(
    "kind", ["application/json; charset=utf-8", "application/octet-stream", "application/vnd.a+json"]
)
def test_known_content_types(http: httpx.Client, kind: str) -> None:
    """The content types that clients of the protocol send are accepted."""
    content, headers = changed(lambda _: None)
    response = oip.post(http, OP, content, headers | {"content-type": kind})
    assert same_bits(oip.read(response, "f32"), SMALL.expected(INPUTS))


@pytest.mark.parametrize("coding", ["br", "gzip, gzip", "zstd", "x"])
def test_unknown_codings(http: httpx.Client, coding: str) -> None:
    """A content coding other than gzip and deflate is 415."""
    content, headers = changed(lambda _: None)
    oip.error(oip.post(http, OP, content, headers | {"content-encoding": coding}), 415)


def test_broken_codings(http: httpx.Client) -> None:
    """Bytes that do not match their coding, end early or continue after the end are rejected."""
    content, headers = changed(lambda _: None)
    for coding, coded in (("gzip", gzip.compress(content)), ("deflate", zlib.compress(content))):
        headers["content-encoding"] = coding
        for wrong in (content, coded[:-3], coded[: len(coded) // 2], coded + b"more", b""):
            oip.error(oip.post(http, OP, wrong, headers), 400)


def test_content_encoding_spellings(http: httpx.Client) -> None:
    """Raw deflate, several gzip members and a body split anywhere are decoded."""
    content, headers = changed(lambda _: None)
    expected = SMALL.expected(INPUTS)
    bare = zlib.compressobj(wbits=-15)
    forms = {
        "deflate": bare.compress(content) + bare.flush(),
        "gzip": gzip.compress(content[:100]) + gzip.compress(content[100:]),
        "x-gzip": gzip.compress(content),
        "identity": content,
    }
    for coding, coded in forms.items():
        pieces = (coded[start : start + 37] for start in range(0, len(coded), 37))
        response = oip.post(http, OP, pieces, headers | {"content-encoding": coding})
        assert same_bits(oip.read(response, "f32"), expected)


def test_a_compression_bomb_is_rejected_early(tight_http: httpx.Client) -> None:
    """A small body that inflates past its tensors, or past the body limit, is rejected as soon as it does."""
    content, headers = changed(lambda _: None)
    bomb = gzip.compress(content + bytes(64 << 20))
    assert "after its last" in oip.error(oip.post(tight_http, OP, bomb, headers | {"content-encoding": "gzip"}), 400)
    blanks = gzip.compress(b'{"inputs":[{"data":[' + b" " * (64 << 20))
    assert "exceeds the limit" in oip.error(oip.post(tight_http, OP, blanks, {"content-encoding": "gzip"}), 413)


def test_limits(tight_http: httpx.Client) -> None:
    """Bodies, heads and calls over a limit are 413."""
    oip.error(oip.post(tight_http, OP, bytes(5 << 20)), 413)
    oip.error(oip.post(tight_http, OP, iter([b'{"a":"', b"x" * (5 << 20)])), 413)
    shape = [1, 256, 200, 200]
    tensors = [{"name": "src", "shape": shape, "datatype": "FP32", "parameters": {"binary_data_size": 4 * 256 * 40000}}]
    tensors.append(dict(tensors[0], name="diff_dst"))
    attributes = {"strides": [1, 1], "pads_begin": [0, 0], "pads_end": [0, 0], "dilations": [1, 1],
                  "data_format": "NCX", "weights_format": "OIX", "weights_shape": [256, 256, 1, 1]}  # fmt: skip
    text = json.dumps({"inputs": tensors, "parameters": attributes}).encode()
    response = oip.post(tight_http, "ConvolutionBackwardWeights", iter([text]), {oip.HEAD_LENGTH: str(len(text))})
    assert "allows" in oip.error(response, 413)


def refusal(service: LiveService, content: bytes, headers: dict[str, str]) -> bytes:
    """Send a head and nothing else; return the answer."""
    address = service.url.removeprefix("http://").split(":")
    lines = [
        f"POST /v2/models/{OP}/infer HTTP/1.1",
        "Host: localhost",
        *(f"{key}: {value}" for key, value in headers.items()),
    ]
    with socket.create_connection((address[0], int(address[1])), timeout=20) as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode() + content)
        answer = b""
        while b'"}' not in answer and (piece := connection.recv(65536)):
            answer += piece
    return answer


@pytest.mark.parametrize("shape_input", [False, True], ids=["parameter", "input"])
def test_a_gigabyte_is_refused_by_its_head(service: LiveService, shape_input: bool) -> None:
    """A call with a wrong attribute is rejected before a gigabyte of its tensors arrives."""
    shape = [128, 64, 181, 181]
    size = 128 * 64 * 181 * 181 * 2
    entry = {"shape": shape, "datatype": "FP16", "parameters": {"binary_data_size": size}}
    tensors = [entry | {"name": "src"}, entry | {"name": "diff_dst"}]
    attributes = SMALL.attributes() | {"strides": [0, 1], "weights_shape": [64, 64, 1, 1]}
    length = 2 * size
    if shape_input:  # the values of the shape come after everything else
        del attributes["weights_shape"]
        tensors.append(
            {"name": "weights_shape", "shape": [4], "datatype": "INT64", "parameters": {"binary_data_size": 32}}
        )
        length += 32
    text = json.dumps({"inputs": tensors, "parameters": attributes}).encode()
    assert length > 1_000_000_000
    headers = {oip.HEAD_LENGTH: str(len(text)), "Content-Length": str(length + len(text))}
    answer = refusal(service, text, headers)
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"strides[0] must be at least 1" in answer


def test_refusals_leave_nothing_behind(tight: Resident, tight_http: httpx.Client) -> None:
    """Rejected requests release their memory, whatever the reason."""
    content, headers = changed(lambda _: None)
    late, late_headers = changed(lambda d: d["parameters"].update(timeout=1))
    for body, sent in ((content[:-1], headers), (content + b"x", headers), (late, late_headers)):
        oip.post(tight_http, OP, iter([body[:700], body[700:]]), sent)
    tight.until(lambda: tight.service.segments.stats().used == 0)
    assert same_bits(oip.read(oip.post(tight_http, OP, content, headers), "f32"), SMALL.expected(INPUTS))


def test_a_disconnect_counts_as_a_failure(tight: Resident) -> None:
    """A connection that breaks in the middle of a body ends its request, which counts as a failure."""
    content, headers = changed(lambda _: None)
    made = httpx.Request("POST", f"http://localhost/v2/models/{OP}/infer", content=content, headers=headers)
    with connected(tight.url) as sock:
        sock.sendall(b"".join(written(made))[:-10])
        tight.until(lambda: tight.service.admission.requests == 1)
    tight.until(lambda: tight.service.admission.requests == 0)


def test_infinities_are_strings_in_json(http: httpx.Client) -> None:
    """An output with infinities is the same as JSON, where they are strings, and as binary data."""
    inputs = {name: np.full_like(array, 3e38) for name, array in INPUTS.items()}
    document = oip.head(SMALL, inputs)
    (output,) = oip.post(http, OP, *oip.body(document, inputs)).json()["outputs"]
    assert "Infinity" in output["data"]
    document["parameters"]["binary_data_output"] = True
    binary = oip.read(oip.post(http, OP, *oip.body(document, inputs)), "f32")
    assert np.array(output["data"], np.float32).tobytes() == binary.tobytes()


def test_a_long_error_says_how_many_rules_it_leaves_out(http: httpx.Client) -> None:
    """The text names at most 64 broken rules, then how many more there are."""
    head = oip.head(SMALL, SMALL.inputs()) | {"parameters": {f"a{number}": 1 for number in range(64)}}
    content, headers = oip.body(head, SMALL.inputs())
    error = oip.post(http, SMALL.op, content, headers).json()["error"]
    assert error.count("; ") == 64
    assert error.endswith("; and 5 more")
