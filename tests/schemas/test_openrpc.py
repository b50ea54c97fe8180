"""The OpenRPC document."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from schemas.describe import example
from schemas.openrpc import RPC_ERRORS, openrpc_document
from schemas.tables import OPERATIONS, find_operation, operation_names

DOCUMENT = openrpc_document(version="1.2.3")


def closed(needed: list[str], /, **properties: Any) -> dict[str, Any]:
    """Return the schema of an object with these members and no others except extensions."""
    return {
        "type": "object", "required": needed, "properties": properties, "patternProperties": {"^x-": {}},
        "additionalProperties": False,
    }  # fmt: skip


TEXT, FLAG = {"type": "string"}, {"type": "boolean"}
REFERENCE = {"type": "object", "required": ["$ref"], "properties": {"$ref": TEXT}, "additionalProperties": False}
CONTENT = closed(["name", "schema"], name=TEXT, description=TEXT, summary=TEXT, schema={"type": "object"},
                 required=FLAG, deprecated=FLAG)  # fmt: skip
ERROR = closed(["code", "message"], code={"type": "integer"}, message=TEXT, data={})
EXAMPLE = closed(["name", "params"], name=TEXT, description=TEXT, params={"type": "array"}, result={})
METHOD = closed(
    ["name", "params"], name=TEXT, description=TEXT, summary=TEXT,
    tags={"type": "array", "items": closed(["name"], name=TEXT)},
    paramStructure={"enum": ["by-position", "by-name", "either"]},
    params={"type": "array", "items": {"oneOf": [CONTENT, REFERENCE]}}, result={"oneOf": [CONTENT, REFERENCE]},
    errors={"type": "array", "items": {"oneOf": [ERROR, REFERENCE]}}, examples={"type": "array", "items": EXAMPLE},
    deprecated=FLAG,
)  # fmt: skip
META = closed(
    ["openrpc", "info", "methods"],
    openrpc={"const": "1.3.2"},
    info=closed(["title", "version"], title=TEXT, version=TEXT, description=TEXT,
                license=closed([], name=TEXT, url=TEXT)),
    servers={"type": "array", "items": closed(["url"], url=TEXT, name=TEXT, description=TEXT, summary=TEXT)},
    methods={"type": "array", "items": METHOD},
    components={"type": "object", "properties": {
        "schemas": {"type": "object", "additionalProperties": {"type": "object"}},
        "errors": {"type": "object", "additionalProperties": ERROR},
    }},
)  # fmt: skip


def references(value: Any) -> Iterator[str]:
    """Yield every $ref in a document."""
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for inner in value.values():
            yield from references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from references(inner)


def standalone(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema of the document together with the components that it refers to."""
    return schema | {"components": DOCUMENT["components"]}


def test_the_document_has_the_specifications_form() -> None:
    """The document has the members that OpenRPC 1.3 requires, and no others."""
    jsonschema.validate(DOCUMENT, META)
    assert json.loads(json.dumps(DOCUMENT)) == DOCUMENT
    assert DOCUMENT["info"]["version"] == "1.2.3"


def test_params_have_the_order_of_positions() -> None:
    """The parameters of an operation are listed in their positional order."""
    for method in DOCUMENT["methods"][: len(OPERATIONS)]:
        assert [param["name"] for param in method["params"]] == ["attributes", "inputs", "options"]
        assert [param["required"] for param in method["params"]] == [True, True, False]


def test_references_resolve() -> None:
    """Every reference has its component, and the component schemas are valid JSON Schema."""
    for reference in set(references(DOCUMENT)):
        _, where, kind, name = reference.split("/")
        assert name in DOCUMENT[where][kind]
    for schema in DOCUMENT["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize("name", operation_names())
def test_examples_fit_the_schemas(name: str) -> None:
    """The example of every operation fits the schemas of `ops.validate`; a wrong one does not."""
    method = next(entry for entry in DOCUMENT["methods"] if entry["name"] == "ops.validate")
    attributes, inputs = (standalone(param["schema"]) for param in method["params"][1:3])
    call = example(find_operation(name))
    jsonschema.validate(call["attributes"], attributes)
    jsonschema.validate(call["inputs"], inputs)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(call["attributes"] | {"strides": [0]}, attributes)


def test_error_codes_are_all_different() -> None:
    """The document lists each code and each name once."""
    assert len({code for code, _, _ in RPC_ERRORS}) == len({name for _, name, _ in RPC_ERRORS}) == len(RPC_ERRORS)
    assert {error["code"] for error in DOCUMENT["components"]["errors"].values()} == {
        -32700, -32600, -32601, -32602, -32603, *range(-32008, -31999),
    }  # fmt: skip
