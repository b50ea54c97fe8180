"""Time the explorer of a running service in headless Chromium: until it is drawn, and frames while the pointer moves.

python -m benchmarks.web [URL]
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import time

from playwright.sync_api import Browser, sync_playwright

__all__ = ["main"]

_MAP = "/#op=Convolution&src=64x64&kernel=7x7&strides=1x1&pads_begin=3x3&pads_end=3x3"
_LOADS, _SECONDS = 9, 5.0
# Notes when the drawing, which is made once the page reacts, and the service's answer appear.
_WATCH = """
window.seen = {};
new MutationObserver(() => {
  if (!seen.drawn && document.querySelector("layer-drawing .body")) seen.drawn = performance.now();
  if (!seen.checked && document.querySelector("#verdict")?.textContent === "Valid") seen.checked = performance.now();
}).observe(document, {childList: true, subtree: true, characterData: true});
"""
_COUNT = """
window.frames_ms = [];
let last = performance.now();
requestAnimationFrame(function count(now) {
  frames_ms.push(now - last);
  last = now;
  requestAnimationFrame(count);
});
"""


def load(browser: Browser, url: str) -> dict[str, float]:
    """Return the milliseconds until the first paint, the drawing and the service's answer, with an empty cache."""
    with browser.new_context(viewport={"width": 1280, "height": 900}) as context:
        page = context.new_page()
        page.add_init_script(_WATCH)
        page.goto(url)
        page.wait_for_function("() => window.seen.checked")
        page.wait_for_function("() => performance.getEntriesByName('first-contentful-paint').length")
        paint: float = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
        return {"first paint": paint, **page.evaluate("window.seen")}


def hover(browser: Browser, url: str) -> list[float]:
    """Return the milliseconds of each frame while the pointer moves over the largest map."""
    with browser.new_context(viewport={"width": 1280, "height": 900}) as context:
        page = context.new_page()
        page.goto(url + _MAP, wait_until="networkidle")
        box = page.locator("[data-role=src] path.body").bounding_box()
        assert box
        page.evaluate(_COUNT)
        begin, moves = time.monotonic(), 0
        while time.monotonic() - begin < _SECONDS:
            moves += 1
            x, y = (moves * 0.013) % 1, (moves * 0.0071) % 1
            page.mouse.move(box["x"] + x * box["width"], box["y"] + y * box["height"])
        frames: list[float] = page.evaluate("frames_ms")
        sys.stdout.write(f"{moves / _SECONDS:.0f} moves a second\n")
        return frames[1:]


def main() -> int:
    """Print the times."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.web", description="Time the explorer in Chromium.")
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:8000", help="a running service")
    url = parser.parse_args().url
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        loads = [load(browser, url) for _ in range(_LOADS)]
        for name in loads[0]:
            sys.stdout.write(f"{name}: {statistics.median(each[name] for each in loads):.0f} ms (median of {_LOADS})\n")
        frames = sorted(hover(browser, url))
        sys.stdout.write(
            f"{1000 * len(frames) / sum(frames):.1f} frames a second; "
            f"99 % of frames within {frames[int(0.99 * len(frames))]:.1f} ms, longest {frames[-1]:.1f} ms\n"
        )
        browser.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
