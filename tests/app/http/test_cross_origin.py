"""Requests from web pages, and requests for other host names."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from app.http.cross_origin import is_allowed_host
from app.settings import Settings
from tests.app.samples import CALL_PAGES, SMALL, parts, read, same_bits
from tests.live import LiveService, running_service

REGISTER = "/v2/systemsharedmemory/region/x/register"
CALLS = (*CALL_PAGES, REGISTER)
CROSS = {"origin": "https://evil.example", "sec-fetch-site": "cross-site"}


@pytest.fixture(scope="module")
def open_to_one() -> Iterator[LiveService]:
    """A service that pages of one origin may call, and that has one additional host name."""
    flags = ["--cors", '["https://good.example"]', "--allowed-hosts", "localhost,grad.example", "--workers", "1"]
    with running_service(*flags) as service:
        yield service


@pytest.mark.parametrize("path", [*CALLS, "/", "/v1/ops", "/metrics", "/openapi.json"])
@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "0.0.0.0:8000", "127.0.0.1.evil.example", "", "::1"]
)
def test_other_host_names_are_refused(http: httpx.Client, path: str, host: str) -> None:
    """Without keys a service on a loopback address answers to no other name, which prevents DNS rebinding."""
    answer = http.request("POST" if path in CALLS else "GET", path, headers={"host": host})
    assert answer.status_code == 403
    assert "CONVGRAD_ALLOWED_HOSTS" in answer.text


@pytest.mark.parametrize(
    "host", ["localhost", "LocalHost.:8000", "a.localhost:1", "127.0.0.1:8000", "127.9.9.9", "[::1]:80"]
)
def test_loopback_names_are_answered(http: httpx.Client, host: str) -> None:
    """Every loopback name is accepted, with any port."""
    assert http.get("/v1/ops", headers={"host": host}).status_code == 200


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/v2/health/ready"])
def test_health_is_answered_under_every_name(http: httpx.Client, path: str) -> None:
    """Probes use the address of a container or a load balancer."""
    assert http.get(path, headers={"host": "10.1.2.3:8000"}).status_code == 200


@pytest.mark.parametrize("path", CALLS)
@pytest.mark.parametrize(
    "headers",
    [
        CROSS,
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": "http://localhost:3000", "sec-fetch-site": "same-site"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"},
    ],
)
@pytest.mark.parametrize("kind", ["application/json", "text/plain", "multipart/form-data; boundary=x", None])
def test_pages_of_other_origins_are_refused(
    http: httpx.Client, path: str, headers: dict[str, str], kind: str | None
) -> None:
    """Only the service's own pages may call it, whatever a page sends."""
    types = {} if kind is None else {"content-type": kind}
    answer = http.post(path, content=b"{}", headers=headers | types)
    assert answer.status_code == 403
    assert "CONVGRAD_CORS" in answer.text


def test_a_page_cannot_read_with_get(http: httpx.Client) -> None:
    """Another site's fetch or image gets no answer, but a link to one of our pages works."""
    assert (
        http.get("/metrics", headers={"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}).status_code == 403
    )
    visit = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
    assert http.get("/", headers=visit).status_code == 200
    assert http.get("/", headers=visit | {"sec-fetch-dest": "iframe"}).status_code == 403


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded; charset=utf-8"])
def test_a_page_may_not_send_form_content_types(http: httpx.Client, kind: str) -> None:
    """Even our own pages must send a content type that a plain form can't have; programs need not."""
    own = {"sec-fetch-site": "same-origin", "content-type": kind}
    assert http.post("/v2/repository/index", content=b"{}", headers=own).status_code == 415
    assert http.post("/v2/repository/index", content=b"{}", headers={"content-type": kind}).status_code == 200


@pytest.mark.parametrize("headers", [{}, {"sec-fetch-site": "same-origin"}, {"sec-fetch-site": "none"}])
def test_own_pages_and_programs_may_send_files(
    service: LiveService, http: httpx.Client, headers: dict[str, str]
) -> None:
    """Multipart works from /docs, which has the same origin, and from programs; also without Sec-Fetch-Site."""
    inputs = SMALL.inputs()
    for more in (headers, {"origin": service.url}):
        answer = http.post(f"/v1/ops/{SMALL.op}", files=parts(SMALL, inputs), headers=more)
        assert same_bits(read(answer), SMALL.expected(inputs))


@pytest.mark.heavy
def test_settings_allow_hosts_and_origins(open_to_one: LiveService) -> None:
    """Only origins in CONVGRAD_CORS may call, and only names in CONVGRAD_ALLOWED_HOSTS are answered."""
    with httpx.Client(base_url=open_to_one.url, timeout=60) as http:
        good = {"origin": "https://good.example", "sec-fetch-site": "cross-site"}
        assert http.post("/rpc", json={}, headers=good).status_code == 200
        exposed = http.get("/v2", headers=good).headers["access-control-expose-headers"]
        assert "inference-header-content-length" in exposed  # without it a page can't find the binary tensors
        assert http.post("/rpc", json={}, headers=CROSS).status_code == 403
        assert http.post("/rpc", json={}, headers={"host": "grad.example:443"}).status_code == 200
        assert http.post("/rpc", json={}, headers={"host": "evil.example"}).status_code == 403


@pytest.mark.parametrize(
    ("settings", "hosts"),
    [
        ({}, {"localhost"}),
        ({"host": "::1"}, {"localhost"}),
        ({"keys": "team-a sha256:" + "0" * 64}, {"*"}),
        ({"host": "0.0.0.0", "public": True}, {"*"}),
        ({"uds": "/tmp/x.sock"}, {"*"}),
        ({"allowed_hosts": "Grad.example, [::1],*"}, {"grad.example", "::1", "*"}),
    ],
)
def test_which_names_are_allowed(settings: dict[str, object], hosts: set[str]) -> None:
    """Loopback names if a browser could reach a service without keys; any name if the service can't know its own."""
    assert Settings(**settings).hosts == hosts  # type: ignore[arg-type]


def test_the_host_header_is_read_as_it_is_written() -> None:
    """Ports and brackets are not part of the name, and a malformed host header matches no name."""
    allowed = frozenset({"::1", "grad.example"})
    assert is_allowed_host("[::1]:8000", allowed)
    assert is_allowed_host("GRAD.example.:443", allowed)
    for wrong in (
        "::1",
        "[::1",
        "grad.example:x",
        "grad.example@evil",
        "user@grad.example",
        "grad.example/x",
        " grad.example",
    ):
        assert not is_allowed_host(wrong, allowed)
