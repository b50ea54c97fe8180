"""A browser whose pages fail their test on any message of the console, error, or request to another host."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from tests.live import LiveService
from tests.web.pages.opening import Opener

# scripts/test-web sets this, and has installed the browser.
collect_ignore_glob = [] if os.environ.get("CONVGRAD_TEST_WEB") else ["test_*.py"]


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Debian's Chromium, headless."""
    chromium = shutil.which("chromium")
    assert chromium, "needs chromium: run scripts/test-web"
    # A busy machine must not fail a test.
    expect.set_options(timeout=120_000)
    with sync_playwright() as playwright:
        # A container's root user has no sandbox.
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def complaints() -> list[str]:
    """What the pages of a test complained about, in order; a test removes what it expects."""
    return []


@pytest.fixture
def open_page(browser: Browser, service: LiveService, complaints: list[str]) -> Iterator[Opener]:
    """Open pages of the service; after the test none may have complained."""
    contexts: list[BrowserContext] = []

    def open_page(path: str, *, origin: str = service.url, width: int = 1280, dark: bool = False) -> Page:
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme="dark" if dark else "light", base_url=origin
        )
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(60_000)
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
        page.goto(path)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []
