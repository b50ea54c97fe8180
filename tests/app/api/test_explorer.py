"""The page `/explorer`: its files are served, and its policy allows no inline script or style."""

from __future__ import annotations

import re

import httpx


def test_the_page_and_its_files(http: httpx.Client) -> None:
    """The page and everything that it loads, directly or through modules, is served with a strict policy."""
    waiting, seen = ["/explorer"], set()
    while waiting:
        path = waiting.pop()
        reply = http.get(path)
        assert reply.status_code == 200, path
        assert "unsafe" not in reply.headers["content-security-policy"]
        seen.add(path)
        loaded = re.findall(r'(?:src|<link[^>]* href)="(/[^"]*)"', reply.text) if path == "/explorer" else []
        if path.endswith(".js"):
            assert reply.headers["content-type"].startswith("text/javascript")
            loaded = [f"/web/{name}" for name in re.findall(r'(?:from|import) "\./([\w.]+)"', reply.text)]
        waiting += set(loaded) - seen - set(waiting)
    assert {"/web/explorer.js", "/web/arithmetic.js", "/web/base.css", "/web/client.js"} <= seen
    assert not re.search(r"<style|<script>| on\w+=| style=", http.get("/explorer").text)
