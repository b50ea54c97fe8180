"""`/mcp`: every tool by the official client in both revisions, handles and keys, and closing a stream."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx
import httpx2
import numpy as np
import numpy.typing as npt
import pytest
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

import convgrad
from app.calls.kept import KeptLimits
from tests.app.resident import Resident, resident_service
from tests.app.samples import digest, npy
from tests.mcp_tools import ATTRIBUTES, MODES, OP, SEEDS, call, failed, gradient, long_verification, walk

Array = npt.NDArray[Any]
KEYS = {"one": "cg_first-of-two-keys", "two": "cg_second-of-two-keys"}
REVISION = "2026-07-28"
META = {
    "io.modelcontextprotocol/protocolVersion": REVISION,
    "io.modelcontextprotocol/clientCapabilities": {},
    "io.modelcontextprotocol/clientInfo": {"name": "test", "version": "1"},
}


@pytest.fixture(scope="module")
def resident() -> Iterator[Resident]:
    """A service with two keys."""
    keys = ";".join(f"{name} {digest(key)}" for name, key in KEYS.items())
    with resident_service(workers=1, keys=keys) as resident:
        yield resident


@pytest.fixture(autouse=True)
def nothing_is_kept(resident: Resident) -> Iterator[None]:
    """Forget what a test has kept, and see that its memory is free and nothing runs."""
    yield
    kept, checks = resident.service.kept_tensors, resident.service.sealed_checks

    async def drop() -> None:
        for handle in list(kept._kept):
            kept._free(handle)
        for check in list(checks._checks.values()):
            checks.drop(check)

    resident.run(drop())
    resident.until(lambda: not resident.service.calls and resident.service.segments.stats().used == 0)


@pytest.fixture
def http(resident: Resident) -> Iterator[httpx.Client]:
    """A plain HTTP client with the first key."""
    headers = {"authorization": f"Bearer {KEYS['one']}"}
    with httpx.Client(base_url=resident.url, headers=headers, timeout=60) as client:
        yield client


@asynccontextmanager
async def connected(resident: Resident, mode: str = REVISION, key: str = "one") -> AsyncIterator[Client]:
    """Connect the official client with a key."""
    headers = {"x-api-key": KEYS[key]}
    async with httpx2.AsyncClient(headers=headers, timeout=60) as http:
        transport = streamable_http_client(f"{resident.url}/mcp", http_client=http)
        async with Client(transport, mode=mode) as client:
            yield client


class Uploads:
    """Handles of the first key, as the walk through the tools uses them."""

    def __init__(self, http: httpx.Client) -> None:
        self.http = http

    async def put(self, _: str, array: Array) -> dict[str, Any]:
        """Upload a tensor; return its reference."""
        return {"handle": await asyncio.to_thread(upload, self.http, array)}

    async def get(self, reference: Mapping[str, Any]) -> Array:
        """Download the tensor of a reference."""
        reply = await asyncio.to_thread(self.http.get, f"/v1/tensors/{reference['handle']}")
        found: Array = np.load(io.BytesIO(reply.content))
        return found


def upload(http: httpx.Client, array: Array) -> str:
    """Upload a tensor as a form; return its handle."""
    files = [
        ("request", ("request", b"{}", "application/json")),
        ("tensor", ("tensor", npy(array), "application/x-npy")),
    ]
    reply = http.post("/v1/tensors", files=files)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["handle"])


@pytest.mark.heavy
@pytest.mark.parametrize("mode", MODES)
async def test_every_tool(resident: Resident, http: httpx.Client, mode: str) -> None:
    """Both revisions have the tools, the resources and the prompt; the record is the page that the outcome names."""
    uploads = Uploads(http)
    async with connected(resident, mode) as client:
        assert client.protocol_version == MODES[mode]
        outcome = await walk(client, uploads.put, uploads.get)
    verb, path = outcome["record"].split()
    document = (await asyncio.to_thread(http.request, verb, path)).json()
    assert document["signature"] == outcome["signature"]
    with convgrad.Client(resident.url, api_key=KEYS["one"]) as other:
        assert other.verify_signature(document)["valid"]


async def test_handles_are_those_of_a_key(resident: Resident, http: httpx.Client) -> None:
    """A handle of another key, one that was dropped, and one that never was are not found, by page and by tool."""
    handle = await asyncio.to_thread(upload, http, gradient())
    page = f"/v1/tensors/{handle}"
    asked: dict[str, Any] = {"op": OP, "attributes": ATTRIBUTES, "inputs": SEEDS, "result": {"handle": handle}}
    other = {"authorization": f"Bearer {KEYS['two']}"}
    for verb in ("GET", "DELETE"):
        assert (await asyncio.to_thread(http.request, verb, page, headers=other)).status_code == 404
    found = await asyncio.to_thread(http.get, page, headers={"accept": "application/json"})
    assert found.json()["outputs"]["tensor"]["shape"] == list(gradient().shape)
    async with connected(resident, key="two") as client:
        assert (await failed(client, "verify", **asked))["code"] == "not_found"
    async with connected(resident) as client:
        assert (await call(client, "verify", **asked))["passed"]
        assert (await asyncio.to_thread(http.request, "DELETE", page)).status_code == 200
        assert (await failed(client, "verify", **asked))["code"] == "not_found"
        assert (await failed(client, "verify", **asked | {"result": {"path": "a.npy"}}))["code"] == "forbidden"


def test_handles_have_a_time_and_a_share(resident: Resident, http: httpx.Client) -> None:
    """Past its time a handle is not found; beyond its share a key's oldest ones go; no tensor may be larger."""
    kept, before = resident.service.kept_tensors, resident.service.kept_tensors.limits
    try:
        kept.limits = KeptLimits(seconds=0.0)
        handle = upload(http, np.ones(4, np.float32))
        resident.until(lambda: not kept._kept)
        assert http.get(f"/v1/tensors/{handle}").status_code == 404
        kept.limits = KeptLimits(tensors=2, memory=1 << 20)
        handles = [upload(http, np.full(4, number, np.float32)) for number in range(3)]
        assert [http.get(f"/v1/tensors/{each}").status_code for each in handles] == [404, 200, 200]
        files = [("request", ("", b"{}", "application/json")), ("tensor", ("", npy(np.zeros(1 << 19, np.float32)), ""))]
        assert http.post("/v1/tensors", files=files).status_code == 413
    finally:
        kept.limits = before


@pytest.mark.parametrize("mode", MODES)
def test_closing_the_stream_ends_the_work(resident: Resident, http: httpx.Client, mode: str) -> None:
    """A verification of seconds is cancelled when its client closes the connection, in both revisions."""
    arguments, before = long_verification(), resident.cancelled()
    params: dict[str, Any] = {"name": "verify", "arguments": arguments, "_meta": {**META, "progressToken": 1}}
    document = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
    headers = {"accept": "application/json, text/event-stream", "mcp-protocol-version": MODES[mode]}
    headers |= {"mcp-method": "tools/call", "mcp-name": "verify"} if mode == REVISION else {}
    with http.stream("POST", "/mcp", json=document, headers=headers) as reply:
        assert reply.status_code == 200
        lines = (line for line in reply.iter_lines() if line.startswith("data:"))
        assert json.loads(next(lines)[5:])["method"] == "notifications/progress"
        assert resident.service.calls
    resident.until(lambda: not resident.service.calls and resident.is_idle())
    assert resident.cancelled() == before + 1
