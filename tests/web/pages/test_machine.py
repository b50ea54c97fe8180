"""The page `/machine`: the numbers are the service's, read as Prometheus reads them."""

from __future__ import annotations

import re

import httpx
from playwright.sync_api import expect
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.app.samples import SMALL, post
from tests.problems import Case
from tests.web.pages.opening import Opener

# What Winograd's algorithm computes.
WIDE = Case(
    op="ConvolutionBackwardWeights", src_channels=16, dst_channels=16, src_spatial=(6, 6), dst_spatial=(6, 6),
    kernel=(3, 3), strides=(1, 1), pads_begin=(1, 1), pads_end=(1, 1),
)  # fmt: skip


def test_it_shows_calls(open_page: Opener, http: httpx.Client) -> None:
    """Calls appear in the rates, the phases and the counted units; workers and target are those of `/readyz`."""
    page = open_page("/machine")
    expect(page.locator("#status")).to_have_text("ready")
    units = page.locator("#facts div", has_text="units computed").locator("dd")
    before = units.inner_text()
    ready = http.get("/readyz").json()
    expect(page.locator("#figures")).to_contain_text(f"{ready['workers']['ready']} of {ready['workers']['wanted']}")
    expect(page.locator("#facts")).to_contain_text(ready["target"])
    expect(page.locator("#figures div", has_text="GFLOP/s")).to_contain_text(re.compile(r"of [1-9][\d,.]* in f32"))
    for _ in range(20):
        assert post(http, SMALL, SMALL.inputs()).status_code == 200
    expect(page.locator("#calls li", has_text="ok")).not_to_contain_text("highest 0")
    expect(page.locator("#whole")).to_contain_text("in the last 10 s")
    expect(page.locator("#parts tr", has_text="compute").locator("td").last).not_to_have_text("0 ms")
    expect(units).not_to_have_text(before)


def test_it_counts_calls_by_algorithm(open_page: Opener, http: httpx.Client) -> None:
    """A call by Winograd's algorithm is counted as one."""
    page = open_page("/machine")
    counted = page.locator("#facts div", has_text="calls by algorithm").locator("dd")
    expect(counted).to_have_text(re.compile(r"^direct \d+, winograd \d+$"))
    before = int(counted.inner_text().rpartition(" ")[2])
    assert post(http, WIDE, WIDE.inputs(), algorithm="winograd").status_code == 200
    expect(counted).to_have_text(re.compile(rf"winograd {before + 1}$"))


def test_metrics_are_read_as_prometheus_reads_them(open_page: Opener, http: httpx.Client) -> None:
    """Names, labels and values of every series are those of Prometheus's own parser, also with escaped labels."""
    registry = CollectorRegistry()
    Counter("convgrad_odd", "Odd labels.", ["label"], registry=registry).labels('a "b", c="d" \\n} \n').inc(2.5)
    page = open_page("/machine")
    for text in (http.get("/metrics").text, generate_latest(registry).decode()):
        found = page.evaluate("text => import('/web/metrics.js').then(({parse}) => parse(text))", text)
        expected = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        read = [(each["name"], each["labels"], each["value"]) for each in found]
        assert [each for each in read if each[2] is not None] == [
            (sample.name, sample.labels, sample.value) for sample in expected if abs(sample.value) != float("inf")
        ]
