"""The pages with a service that requires a key, and one that is killed."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import socket

import numpy as np
from playwright.sync_api import Page, expect

from tests.live import running_service
from tests.web.pages.opening import HOLD, TILES, Opener, button, npy, said

KEY = "a key of the tests, and of nobody else"
KEYS = f"tester sha256:{hashlib.sha256(KEY.encode()).hexdigest()}"
LAYER = "/#op=Convolution&src=7x7&kernel=3x3"
# A service that loads no compiled kernels starts sooner.
REFERENCE = "reference"


def give(page: Page, key: str) -> None:
    """Type a key."""
    field = page.get_by_label("This service requires an API key")
    field.fill(key)
    field.press("Enter")


def test_a_key(open_page: Opener, complaints: list[str]) -> None:
    """The field appears when a key is required; a wrong key is refused, a right one is used and never stored."""
    with running_service("--workers", "1", CONVGRAD_TARGET=REFERENCE, CONVGRAD_KEYS=KEYS) as service:
        page = open_page(LAYER, origin=service.url)
        verdict = page.locator("#verdict")
        expect(verdict).to_contain_text("this service requires an API key")
        give(page, "a key that nobody has given out")
        expect(verdict).to_have_text("this API key is not valid")
        give(page, KEY)
        expect(verdict).to_have_text("Valid")
        expect(page.locator("#sum .good")).to_contain_text("the service computed")
        expect(page.locator("#code")).to_contain_text('-H "X-API-Key: $CONVGRAD_API_KEY"')
        button(page, "Run").click()
        expect(said(page)).to_have_text("Done.")
        assert KEY not in page.content() + page.url
        assert page.evaluate("localStorage.length + sessionStorage.length") == 0
        page.reload()
        expect(verdict).to_contain_text("this service requires an API key")
        page.close()
    assert {text for text in complaints if "401" not in text} == set()
    complaints.clear()


def test_the_service_is_killed(open_page: Opener, complaints: list[str]) -> None:
    """Both pages say that the service is gone, keep what was typed and chosen, and continue when it is back.

    A run in the middle of its tiles says so too, and is finished by itself.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    with running_service("--port", port, "--workers", "1", CONVGRAD_TARGET=REFERENCE) as service:
        machine, explorer, runs = (open_page(path, origin=service.url) for path in ("/machine", LAYER, TILES))
        expect(machine.locator("#status")).to_have_text("ready")
        expect(explorer.locator("#verdict")).to_have_text("Valid")
        runs.get_by_label("File of weights").set_input_files(npy(np.ones((16, 96, 4, 4), np.float32)))
        runs.evaluate(HOLD)
        button(runs, "Run").click()
        expect(runs.locator("run-layer heat-map .faint").first).to_be_attached()
        os.kill(service.pid, signal.SIGKILL)
        service.process.wait()
    runs.evaluate("release()")
    expect(said(runs)).to_contain_text("The service does not answer")
    explorer.get_by_label("size of src, axis 0", exact=True).fill("9")
    expect(explorer.locator("#verdict")).to_contain_text("The service does not answer")
    button(explorer, "Run").click()
    expect(said(explorer)).to_contain_text("The service does not answer")
    expect(explorer.locator("[data-role=src] .shape")).to_have_text("1 x 1 x 9 x 7")
    expect(machine.locator("#status")).to_have_text("not responding")
    expect(machine.locator("#note")).to_contain_text("The numbers are from")
    expect(machine.locator("#figures")).to_contain_text("1 of 1")
    # The page says so for some seconds, from the service's first answer on.
    with running_service("--port", port, "--workers", "1", wait=False, CONVGRAD_TARGET=REFERENCE):
        expect(machine.locator("#note")).to_contain_text("has restarted")
        expect(machine.locator("#status")).to_have_text("ready")
        expect(explorer.locator("#verdict")).to_have_text("Valid")
        expect(said(explorer)).to_have_text("Done.")
        expect(said(runs)).to_have_text("Done.")
        expect(runs.locator("run-layer")).to_contain_text("mine.npy: f32 [16, 96, 4, 4]")
        for page in (machine, explorer, runs):
            page.close()
    assert {
        text for text in complaints if not re.search("ERR_(CONNECTION|EMPTY|CONTENT_LENGTH|INCOMPLETE)|503", text)
    } == set()
    complaints.clear()
