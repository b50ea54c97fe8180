"""The `/v1` API's answers to wrong calls: the right class, no values repeated, and the next call works."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest

from tests.app.samples import (
    FRAMES,
    JSON,
    NPY,
    SMALL,
    SSE,
    Files,
    document,
    npy,
    parts,
    post,
    problem,
    read,
    request_object,
    same_bits,
)

URL = f"/v1/ops/{SMALL.op}"


def locs(found: dict[str, Any]) -> list[list[Any]]:
    """Return the places of a problem's errors."""
    return [entry["loc"] for entry in found["errors"]]


@pytest.fixture(autouse=True)
def the_next_call_works(http: httpx.Client) -> Any:
    """After each of these tests a valid call on the same connections returns the right bits."""
    yield
    inputs = SMALL.inputs()
    assert same_bits(read(post(http, SMALL, inputs, NPY)), SMALL.expected(inputs))


def test_an_unknown_operation_is_404_with_a_hint(http: httpx.Client) -> None:
    """A misspelt name is not found, whatever else is wrong, and the error suggests the nearest name."""
    for path in ("ConvTransposeBackwardWeight", "ConvTransposeBackwardWeight/validate"):
        found = problem(http.post(f"/v1/ops/{path}", content=b"x"), 404, "unknown_operation")
        assert found["hint"] == "ConvTransposeBackwardWeights"
    problem(http.get("/v1/ops/no"), 404, "unknown_operation")


def test_a_tensor_or_a_shape_without_data_is_named(http: httpx.Client) -> None:
    """An input that is only described is rejected by its name; the same request can be validated."""
    call = document(SMALL, SMALL.inputs())
    for name, described in (("src", {"dtype": "f32"}), ("weights_shape", {"dtype": "s32"})):
        shape = list(SMALL.inputs()["src"].shape) if name == "src" else [len(SMALL.weights_shape)]
        inputs = call["inputs"] | {name: described | {"shape": shape}}
        found = problem(http.post(URL, json=call | {"inputs": inputs}), 422, "invalid_params")
        assert found["errors"][0]["msg"] == f"{name} has no data: send its elements as base64 or as numbers"
    inputs = call["inputs"] | {"src": {"dtype": "f32", "shape": list(SMALL.inputs()["src"].shape)}}
    assert http.post(f"{URL}/validate", json=call | {"inputs": inputs}).status_code == 200


@pytest.mark.parametrize("path", ["/v1", "/v1/ops/a/b/c", "/nothing", "/v1/ops/%2e%2e/x"])
def test_other_pages_are_404(http: httpx.Client, path: str) -> None:
    """FastAPI's own 404 is a problem object too."""
    problem(http.get(path), 404, "not_found")


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [("PUT", URL, "GET, HEAD, POST"), ("DELETE", "/v1/ops", "GET, HEAD"), ("GET", f"{URL}/validate", "POST")],
)
def test_other_methods_are_405(http: httpx.Client, method: str, path: str, allow: str) -> None:
    """A wrong method gets an error with the allowed ones."""
    response = http.request(method, path)
    problem(response, 405, "method_not_allowed")
    assert response.headers["allow"] == allow


@pytest.mark.parametrize(
    "path", ["/v1/ops", URL, "/metrics", "/openapi.json", "/v2", "/v2/health/ready", "/", "/v1/ops/no"]
)
def test_head_is_get_without_a_body(http: httpx.Client, path: str) -> None:
    """Every page that has GET has HEAD, with the same status and headers."""
    get, head = http.get(path), http.head(path)
    assert (head.status_code, head.content) == (get.status_code, b"")
    assert head.headers["content-type"] == get.headers["content-type"]
    assert http.head(f"{URL}/validate").status_code == 405


@pytest.mark.parametrize("accept", ["text/html", "image/*", "application/json;q=0, text/html", "a/b"])
def test_no_acceptable_form_is_406(http: httpx.Client, accept: str) -> None:
    """An Accept header that no reply form satisfies is rejected before the body is read."""
    found = problem(
        http.post(URL, content=b"?", headers={"accept": accept, "content-type": JSON}), 406, "not_acceptable"
    )
    assert found["supported"] == [JSON, NPY, SSE, FRAMES, "multipart/form-data"]


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ("*/*", JSON),
        ("application/*;q=0.5, application/x-npy", NPY),
        ("application/json;q=0.2, text/event-stream;q=0.7", SSE),
        ("text/*", SSE),
        ("application/json;q=0, */*;q=0.1", NPY),
    ],
)
def test_the_accept_header_chooses(http: httpx.Client, accept: str, expected: str) -> None:
    """Quality values and wildcards select the form of the reply."""
    assert post(http, SMALL, SMALL.inputs(), accept).headers["content-type"] == expected


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "application/jsonx", ""])
def test_other_content_types_are_415(http: httpx.Client, kind: str) -> None:
    """A body of another media type, or of none, is rejected with the supported types."""
    response = http.post(URL, content=b"{}", headers={"content-type": kind} if kind else {})
    assert problem(response, 415, "unsupported_media_type")["supported"] == [JSON, "multipart/form-data"]
    assert response.headers["accept-post"] == "application/json, multipart/form-data"


def test_a_content_encoding_is_415(http: httpx.Client) -> None:
    """A compressed body is rejected."""
    headers = {"content-type": JSON, "content-encoding": "gzip"}
    problem(http.post(URL, content=b"{}", headers=headers), 415, "unsupported_media_type")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nul",
        b'{"attributes": NaN}',
        b"[" * 500,
        b"\xff\xfe",
        b'{"x":"\\ud800"}',
        b"\x00" * 99,
    ],
)
def test_a_body_that_is_not_json_is_400(http: httpx.Client, body: bytes) -> None:
    """Broken JSON is a parse error, for a call as for its validation."""
    for path in (URL, f"{URL}/validate"):
        problem(http.post(path, content=body, headers={"content-type": JSON}), 400, "parse_error")


@pytest.mark.parametrize("body", [[], "text", 5, True, [{}]])
def test_a_body_that_is_no_object_is_422(http: httpx.Client, body: Any) -> None:
    """A request must be an object."""
    problem(http.post(URL, json=body), 422, "invalid_params")


def test_every_broken_rule_is_listed_with_its_place(http: httpx.Client) -> None:
    """Attributes, inputs and options are all checked, and each error has its place."""
    body = document(SMALL, SMALL.inputs())
    body["attributes"] |= {"strides": [0, 2], "auto_pad": "sideways"}
    body["attributes"].pop("dilations")
    found = problem(http.post(URL, json=body), 422, "invalid_params")
    assert ["attributes", "strides", 0] in locs(found)
    assert ["attributes", "auto_pad"] in locs(found)
    assert ["attributes", "dilations"] in locs(found)


@pytest.mark.parametrize(
    "options",
    [
        {"speed": 1},
        {"encoding": "hex"},
        {"deadline_ms": 0},
        {"deadline_ms": 1.5},
        {"deadline_ms": True},
        {"reference": "yes"},
        [],
    ],
)
def test_options_are_checked(http: httpx.Client, options: Any) -> None:
    """An unknown option or a wrong value is an error that names it."""
    body = document(SMALL, SMALL.inputs()) | {"options": options}
    found = problem(http.post(URL, json=body), 422, "invalid_params")
    assert locs(found) == [["options", *options]]


def test_unknown_members_are_refused(http: httpx.Client) -> None:
    """A member that a request does not have is an error, not ignored."""
    body = document(SMALL, SMALL.inputs()) | {"option": {}}
    assert locs(problem(http.post(URL, json=body), 422, "invalid_params")) == [["option"]]


def _replaced(files: Files, name: str, data: bytes) -> Files:
    return [(field, (label, data if field == name else body, kind)) for field, (label, body, kind) in files]


def _wrong_parts() -> dict[str, tuple[Files, int, str]]:
    inputs = SMALL.inputs()
    files = parts(SMALL, inputs)
    src = inputs["src"]
    request = request_object(SMALL)
    stray = json.dumps(request | {"inputs": {"src": {"dtype": "f16"}}}).encode()
    shaped = json.dumps(request | {"inputs": {"src": {"dtype": "f32", "shape": [1, 2]}}}).encode()
    return {
        "missing": (files[:-1], 422, "invalid_params"),
        "twice": ([*files, files[1]], 422, "invalid_params"),
        "unknown": ([*files, ("weights2", ("w.npy", npy(src), NPY))], 422, "invalid_params"),
        "no request": (files[1:], 400, "invalid_request"),
        "request last": ([*files[1:], files[0]], 400, "invalid_request"),
        "wrong shape": (_replaced(files, "src", npy(src[:, :, :-1])), 422, "invalid_params"),
        "wrong rank": (_replaced(files, "src", npy(src[0])), 422, "invalid_params"),
        "other dtype": (_replaced(files, "src", npy(src.astype(np.float16))), 422, "invalid_params"),
        "float64": (_replaced(files, "src", npy(src.astype(np.float64))), 422, "invalid_params"),
        "complex": (_replaced(files, "src", npy(src.astype(np.complex64))), 422, "unsupported"),
        "declared dtype": (_replaced(files, "request", stray), 422, "invalid_params"),
        "declared shape": (_replaced(files, "request", shaped), 422, "invalid_params"),
        "cut short": (_replaced(files, "src", npy(src)[:-1]), 422, "invalid_params"),
        "trailing byte": (_replaced(files, "src", npy(src) + b"x"), 422, "invalid_params"),
        "no npy": (_replaced(files, "src", b"hello"), 422, "invalid_params"),
        "broken request": (_replaced(files, "request", b"{"), 400, "parse_error"),
    }


@pytest.mark.parametrize("name", list(_wrong_parts()))
@pytest.mark.parametrize("accept", [JSON, NPY, SSE, FRAMES])
def test_wrong_parts(http: httpx.Client, name: str, accept: str) -> None:
    """A part that is missing, duplicated, unknown or wrong is rejected in every reply form."""
    files, status, code = _wrong_parts()[name]
    problem(http.post(URL, files=files, headers={"accept": accept}), status, code)


def test_pickles_are_never_loaded(http: httpx.Client) -> None:
    """An object array is rejected on its header."""
    data = npy(np.array([{"a": 1}], dtype=object))
    response = http.post(URL, files=_replaced(parts(SMALL, SMALL.inputs()), "src", data))
    assert response.status_code == 422
    assert response.json()["code"] in ("unsupported", "invalid_params")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"--x--",
        b"--x\r\n",
        b"--x\r\n\r\n",
        b"junk",
        b"--x\r\nContent-Disposition: form-data\r\n\r\na\r\n--x--",
    ],
)
def test_broken_multipart_is_400(http: httpx.Client, body: bytes) -> None:
    """A body that is not valid multipart is malformed."""
    headers = {"content-type": "multipart/form-data; boundary=x"}
    response = http.post(URL, content=body, headers=headers)
    assert response.status_code == 400
    assert response.json()["code"] in ("parse_error", "invalid_request")


def test_multipart_without_a_boundary_is_415(http: httpx.Client) -> None:
    """Without a boundary the body can't be read."""
    response = http.post(URL, content=b"x", headers={"content-type": "multipart/form-data"})
    problem(response, 415, "unsupported_media_type")


def test_input_data_is_never_echoed(http: httpx.Client) -> None:
    """Errors never contain values sent by the caller."""
    secret = "5eCr3tPayload"
    body = document(SMALL, SMALL.inputs())
    body["attributes"] |= {"auto_pad": secret, "strides": [secret, secret]}
    body["inputs"]["src"]["data"] = secret
    body["options"] = {"encoding": secret}
    for path in (URL, f"{URL}/validate"):
        assert secret not in http.post(path, json=body).text
    files = _replaced(parts(SMALL, SMALL.inputs()), "src", secret.encode())
    assert secret not in http.post(URL, files=files).text


def test_bad_base64_is_422(http: httpx.Client) -> None:
    """Data that is not base64, or has the wrong length, is rejected with its place."""
    for data in ("*" * 8, "AAA", "A" * 4000):
        body = document(SMALL, SMALL.inputs())
        body["inputs"]["src"]["data"] = data
        found = problem(http.post(URL, json=body), 422, "invalid_params")
        assert locs(found)[0][:2] == ["inputs", "src"]


def test_validate_reports_what_the_call_would(http: httpx.Client) -> None:
    """`validate` rejects a wrong call in the same way."""
    inputs = {name: {"dtype": "f32", "shape": [*shape, 1]} for name, shape in SMALL.input_shapes.items()}
    body = {"attributes": SMALL.attributes(), "inputs": inputs}
    problem(http.post(f"{URL}/validate", json=body), 422, "invalid_params")


def test_an_unsupported_dtype_is_422(http: httpx.Client) -> None:
    """s32 is a dtype of tensors that the operation does not support; the name of a dtype elsewhere is translated."""
    inputs = {name: {"dtype": "s32", "shape": list(shape)} for name, shape in SMALL.input_shapes.items()}
    body = {"attributes": SMALL.attributes(), "inputs": inputs}
    problem(http.post(f"{URL}/validate", json=body), 422, "unsupported")
    inputs["src"]["dtype"] = "float32"
    response = http.post(f"{URL}/validate", json=body)
    assert problem(response, 422, "unsupported")["detail"].endswith("; use f32")


@pytest.mark.parametrize("api", ["json", "parts"])
def test_an_unknown_dtype_is_422_with_its_place(http: httpx.Client, api: str) -> None:
    """Complex numbers are unsupported like s32, in every form, and the error names the input."""
    case = replace(SMALL, dtype="f32")
    inputs = case.inputs() | {"diff_dst": case.inputs()["diff_dst"].astype("c8")}
    if api == "json":
        response = http.post(URL, json=document(case, inputs, as_npy=True))
    else:
        response = http.post(URL, files=parts(case, inputs))
    assert "diff_dst" in locs(problem(response, 422, "unsupported"))[0]


def test_errors_use_the_callers_dialect(http: httpx.Client) -> None:
    """Errors for a call in the old spelling use the old names."""
    body: dict[str, Any] = {"attributes": {}, "inputs": {}}
    found = problem(http.post("/v1/ops/ConvTransposeBackpropFilters/validate", json=body), 422, "invalid_params")
    assert ["inputs", "input_forward"] in locs(found)


def test_many_errors_stay_small(http: httpx.Client) -> None:
    """A request with thousands of wrong names gets a short answer."""
    body = {"attributes": {f"a{index}": index for index in range(5000)}, "inputs": {}}
    assert len(http.post(URL, json=body).content) < 20_000


def test_bf16_needs_its_declaration(http: httpx.Client) -> None:
    """Two void bytes are bf16 only if the request says so."""
    case = replace(SMALL, dtype="bf16")
    files = parts(case, case.inputs())
    bare = json.dumps(request_object(case) | {"inputs": {}}).encode()
    problem(http.post(URL, files=_replaced(files, "request", bare)), 422, "invalid_params")
