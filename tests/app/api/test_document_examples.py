"""Every example of the OpenAPI and OpenRPC documents is sent to a service as it stands, and has the result stated."""

from __future__ import annotations

import fcntl
import json
import re
from collections.abc import Iterator
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import httpx
import pytest

from schemas.tables import OPERATIONS, operation_names
from tests.app.samples import JSON, SMALL, post, wait_for
from tests.live import running_service

FORM, BYTES = "multipart/form-data", "application/octet-stream"
# What differs from one processor or call to the next, and in sealed checks from one check to the next.
VARIES = {"stats", "plan", "methods"}
VARIES_IN_JOBS = {"job", "state", "place", "created", "finished", "expires"}
VARIES_IN_CHECKS = {
    *(
        "check",
        "key_id",
        "public_key",
        "signature",
        "begun",
        "finished",
        "takes",
        "cases",
        "attributes",
        "inputs",
        "outputs",
    )
}
# Only what they find in their path matters.
WITHOUT_BODY = {
    *("v2_unload", "v2_unregister", "v2_unregister_all", "drop_check", "drop_tensor", "cancel_job"),
}
OBJECT = Path("/dev/shm/convgrad_example")


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A service that has every page, and the object that the example of a region names."""
    spool = str(tmp_path_factory.mktemp("spool"))
    flags = ("--workers", "1", "--oip-shared-memory", "true", "--spool", spool)
    with (Path(gettempdir()) / "convgrad-examples.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other test processes have the object under the same name
        OBJECT.write_bytes(bytes(36))
        with running_service(*flags) as service, httpx.Client(base_url=service.url, timeout=60) as client:
            yield client
        OBJECT.unlink()


def same(stated: Any, got: Any, but: set[str]) -> bool:
    """Return whether a reply has what the document states, whatever the values of the members in `but`."""
    if isinstance(stated, dict) and isinstance(got, dict):
        return all(name in got and (name in but or same(value, got[name], but)) for name, value in stated.items())
    if isinstance(stated, list) and isinstance(got, list):
        return len(stated) == len(got) and all(same(a, b, but) for a, b in zip(stated, got, strict=True))
    return bool(stated == got)


def filled(path: str, parameters: list[dict[str, Any]], known: dict[str, str]) -> tuple[str, dict[str, str]]:
    """Return a path and headers with the examples of their parameters, or what a link has said."""
    headers = {}
    for parameter in parameters:
        name = parameter["name"]
        value = known.get(name, parameter.get("example"))
        assert value is not None, f"{path}: the parameter {name} has no example, and no link has its value"
        if parameter["in"] == "header":
            headers[name] = value
        else:
            path = path.replace(f"{{{name}}}", value)
    assert "{" not in path
    return path, headers


def sent(http: httpx.Client, verb: str, path: str, headers: dict[str, str], kind: str, value: Any) -> httpx.Response:
    """Send a body as its content type."""
    if kind == FORM:
        parts = {name: (None, json.dumps(part), JSON) for name, part in value.items()}
        return http.request(verb, path, headers=headers, files=parts)
    return http.request(verb, path, headers={**headers, "content-type": kind}, content=json.dumps(value))


def examples_of(described: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield content type and value of each example of a page's body, with the reply that the page states."""
    name, contents = described["operationId"], described["requestBody"]["content"]
    replies = described["responses"]["200"]["content"][JSON].get("examples", {})
    for kind, content in contents.items():
        if kind != BYTES:  # which a document in JSON can't show
            assert content.get("examples"), f"{name} has no example of {kind}"
            for label, shown in content["examples"].items():
                yield kind, shown["value"], replies.get(label, {}).get("value")


def wait_until_done(http: httpx.Client, job: str) -> str:
    """Wait for a job, and return its id."""
    wait_for(lambda: http.get(f"/v1/jobs/{job}").json()["state"] == "done")
    return job


def test_every_page_has_an_example_that_is_right(http: httpx.Client) -> None:
    """Each page answers its examples, in every form, with 200 and the reply that is stated, in the order listed."""
    reply = post(http, SMALL, SMALL.inputs(), headers={"prefer": "respond-async"})
    known = {"job": wait_until_done(http, reply.json()["job"]), "Prefer": "wait=1"}
    pages = [(path, *each) for path, page in http.get("/openapi.json").json()["paths"].items() for each in page.items()]
    for path, verb, described in pages:
        name, responses = described["operationId"], described["responses"]
        address, headers = filled(path, described["parameters"], known)
        if "requestBody" not in described:
            assert verb == "get" or name in WITHOUT_BODY, f"{name} has no body"
            reply = http.request(verb, address, headers=headers)
            assert reply.status_code == (200 if "200" in responses else 400), (name, reply.text)
            assert reply.headers["x-request-id"] == headers["X-Request-ID"]
            continue
        for kind, value, stated in examples_of(described):
            reply = sent(http, verb, address, headers, kind, value)
            assert reply.status_code == 200, (name, kind, reply.text)
            but = VARIES | VARIES_IN_CHECKS if "/checks" in path else VARIES
            assert stated is None or same(stated, reply.json(), but), (name, reply.text)
            assert not path.endswith("/verify") or reply.json()["equal"]
        for link in responses["200"].get("links", {}).values():
            known |= {key: reply.json()[at.rpartition("/")[2]] for key, at in link["parameters"].items()}
    assert known


def test_every_method_has_an_example_that_is_right(http: httpx.Client) -> None:
    """Each method answers its example with the result that is stated, in the order listed."""
    known: dict[str, str] = {}
    for method in http.get("/openrpc.json").json()["methods"]:
        name = method["name"]
        assert method["examples"], f"{name} has no example"
        for shown in method["examples"]:
            values = {param["name"]: param["value"] for param in shown["params"]}
            values |= {name: value for name, value in known.items() if name in values}
            reply = http.post("/rpc", json={"jsonrpc": "2.0", "id": 1, "method": name, "params": values}).json()
            assert "result" in reply, (name, reply)
            but = VARIES | {"check": VARIES_IN_CHECKS, "jobs": VARIES_IN_JOBS}.get(name.partition(".")[0], set())
            assert same(shown["result"]["value"], reply["result"], but), (name, reply)
            if name == "check.begin":
                known["check"] = reply["result"]["check"]
            elif name == "jobs.submit":
                known["job"] = wait_until_done(http, reply["result"]["job"])


def schemas_of(node: Any) -> Iterator[dict[str, Any]]:
    """Yield every schema with a type, and every one of a part of it."""
    if isinstance(node, dict):
        if isinstance(node.get("type"), str):
            yield node
        for value in node.values():
            yield from schemas_of(value)
    elif isinstance(node, list):
        for value in node:
            yield from schemas_of(value)


@pytest.mark.heavy
@pytest.mark.parametrize("document", ["openapi", "openrpc"])
def test_no_value_is_made_up(http: httpx.Client, document: str) -> None:
    """Tools take the largest integer, and text for base64, unless the schema has an example: these all have one."""
    text = http.get(f"/{document}.json").text
    assert "c3RyaW5n" not in text
    for schema in schemas_of(json.loads(text)):
        large = schema.get("maximum", 0) > 1 << 31 or schema.get("exclusiveMaximum", 0) > 1 << 31
        if large or schema.get("contentEncoding") == "base64":
            assert schema["examples"], schema
            assert schema["examples"][0] != schema.get("maximum")


@pytest.mark.parametrize("document", ["openapi", "openrpc"])
def test_aliases_are_named_where_the_operation_is(http: httpx.Client, document: str) -> None:
    """An alias is no path or method of its own; the operation's own names it."""
    found = http.get(f"/{document}.json").json()
    if document == "openapi":
        pages = {path.removeprefix("/v1/ops/"): page["post"] for path, page in found["paths"].items() if "post" in page}
        enums = [
            each["schema"]["enum"] for page in pages.values() for each in page["parameters"] if each["name"] == "op"
        ]
    else:
        pages = {method["name"]: method for method in found["methods"]}
        enums = [each["schema"]["enum"] for page in pages.values() for each in page["params"] if each["name"] == "op"]
    names = [row.name for row in OPERATIONS]
    assert enums
    assert all(enum == names for enum in enums)
    aliases = set(operation_names()) - set(names)
    assert not aliases & pages.keys()
    for row in OPERATIONS:
        assert pages[row.name]["x-aliases"] == row.aliases
        assert all(f"`{alias}`" in pages[row.name]["description"] for alias in row.aliases)
    assert not re.search("Backprop", json.dumps([*pages]))
