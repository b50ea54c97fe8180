"""A browser, and pages in it that fail their test on any message of the console, error or request elsewhere."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.live import LiveService

# scripts/test-web sets this, and has installed the browser.
collect_ignore_glob = [] if os.environ.get("CONVGRAD_TEST_WEB") else ["test_pages.py"]

Open = Callable[..., Any]
"""`open_page(path, url=, width=, dark=)`: open a page of the service."""


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Debian's Chromium, headless."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium")
    assert chromium, "tests/web needs chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def complaints() -> list[str]:
    """What the pages of a test complained about, in order; a test removes what it expects."""
    return []


@pytest.fixture
def open_page(browser: Any, service: LiveService, complaints: list[str]) -> Iterator[Open]:
    """Open pages; after the test none may have complained."""
    contexts = []

    def opened(path: str, *, url: str = "", width: int = 1280, dark: bool = False) -> Any:
        origin = url or service.url
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme="dark" if dark else "light", accept_downloads=True
        )
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
        page.on("console", lambda message: complaints.append(f"console: {message.text}"))
        page.on(
            "request",
            lambda request: (
                None
                if request.url.startswith((origin + "/", "data:", "blob:"))
                else complaints.append(f"request: {request.url}")
            ),
        )
        page.goto(origin + path)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert complaints == []
