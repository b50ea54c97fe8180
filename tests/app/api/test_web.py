"""The pages for browsers and the files of `app/web/`."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import httpx
import pytest

from app.api.web import PATHS, POLICY
from tests.live import running_service

FOLDER = Path(__file__).parents[3] / "app" / "web"
PAGES = sorted(path for path in PATHS if not path.startswith("/web/"))
# All that the pages load, compressed.
MOST_BYTES = 120 << 10


def test_every_file_is_served(http: httpx.Client) -> None:
    """Each file has a path of its own with its content and type."""
    types = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
    for file in FOLDER.iterdir():
        reply = http.get(f"/web/{file.name}")
        assert reply.content == file.read_bytes()
        assert reply.headers["content-type"] == f"{types[file.suffix]}; charset=utf-8"
        assert reply.headers["content-security-policy"] == POLICY


def test_other_files_are_not(http: httpx.Client) -> None:
    """A name that is no file of the folder, or leads out of it, is not found."""
    for name in ("nothing.js", "..%2fmain.py", "%2e%2e/main.py", ".", ""):
        assert http.get(f"/web/{name}").status_code == 404


@pytest.mark.parametrize("path", PAGES)
def test_the_policy_allows_the_service_alone(http: httpx.Client, path: str) -> None:
    """A page has no inline script or style, and its policy allows none."""
    page = http.get(path)
    assert page.headers["content-security-policy"] == POLICY
    assert "unsafe" not in POLICY
    assert not re.findall(r"<script(?![^>]* src=)|<style|\sstyle=|\son\w+=", page.text)
    assert all(
        name.startswith(("/web/", "data:")) for name in re.findall(r'(?:src|<link[^>]* href)="([^"]*)"', page.text)
    )


def test_a_file_that_the_browser_holds_is_not_sent_again(http: httpx.Client) -> None:
    """The tag of a file, also as a weak one or in a list, gets 304 without content; another tag gets the file."""
    tag = http.get("/web/base.css", headers={"accept-encoding": "identity"}).headers["etag"]
    for held in (tag, f"W/{tag}", f'"other", {tag}'):
        reply = http.get("/web/base.css", headers={"if-none-match": held, "accept-encoding": "identity"})
        assert (reply.status_code, reply.content, reply.headers["etag"]) == (304, b"", tag)
    assert http.get("/web/base.css", headers={"if-none-match": '"other"'}).status_code == 200


def test_compression(http: httpx.Client) -> None:
    """A client that decodes gzip gets the file compressed under a tag of its own; one that refuses it gets it plain."""
    tags = set()
    for header, coding in (("gzip, deflate, br", "gzip"), ("gzip;q=0, br", None), ("identity", None)):
        reply = http.get("/web/base.css", headers={"accept-encoding": header})
        assert reply.headers.get("content-encoding") == coding
        assert reply.headers["vary"] == "accept-encoding"
        assert reply.content == (FOLDER / "base.css").read_bytes()
        tags.add(reply.headers["etag"])
    assert len(tags) == 2


def test_head(http: httpx.Client) -> None:
    """HEAD has the headers of GET and no body."""
    for path in ("/machine", "/web/base.css"):
        head, get = http.head(path), http.get(path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-length"] == get.headers["content-length"]


def test_no_key_is_needed_for_the_pages() -> None:
    """Pages and their files are the same for everybody, so that a page can ask for the key."""
    with running_service("--keys", f"team-a sha256:{'0' * 64}", "--workers", "1", wait=False) as service:
        assert service.listens.wait(60)
        for path in PATHS:
            assert httpx.get(service.url + path).status_code == 200


def test_all_files_are_small() -> None:
    """The pages and everything that they load take at most 120 KiB compressed."""
    assert sum(len(gzip.compress(file.read_bytes())) for file in FOLDER.iterdir()) <= MOST_BYTES
