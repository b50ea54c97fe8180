"""The `/v1` API's answers to wrong calls that `tests/hostile/table.py` lacks: pages, forms, all rules at once."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from app.replies.formats import FORMATS
from tests.app.samples import FRAMES, JSON, NPY, SMALL, SSE, document, parts, problem

URL = f"/v1/ops/{SMALL.op}"


def test_an_unknown_operation_is_404_with_a_hint(http: httpx.Client) -> None:
    """A misspelt name is not found, whatever else is wrong, and the error suggests the nearest name."""
    for path in ("ConvTransposeBackwardWeight", "ConvTransposeBackwardWeight/validate"):
        found = problem(http.post(f"/v1/ops/{path}", content=b"x"), 404, "unknown_operation")
        assert found["hint"] == "ConvTransposeBackwardWeights"
    problem(http.get("/v1/ops/no"), 404, "unknown_operation")


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


def test_no_acceptable_form_is_406(http: httpx.Client) -> None:
    """An Accept header that no reply form satisfies is rejected before the body is read."""
    headers = {"accept": "application/json;q=0, text/html", "content-type": JSON}
    found = problem(http.post(URL, content=b"?", headers=headers), 406, "not_acceptable")
    assert found["supported"] == [form.media_type for form in FORMATS]


@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "application/jsonx", ""])
def test_other_content_types_are_415(http: httpx.Client, kind: str) -> None:
    """A body of another media type, or of none, is rejected with the supported types."""
    response = http.post(URL, content=b"{}", headers={"content-type": kind} if kind else {})
    assert problem(response, 415, "unsupported_media_type")["supported"] == [JSON, "multipart/form-data"]
    assert response.headers["accept-post"] == "application/json, multipart/form-data"


def test_every_broken_rule_is_listed_with_its_place(http: httpx.Client) -> None:
    """Attributes and inputs are all checked, each error has its place, and an old name gets the old names."""
    body: dict[str, Any] = document(SMALL, SMALL.inputs())
    body["attributes"] |= {"strides": [0, 2], "auto_pad": "sideways"}
    body["attributes"].pop("dilations")
    found = problem(http.post(URL, json=body), 422, "invalid_params")
    places = {tuple(entry["loc"][:2]) for entry in found["errors"]}
    assert places == {("attributes", name) for name in ("strides", "auto_pad", "dilations")}
    empty: dict[str, Any] = {"attributes": {}, "inputs": {}}
    found = problem(http.post("/v1/ops/ConvTransposeBackpropFilters/validate", json=empty), 422, "invalid_params")
    assert ["inputs", "input_forward"] in [entry["loc"] for entry in found["errors"]]


def test_the_dtype_of_another_framework_is_translated(http: httpx.Client) -> None:
    """An unknown dtype's error names the one that is meant."""
    body = document(SMALL, SMALL.inputs())
    body["inputs"]["src"]["dtype"] = "float32"
    assert problem(http.post(URL, json=body), 422, "unsupported")["detail"].endswith("; use f32")


@pytest.mark.parametrize("accept", [JSON, NPY, SSE, FRAMES])
def test_wrong_parts_in_every_form_of_a_reply(http: httpx.Client, accept: str) -> None:
    """An error is a problem object, whatever form of a reply was asked for."""
    response = http.post(URL, files=parts(SMALL, SMALL.inputs())[:-1], headers={"accept": accept})
    problem(response, 422, "invalid_params")
