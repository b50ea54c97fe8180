"""The `/v2` API's answers to wrong requests: always `{"error": ".."}`, never a 500, and before tensors are read."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest

from tests.app import oip
from tests.app.bare import connected, replies
from tests.app.resident import Resident
from tests.app.samples import SMALL, same_bits
from tests.hostile import wire
from tests.live import LiveService

INPUTS = SMALL.inputs()
OP = SMALL.op
Change = Callable[[dict[str, Any]], object]


def changed(change: Change) -> tuple[bytes, dict[str, str]]:
    """Return the body and headers of a valid request whose JSON is changed by `change`."""
    document = oip.head(SMALL, INPUTS)
    change(document)
    return oip.body(document, INPUTS)


def src(document: dict[str, Any]) -> dict[str, Any]:
    """Return the src of a request."""
    found: dict[str, Any] = document["inputs"][0]
    return found


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        *(("GET", f"/v2/{page}", 404) for page in ("nothing", "models", "models/nope", "models/%00/ready")),
        *(("GET", f"/v2/models/nope/{page}", 404) for page in ("config", "ready", "stats")),
        ("POST", "/v2/models/nope/infer", 404),
        ("POST", "/v2/models/ConvTranspose/versions/2/infer", 404),
        ("GET", "/v2/models/ConvTranspose/versions/latest", 404),
        ("GET", "/v2/models/ConvTranspose/infer", 405),
        *(("POST", page, 405) for page in ("/v2", "/v2/health/live")),
        ("DELETE", "/v2/models/ConvTranspose", 405),
        ("PUT", "/v2/repository/index", 405),
        ("GET", "/v2/systemsharedmemory/status", 400),
        ("POST", "/v2/systemsharedmemory/unregister", 400),
    ],
)
def test_unknown_pages_are_404(http: httpx.Client, method: str, path: str, status: int) -> None:
    """An unknown page, model or version is 404, a wrong method 405, a disabled extension 400."""
    response = http.request(method, path)
    oip.error(response, status)
    assert ("allow" in response.headers) == (status == 405)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: src(d).update(name="srcs"), "did you mean src"),
        (lambda d: d["inputs"].pop(), "diff_dst is required"),
        (lambda d: src(d).update(datatype="float32"), "; use FP32$"),
        (lambda d: src(d)["parameters"].update(binary_data_size=4), "binary_data_size of src is 4"),
        (lambda d: d["parameters"].update(stride=1), "; use strides"),
        (lambda d: d["parameters"].update(strides=[0, 2], groups=0), "strides.*; groups"),
        (lambda d: d.update(parameters={f"a{number}": 1 for number in range(64)}), "; and 5 more$"),
        (lambda d: d.update(outputs=[{"name": "dw"}]), "; use diff_weights$"),
    ],
)
def test_the_text_names_the_broken_rules(http: httpx.Client, change: Change, words: str) -> None:
    """The protocol's error is one text: it names each broken rule up to a limit, and what was probably meant."""
    content, headers = changed(change)
    message = oip.error(oip.post(http, OP, content, headers), 400)
    assert re.search(words, message), message


def test_bodies_of_another_length(http: httpx.Client) -> None:
    """A body with fewer or more bytes than its tensors is rejected, with and without a Content-Length."""
    content, headers = changed(lambda _: None)
    for wrong in (content[:-1], content + b"x", content[: int(headers[oip.HEAD_LENGTH])]):
        assert "bytes" in oip.error(oip.post(http, OP, wrong, headers), 400)
        assert "bytes" in oip.error(oip.post(http, OP, iter([wrong[:50], wrong[50:]]), headers), 400)
    short = iter([content[:20]])
    assert "the body is shorter than" in oip.error(oip.post(http, OP, short, headers), 400)
    assert oip.HEAD_LENGTH in oip.error(oip.post(http, OP, content[: int(headers[oip.HEAD_LENGTH])]), 400)


@pytest.mark.parametrize(
    "kind", ["application/json; charset=utf-8", "application/octet-stream", "application/vnd.a+json"]
)
def test_known_content_types(http: httpx.Client, kind: str) -> None:
    """The content types that clients of the protocol send are accepted."""
    content, headers = changed(lambda _: None)
    response = oip.post(http, OP, content, headers | {"content-type": kind})
    assert same_bits(oip.read(response, "f32"), SMALL.expected(INPUTS))


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


@pytest.mark.heavy
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
    lines = [b"%s: %d" % (oip.HEAD_LENGTH.encode(), len(text)), b"content-length: %d" % (length + len(text))]
    with connected(service.url) as sock:
        sock.sendall(wire.head(f"/v2/models/{OP}/infer", *lines) + text)
        ((status, answer),) = replies(sock, 1)
    assert (status, b"strides[0] must be at least 1" in answer) == (400, True)


def test_refusals_leave_nothing_behind(tight: Resident, tight_http: httpx.Client) -> None:
    """Rejected requests release their memory, whatever the reason."""
    content, headers = changed(lambda _: None)
    late, late_headers = changed(lambda d: d["parameters"].update(timeout=1))
    for body, sent in ((content[:-1], headers), (content + b"x", headers), (late, late_headers)):
        oip.post(tight_http, OP, iter([body[:700], body[700:]]), sent)
    tight.until(lambda: tight.service.segments.stats().used == 0)
    assert same_bits(oip.read(oip.post(tight_http, OP, content, headers), "f32"), SMALL.expected(INPUTS))


def test_infinities_are_strings_in_json(http: httpx.Client) -> None:
    """An output with infinities is the same as JSON, where they are strings, and as binary data."""
    inputs = {name: np.full_like(array, 3e38) for name, array in INPUTS.items()}
    document = oip.head(SMALL, inputs)
    (output,) = oip.post(http, OP, *oip.body(document, inputs)).json()["outputs"]
    assert "Infinity" in output["data"]
    document["parameters"]["binary_data_output"] = True
    binary = oip.read(oip.post(http, OP, *oip.body(document, inputs)), "f32")
    assert np.array(output["data"], np.float32).tobytes() == binary.tobytes()
