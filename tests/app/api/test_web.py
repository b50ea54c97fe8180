"""The pages and files of `app/web/`, and `/docs`: all are served, with a strict policy, and they are small."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import httpx
import pytest

from app.api.web import PATHS
from tests.live import running_service

DOCS = {path for path in PATHS if path.startswith("/docs")}
FOLDER = Path(__file__).parents[3] / "app" / "web"
PAGES = sorted(path for path in PATHS if not path.startswith(("/web/", "/docs")))
# All that the pages load, compressed; CONTRIBUTING.md promises it.
MOST_BYTES = 80 << 10


@pytest.mark.parametrize("page", PAGES)
def test_a_page_and_its_files(http: httpx.Client, page: str) -> None:
    """A page and all that it loads, directly or through modules, is served; its policy allows the service alone."""
    waiting, seen = [page], set()
    while waiting:
        path = waiting.pop()
        reply = http.get(path)
        assert reply.status_code == 200, path
        policy = dict(rule.split(" ", 1) for rule in reply.headers["content-security-policy"].split("; "))
        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        seen.add(path)
        loaded = re.findall(r'(?:src|<link[^>]* href)="(/[^"]*)"', reply.text) if path == page else []
        if path.endswith(".js"):
            assert reply.headers["content-type"].startswith("text/javascript")
            loaded = [f"/web/{name}" for name in re.findall(r'(?:from|import) "\./([\w.]+)"', reply.text)]
        waiting += set(loaded) - seen - set(waiting)
    assert {"/web/base.css", "/web/client.js"} <= seen
    assert not re.search(r"<style|<script>| on\w+=| style=|https?://", http.get(page).text)


def test_other_files_are_not_served(http: httpx.Client) -> None:
    """A name that is no file of the folder, or leads out of it, is not found; nor are other files of Swagger UI."""
    names = [f"/web/{name}" for name in ("nothing.js", "..%2fmain.py", "%2e%2e/main.py", ".", "")]
    names += ["/redoc", "/docs/oauth2-redirect", "/docs/redoc.standalone.js", "/docs/../start.js"]
    assert {http.get(name).status_code for name in names} == {404}


def test_all_files_are_small(http: httpx.Client) -> None:
    """The pages and everything that they load take at most 80 KiB compressed, as they are sent."""
    paths = [path for path in PATHS if not path.startswith("/docs")]
    assert len(paths) == sum(1 for file in FOLDER.iterdir())
    assert sum(len(gzip.compress(http.get(path).content)) for path in paths) <= MOST_BYTES


@pytest.mark.parametrize("name", sorted(file.name for file in FOLDER.glob("*.js")))
def test_comments_are_not_sent(http: httpx.Client, name: str) -> None:
    """Of a module every line is sent in its place, but for comments that take whole lines."""
    source, sent = (FOLDER / name).read_text(encoding="utf-8").split("\n"), http.get(f"/web/{name}").text.split("\n")
    assert len(sent) == len(source)
    for before, after in zip(source, sent, strict=True):
        assert after == before or (after == "" and re.match(r"\s*(/\*\*|\*)", before)), before
    assert not re.search(r"(?m)^\s*/\*\*.*\*/$", "\n".join(sent))


def test_docs_loads_nothing_from_other_hosts(http: httpx.Client) -> None:
    """Everything that the page loads is served here, and its policy allows no other host and no inline script."""
    page = http.get("/docs")
    named = re.findall(r'(?:src|href)="([^"]*)"', page.text)
    assert {name for name in named if not name.startswith("data:")} == DOCS - {"/docs"} | {"/"}
    assert "<script>" not in page.text
    for path in DOCS:
        found = http.get(path)
        assert found.status_code == 200
        assert found.headers["x-content-type-options"] == "nosniff"
        policy = dict(rule.split(" ", 1) for rule in found.headers["content-security-policy"].split("; "))
        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == policy["connect-src"] == policy["style-src"] == "'self'"
        assert "unsafe" not in str(policy)
        assert "http" not in str(policy)


def test_docs_is_swagger_ui(http: httpx.Client) -> None:
    """The files are those of Swagger UI 5 with the right content types, and the document that they show exists."""
    script = http.get("/docs/swagger-ui-bundle.js")
    assert script.headers["content-type"].startswith("text/javascript")
    assert re.search(r'PACKAGE_VERSION:"5\.\d+\.\d+"', script.text)
    assert http.get("/docs/swagger-ui.css").headers["content-type"].startswith("text/css")
    assert 'url: "/openapi.json"' in http.get("/docs/start.js").text
    assert http.head("/docs").status_code == 200


@pytest.mark.heavy
def test_docs_needs_no_key() -> None:
    """The page is public even where keys are required, since that is where one enters a key."""
    key = "team-a sha256:" + "0" * 64
    with running_service("--keys", key, "--workers", "1", wait=False) as service:
        service.ready.wait(280)
        with httpx.Client(base_url=service.url, timeout=60) as http:
            assert {http.get(path).status_code for path in DOCS} == {200}
            assert http.get("/v1/ops").status_code == 401
