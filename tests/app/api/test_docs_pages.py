"""The page `/docs`."""

from __future__ import annotations

import re

import httpx
import pytest

from app.api import web
from tests.live import running_service

PATHS = {path for path in web.PATHS if path.startswith("/docs")}


def test_nothing_is_loaded_from_other_hosts(http: httpx.Client) -> None:
    """Everything that the page loads is served here, and its policy allows no other host and no inline script."""
    page = http.get("/docs")
    named = re.findall(r'(?:src|href)="([^"]*)"', page.text)
    assert {name for name in named if not name.startswith("data:")} == PATHS - {"/docs"} | {"/"}
    assert "<script>" not in page.text
    for path in PATHS:
        found = http.get(path)
        assert found.status_code == 200
        assert found.headers["x-content-type-options"] == "nosniff"
        policy = dict(rule.split(" ", 1) for rule in found.headers["content-security-policy"].split("; "))
        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == policy["connect-src"] == policy["style-src"] == "'self'"
        assert "unsafe" not in str(policy)
        assert "http" not in str(policy)


def test_it_is_swagger_ui(http: httpx.Client) -> None:
    """The files are those of Swagger UI 5 with the right content types, and the document that they show exists."""
    script = http.get("/docs/swagger-ui-bundle.js")
    assert script.headers["content-type"].startswith("text/javascript")
    assert re.search(r'PACKAGE_VERSION:"5\.\d+\.\d+"', script.text)
    assert http.get("/docs/swagger-ui.css").headers["content-type"].startswith("text/css")
    assert 'url: "/openapi.json"' in http.get("/docs/start.js").text
    assert http.head("/docs").status_code == 200


@pytest.mark.parametrize("path", ["/redoc", "/docs/oauth2-redirect", "/docs/redoc.standalone.js", "/docs/../start.js"])
def test_no_other_file_is_served(http: httpx.Client, path: str) -> None:
    """The other files of the package are not served."""
    assert http.get(path).status_code == 404


def test_the_page_needs_no_key() -> None:
    """The page is public even where keys are required, since that is where one enters a key."""
    key = "team-a sha256:" + "0" * 64
    with running_service("--keys", key, "--workers", "1", wait=False) as service:
        service.ready.wait(280)
        with httpx.Client(base_url=service.url) as http:
            assert {http.get(path).status_code for path in PATHS} == {200}
            assert http.get("/v1/ops").status_code == 401
