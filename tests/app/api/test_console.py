"""The page `/`."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from html import unescape
from typing import Any

import httpx
import numpy as np
import pytest

import convgrad
from schemas.tables import OPERATIONS
from tests.live import LiveService, running_service

NAMES = [operation.name for operation in OPERATIONS]
CHROMIUM = shutil.which("chromium")


def content(page: str, name: str) -> str:
    """Return the content of the element with an id, as a browser reads it."""
    found = re.search(rf'<(\w+)[^>]* id="{name}"[^>]*>(.*?)</\1>', page, re.DOTALL)
    assert found
    return unescape(found[2])


def run_curl(command: str) -> dict[str, Any]:
    """Paste a command into a shell; return the reply."""
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=True)
    reply: dict[str, Any] = json.loads(done.stdout)
    assert "outputs" in reply, reply
    return reply


def test_it_loads_nothing_else(http: httpx.Client) -> None:
    """The page names no file to load, and its policy allows exactly its own script and style."""
    page = http.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert not [name for name in re.findall(r'(?:src|<link[^>]* href)="([^"]*)"', page.text) if name != "data:,"]
    policy = dict(rule.split(" ", 1) for rule in page.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    for tag in ("script", "style"):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"


def test_head(http: httpx.Client) -> None:
    """HEAD has the headers of GET and no body."""
    head, get = http.head("/"), http.get("/")
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == str(len(get.content))


def test_it_lists_every_operation(http: httpx.Client) -> None:
    """The table has a row for each operation, and one can choose each."""
    page = http.get("/").text
    assert re.findall(r"<option>(\w+)</option>", page) == NAMES
    assert re.findall(r"<tr><td>(\w+)</td>", page) == NAMES


@pytest.mark.skipif(shutil.which("curl") is None, reason="runs curl")
def test_the_curl_command_runs_as_pasted(service: LiveService, http: httpx.Client) -> None:
    """The command in the page as it is sent computes the call in its form."""
    page = http.get("/").text
    command = content(page, "curl")
    assert content(page, "request") in command
    reply = run_curl(command.replace("http://127.0.0.1:8000", service.url))
    assert reply["op"] == NAMES[0]


@pytest.mark.parametrize("name", NAMES)
def test_every_call_is_computed(http: httpx.Client, name: str) -> None:
    """The call that the page has for each operation is the one of its tensors, and its reference agrees bitwise."""
    request = json.loads(json.loads(content(http.get("/").text, "calls"))[name])
    inputs = {
        key: np.frombuffer(base64.b64decode(value["data"]), "<f4").reshape(value["shape"])
        if isinstance(value, dict)
        else value
        for key, value in request["inputs"].items()
    }
    reply = http.post(f"/v1/ops/{name}", json=request).json()
    (output,) = reply["outputs"].values()
    got = np.frombuffer(base64.b64decode(output["data"]), "<f4").reshape(output["shape"])
    with convgrad.Client(str(http.base_url)) as client:
        expected = client.run(name, inputs, request["attributes"], reference=True)
    assert got.any()
    assert np.array_equal(got, expected)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium, where it and Playwright are installed."""
    api = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("needs Chromium")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def opened(browser: Any, url: str) -> tuple[Any, list[str]]:
    """Open the page on a narrow screen; return it and the list of its errors."""
    page, errors = browser.new_page(viewport={"width": 390, "height": 844}), []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.goto(url)
    page.wait_for_function("document.getElementById('status').textContent === 'ready'")
    return page, errors


@pytest.mark.parametrize("name", NAMES)
def test_in_a_browser(service: LiveService, browser: Any, name: str) -> None:
    """On a screen of 390 pixels nothing is cut off, the answer shows the numbers, and the command runs as shown."""
    page, errors = opened(browser, service.url)
    page.select_option("#operation", name)
    page.click("#compute")
    page.wait_for_selector("#answer .values")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert page.inner_text("#answer .good") == "Computed."
    shown = [float(number) for number in page.locator("#answer .values td").all_inner_texts()]
    (output,) = run_curl(page.inner_text("#curl"))["outputs"].values()
    assert shown == np.frombuffer(base64.b64decode(output["data"]), "<f4").tolist()
    assert errors == []
    page.close()


def test_a_wrong_call_in_a_browser(service: LiveService, browser: Any) -> None:
    """Checking a wrong call lists every error with its place."""
    page, _ = opened(browser, service.url)
    page.fill("#request", '{"attributes": {"strides": [0, 2]}, "inputs": {}}')
    page.click("#check")
    page.wait_for_selector("#answer .bad")
    assert "attributes.strides.0: strides[0] must be at least 1, but is 0" in page.inner_text("#answer")
    assert "inputs.src: src is required" in page.inner_text("#answer")
    page.close()


def test_a_key_in_a_browser(browser: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a key is required, the page asks for it and sends it, and the command reads it from the environment."""
    secret = "k" * 43
    line = f"team-a sha256:{hashlib.sha256(secret.encode()).hexdigest()}"
    with running_service("--keys", line, "--workers", "1") as service:
        page, _ = opened(browser, service.url)
        page.wait_for_selector("#key")
        page.fill("#key", secret)
        page.click("#compute")
        page.wait_for_selector("#answer .values")
        monkeypatch.setenv("CONVGRAD_API_KEY", secret)
        assert secret not in page.inner_text("#curl")
        run_curl(page.inner_text("#curl"))
        page.close()
