"""Keys, TLS and public addresses on the real service."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.http.keys import FREE_PAGES
from app.settings import Settings
from tests.app.resident import Resident, resident_service
from tests.app.samples import JSON, SMALL, SSE, digest, document, messages, post, read, same_bits, wait_for

KEY = "cg_the-key-of-this-test"
APIS = [
    ("POST", "/v1/ops/ConvTranspose"), ("GET", "/v1/ops"), ("POST", "/v2/models/ConvTranspose/infer"), ("GET", "/v2"),
    ("GET", "/nowhere"), ("GET", "/v2/models/stats"), ("GET", "/healthz/"), ("GET", "/rpc/"),
]  # fmt: skip


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Resident, Path]]:
    """A service with a key file."""
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text(f"tester {digest(KEY)}\n")
    with resident_service(workers=1, keys_file=path) as resident:
        yield resident, path


@pytest.fixture
def http(locked: tuple[Resident, Path]) -> Iterator[httpx.Client]:
    """A client for that service without a key."""
    with httpx.Client(base_url=locked[0].url, timeout=60) as client:
        yield client


@pytest.mark.parametrize(("method", "path"), APIS)
@pytest.mark.parametrize("headers", [{}, {"x-api-key": "wrong"}, {"authorization": f"Basic {KEY}"}])
def test_requests_without_a_key_are_refused(
    http: httpx.Client, method: str, path: str, headers: dict[str, str]
) -> None:
    """Every page of every API is 401 without a valid key, even one that does not exist."""
    reply = http.request(method, path, headers=headers)
    assert reply.status_code == 401
    assert reply.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("path", sorted(FREE_PAGES - {"/docs/oauth2-redirect"}))
def test_pages_that_need_no_key(http: httpx.Client, path: str) -> None:
    """Health, metrics and the static pages need no key."""
    assert http.get(path).status_code == 200


@pytest.mark.parametrize(
    "headers", [{"authorization": f"Bearer {KEY}"}, {"authorization": f"bearer  {KEY}"}, {"x-api-key": KEY}]
)
def test_the_right_key_opens_every_api(http: httpx.Client, headers: dict[str, str]) -> None:
    """With the key, in either header, calls are answered."""
    http.headers.update(headers)
    inputs = SMALL.inputs()
    assert same_bits(read(post(http, SMALL, inputs)), SMALL.expected(inputs))
    call = {"jsonrpc": "2.0", "id": 7, "method": "ops.describe", "params": {"op": SMALL.op}}
    assert "result" in http.post("/rpc", json=call).json()
    assert http.get("/v2/models/ConvTranspose").status_code == 200


def rpc(http: httpx.Client, method: str, params: Any) -> dict[str, Any]:
    """Call a method; return the answer."""
    reply = http.post("/rpc", json={"jsonrpc": "2.0", "id": "mine", "method": method, "params": params})
    assert reply.status_code == 200
    found: dict[str, Any] = reply.json()
    return found


def test_json_rpc_reports_it_under_the_id(http: httpx.Client) -> None:
    """The JSON-RPC API answers -32005 with the request's id, for every method, even an unknown one."""
    for method in (SMALL.op, "ops.list", "nothing"):
        reply = rpc(http, method, None)
        assert (reply["id"], reply["error"]["code"]) == ("mine", -32005)
        assert reply["error"]["data"]["reason"] == "no_key"


@pytest.mark.parametrize("accept", [JSON, SSE])
@pytest.mark.parametrize("item", [1, {"jsonrpc": "2.0", "id": 1, "method": "ops.list"}])
def test_a_batch_without_a_key_gets_one_error(http: httpx.Client, item: object, accept: str) -> None:
    """A batch without a valid key, however many requests are in it and whatever they are, gets one error."""
    reply = http.post("/rpc", json=[item] * 80, headers={"accept": accept})
    (found,) = messages(reply.text) if accept == SSE else [reply.json()]
    assert (found["id"], found["error"]["code"]) == (None, -32005)
    assert found["error"]["data"]["reason"] == "no_key"


def test_tensors_without_a_valid_key_are_not_read(http: httpx.Client) -> None:
    """A large body without a key is rejected before it is read, and its id is not known then."""
    params = document(SMALL, SMALL.inputs()) | {"more": "x" * 70_000}
    reply = rpc(http, SMALL.op, params)
    assert (reply["id"], reply["error"]["code"]) == (None, -32005)


def test_keys_change_without_a_restart(locked: tuple[Resident, Path], http: httpx.Client) -> None:
    """A key that is added to the file works, and one that is removed stops working."""
    _, path = locked
    before = path.read_text()
    path.write_text(f"{before}second {digest('the-second-key')}\n")
    wait_for(lambda: http.get("/v1/ops", headers={"x-api-key": "the-second-key"}).status_code == 200)
    path.write_text(before)
    wait_for(lambda: http.get("/v1/ops", headers={"x-api-key": "the-second-key"}).status_code == 401)
    assert http.get("/v1/ops", headers={"x-api-key": KEY}).status_code == 200


def test_public_addresses_need_a_setting() -> None:
    """Without keys the service listens on loopback addresses only, unless the operator sets `public`."""
    for host in ("127.0.0.1", "127.8.0.1", "localhost", "::1"):
        Settings(host=host)
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.org"):
        with pytest.raises(ValueError, match="public"):
            Settings(host=host)
        Settings(host=host, public=True)
        Settings(host=host, keys="x")  # type: ignore[arg-type]
