"""The OpenAPI document is complete and matches the service's answers."""

from __future__ import annotations

from typing import Any

import httpx
import jsonschema
import pytest

from app.main import create_app
from kernels.target import target
from schemas.tables import operation_names
from tests.app.samples import FRAMES, JSON, NPY, SMALL, SSE, document, post


@pytest.fixture(scope="module")
def openapi() -> dict[str, Any]:
    """The document."""
    return create_app().openapi()


def references(node: Any) -> set[str]:
    """Return every $ref in a node."""
    if isinstance(node, dict):
        own = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
        return own.union(*map(references, node.values()))
    return set().union(*map(references, node)) if isinstance(node, list) else set()


def check(openapi: dict[str, Any], schema: dict[str, Any], value: Any) -> None:
    """Validate a value against a schema of the document."""
    jsonschema.validate(value, schema | {"components": openapi["components"]})


def test_every_reference_resolves(openapi: dict[str, Any]) -> None:
    """Every $ref has its target."""
    for reference in references(openapi):
        node: Any = openapi
        for part in reference.removeprefix("#/").split("/"):
            node = node[part]


def test_every_page_is_described(openapi: dict[str, Any]) -> None:
    """The document has the pages of the contract, and lists the answers of each."""
    pages = {"/rpc", "/v1/ops", "/v1/ops/{op}", "/v1/ops/{op}/validate", "/healthz", "/readyz", "/openrpc.json"}
    assert pages <= set(openapi["paths"])
    for page in openapi["paths"].values():
        for verb in page.values():
            assert verb["responses"]
            assert verb["summary"] or verb["description"]


def test_a_call_has_its_forms(openapi: dict[str, Any]) -> None:
    """The page of a call lists both request forms, all five reply forms and every name of an operation."""
    verb = openapi["paths"]["/v1/ops/{op}"]["post"]
    assert set(verb["requestBody"]["content"]) == {JSON, "multipart/form-data"}
    assert set(verb["responses"]["200"]["content"]) == {JSON, NPY, SSE, FRAMES, "multipart/form-data"}
    (name,) = verb["parameters"]
    assert set(name["schema"]["enum"]) == set(operation_names())
    for status, answer in verb["responses"].items():
        assert status == "200" or set(answer["content"]) == {"application/problem+json"}


def test_requests_and_replies_match_the_schemas(openapi: dict[str, Any], http: httpx.Client) -> None:
    """A valid request, its reply, its validation and an error all match the document."""
    page = openapi["paths"]["/v1/ops/{op}"]["post"]
    body = document(SMALL, SMALL.inputs(), deadline_ms=60_000)
    check(openapi, page["requestBody"]["content"][JSON]["schema"], body)
    reply = http.post(f"/v1/ops/{SMALL.op}", json=body)
    check(openapi, page["responses"]["200"]["content"][JSON]["schema"], reply.json())
    refusal = post(http, SMALL, {}).json()
    check(openapi, page["responses"]["422"]["content"]["application/problem+json"]["schema"], refusal)
    checked = http.post(f"/v1/ops/{SMALL.op}/validate", json=body).json()
    verb = openapi["paths"]["/v1/ops/{op}/validate"]["post"]
    check(openapi, verb["responses"]["200"]["content"][JSON]["schema"], checked)


def test_the_pages_are_served(http: httpx.Client) -> None:
    """The documents and the health pages are served."""
    assert http.get("/openapi.json").json()["openapi"].startswith("3.1")
    assert http.get("/openrpc.json").json()["openrpc"]
    assert http.get("/docs").status_code == 200
    assert "<title>convgrad</title>" in http.get("/").text
    assert http.get("/healthz").json()["status"] == "ok"
    ready = http.get("/readyz").json()
    workers = ready.pop("workers")
    assert ready == {"status": "ready", "progress": 1.0, "cause": None, "target": str(target()), "unfit": []}
    assert 1 <= workers["ready"] <= workers["wanted"]
    assert http.head("/readyz").status_code == 200
