"""The OpenAPI document is complete and matches the service's answers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute

from app.api import web
from app.api.oip import infer
from app.main import ROUTERS
from app.replies.formats import FORMATS
from convgrad._errors import PROBLEM_JSON
from kernels.target import target
from schemas.openapi import openapi_document
from schemas.tables import OPERATIONS, find_operation, verified
from tests.app.samples import JSON

SUFFIXES = ("", "/validate", "/verify", "/tolerance")


@pytest.fixture(scope="module")
def openapi() -> dict[str, Any]:
    """The document."""
    return openapi_document("1")


def references(node: Any) -> set[str]:
    """Return every $ref in a node."""
    if isinstance(node, dict):
        own = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
        return own.union(*map(references, node.values()))
    return set().union(*map(references, node)) if isinstance(node, list) else set()


def schemas(node: Any) -> Iterator[dict[str, Any]]:
    """Yield every schema with a type in a node."""
    if isinstance(node, dict):
        if isinstance(node.get("type"), str | list):
            yield node
        for value in node.values():
            yield from schemas(value)
    elif isinstance(node, list):
        for value in node:
            yield from schemas(value)


def test_every_reference_resolves(openapi: dict[str, Any]) -> None:
    """Every $ref has its target."""
    for reference in references(openapi):
        node: Any = openapi
        for part in reference.removeprefix("#/").split("/"):
            node = node[part]


def test_every_page_is_described(openapi: dict[str, Any]) -> None:
    """The document has every route, but files and what only some clients of Triton need, and lists its answers."""
    routes = [route for router in ROUTERS for route in router.routes if isinstance(route, APIRoute)]
    served = {(method.lower(), route.path) for route in routes for method in route.methods or ()}
    files = {(method, path) for path in web.PATHS for method in ("get", "head")}
    others = {("get", "/openapi.json"), ("get", "/v2/")}
    heads = {("head", f"/{path}") for path in ("healthz", "readyz", "v2/health/live", "v2/health/ready")}
    described = {(method, path) for path, page in openapi["paths"].items() for method in page}
    own = {("post", f"/v1/ops/{row.name}{suffix}") for row in OPERATIONS for suffix in SUFFIXES}
    assert described - own == served - files - others - heads
    assert own <= described
    for page in openapi["paths"].values():
        for verb in page.values():
            assert verb["responses"]
            assert verb["summary"] or verb["description"]


def test_a_call_has_its_forms(openapi: dict[str, Any]) -> None:
    """The page of a call lists both request forms, all formats of replies and every operation."""
    verb = openapi["paths"]["/v1/ops/{op}"]["post"]
    assert set(verb["requestBody"]["content"]) == {JSON, "multipart/form-data"}
    assert set(verb["responses"]["200"]["content"]) == {each.media_type for each in FORMATS}
    name, *headers = verb["parameters"]
    assert [each["name"] for each in headers] == ["X-Request-ID", "Prefer", "Idempotency-Key"]
    assert name["schema"]["enum"] == [row.name for row in OPERATIONS]
    for status, answer in verb["responses"].items():
        assert status in ("200", "202") or set(answer["content"]) == {"application/problem+json"}


def test_an_inference_has_its_forms(openapi: dict[str, Any]) -> None:
    """The page of an inference lists every type that a client may accept, but that of errors."""
    verb = openapi["paths"]["/v2/models/{model}/infer"]["post"]
    assert {*verb["responses"]["200"]["content"], PROBLEM_JSON} == set(infer.REPLY_TYPES)


@pytest.mark.parametrize("name", [row.name for row in OPERATIONS])
def test_every_operation_has_its_paths(openapi: dict[str, Any], name: str) -> None:
    """Each operation has paths to compute, validate, verify and find a tolerance, with a body of its own inputs."""
    row = find_operation(name).operation
    for suffix in SUFFIXES:
        verb = openapi["paths"][f"/v1/ops/{name}{suffix}"]["post"]
        general = openapi["paths"][f"/v1/ops/{{op}}{suffix}"]["post"]
        assert set(verb["responses"]) == set(general["responses"]) - {"202", "507"}  # jobs are those of the general one
        (body,) = references(verb["requestBody"])
        model = openapi["components"]["schemas"][body.rpartition("/")[2]]
        attributes = openapi["components"]["schemas"][f"{name}Attributes"]
        assert list(attributes["properties"]) == [entry.name for entry in row.attributes]
        inputs = openapi["components"]["schemas"][f"{body.rpartition('/')[2]}Inputs"]
        rows = verified(find_operation(name)).operation.inputs if suffix == "/verify" else row.inputs
        assert list(inputs["properties"]) == [entry.name for entry in rows]
        assert inputs["required"] == [entry.name for entry in rows if entry.required]
        assert model["required"] == (["attributes", "inputs"] if row.convolves else ["inputs"])
        parts = verb["requestBody"]["content"]["multipart/form-data"]["schema"]["properties"]
        assert parts.keys() >= {"request", *(entry.name for entry in rows)}


def test_what_generators_need(openapi: dict[str, Any]) -> None:
    """JSON comes first, identifiers are names, arrays have items, an enum has one spelling of each value."""
    assert openapi["servers"] == [{"url": "/", "description": "This service."}]
    verbs = [verb for page in openapi["paths"].values() for verb in page.values()]
    names = [verb["operationId"] for verb in verbs]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z][a-z0-9_]*", name) for name in names)
    for verb in verbs:
        bodies = [verb.get("requestBody", {}), *verb["responses"].values()]
        for content in (list(body.get("content", {})) for body in bodies):
            assert content[:1] == [JSON] or JSON not in content
    for schema in schemas(openapi):
        if "array" in schema["type"]:
            assert "items" in schema
        folded = [str(value).casefold() for value in schema.get("enum", [])]
        assert len(set(folded)) == len(folded)


def test_health_pages(http: httpx.Client) -> None:
    """They say how many workers there are, and what the kernels are compiled for."""
    assert http.get("/healthz").json()["status"] == "ok"
    ready = http.get("/readyz").json()
    workers = ready.pop("workers")
    assert ready == {"status": "ready", "progress": 1.0, "cause": None, "target": str(target()), "unfit": []}
    assert 1 <= workers["ready"] <= workers["wanted"]
    assert http.head("/readyz").status_code == 200
