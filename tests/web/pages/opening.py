"""What the tests of pages share."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np
import numpy.typing as npt
from playwright.sync_api import FilePayload, Locator, Page

__all__ = ["HOLD", "TILES", "Opener", "button", "npy", "said", "saved", "violations"]

_AXE = Path(__file__).parents[3] / ".cache" / "web" / "node_modules" / "axe-core" / "axe.min.js"
# Eight tiles of 28 MB, more than the buffers between service and page hold.
TILES = "/#op=ConvTranspose&n=32&i=16&o=96&src=24x24&kernel=4x4&strides=2x2&output_padding=0x0"
# Lets the next reply through until its second tile begins, then holds it until `release` is called.
HOLD = """() => {
  const { fetch } = globalThis;
  globalThis.fetch = async (path, options) => {
    const reply = await fetch(path, options);
    if (!reply.headers.get("content-type")?.startsWith("application/x-tensor-stream")) return reply;
    globalThis.fetch = fetch;
    const held = new Promise((release) => {
      globalThis.release = release;
      options.signal.addEventListener("abort", release);
    });
    let [tiles, before] = [0, ""];
    const some = new TransformStream({
      async transform(chunk, stream) {
        stream.enqueue(chunk);
        const text = before + new TextDecoder("latin1").decode(chunk);
        tiles += text.split('"type":"tile"').length - 1;
        before = text.slice(-12);
        if (tiles > 1) await held;
      },
    });
    return new Response(reply.body.pipeThrough(some), reply);
  };
}"""


class Opener(Protocol):
    """Opens a page of the service, or of another at `origin`, light or dark, in a window of some width."""

    def __call__(self, path: str, *, origin: str = ..., width: int = 1280, dark: bool = False) -> Page:
        """Return the page, loaded."""


def violations(page: Page) -> list[str]:
    """Return what axe-core finds on a page: the rule and the elements."""
    page.evaluate(_AXE.read_text(encoding="utf-8"))
    found = page.evaluate("axe.run().then(({violations}) => violations)")
    return [f"{rule['id']}: {node['html']}" for rule in found for node in rule["nodes"]]


def npy(array: npt.NDArray[Any], name: str = "mine.npy") -> FilePayload:
    """Return an array as a file to choose."""
    with io.BytesIO() as file:
        np.save(file, array)
        return {"name": name, "mimeType": "application/octet-stream", "buffer": file.getvalue()}


def said(page: Page, part: str = "run-layer") -> Locator:
    """Return what is said about the run, or about the verification."""
    return page.locator(f"{part} .said")


def button(page: Page, name: str) -> Locator:
    """Return a button."""
    return page.get_by_role("button", name=name, exact=True)


def saved(page: Page, name: str) -> npt.NDArray[Any]:
    """Save a tensor; return it."""
    with page.expect_download() as download:
        button(page, f"Save {name}.npy").click()
    found: npt.NDArray[Any] = np.load(download.value.path())
    return found.view(ml_dtypes.bfloat16) if found.dtype.kind == "V" else found
