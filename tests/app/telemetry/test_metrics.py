"""The metrics after calls on a real service."""

from __future__ import annotations

from dataclasses import replace

import httpx
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from app.telemetry.context import api_of
from tests.app.bare import rest_connection
from tests.app.resident import Resident
from tests.app.samples import FRAMES, JSON, LARGE, NPY, SLOW, SMALL, SSE, document, post
from tests.faults.apis import APIS, prepare

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scrape(tight: Resident, *, idle: bool = True) -> Samples:
    """Return the metrics as Prometheus reads them, once all earlier requests have been counted."""
    if idle:
        tight.run(tight.service.admission.idle())
    reply = httpx.get(f"{tight.url}/metrics")
    assert reply.headers["content-type"].startswith("text/plain")
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(reply.text)
        for sample in family.samples
    }


def grown(before: Samples, after: Samples, name: str, **labels: str) -> float:
    """Return by how much a sample grew."""
    key = (name, frozenset(labels.items()))
    return after.get(key, 0.0) - before.get(key, 0.0)


@pytest.mark.parametrize("accept", [JSON, NPY, SSE, FRAMES])
def test_a_call_is_counted_in_every_form(tight: Resident, tight_http: httpx.Client, accept: str) -> None:
    """A call counts once under operation, dtype, API and outcome, and its phases are timed."""
    before = scrape(tight)
    assert post(tight_http, SMALL, SMALL.inputs(), accept).status_code == 200
    after = scrape(tight)
    labels = {"operation": SMALL.op, "dtype": "f32", "api": "rest", "outcome": "ok"}
    assert grown(before, after, "convgrad_calls_total", **labels) == 1
    assert grown(before, after, "convgrad_algorithm_calls_total", operation=SMALL.op, algorithm="direct") == 1
    assert grown(before, after, "convgrad_requests_total", api="rest", outcome="ok") == 1
    for part in ("receive", "decode", "queue", "compute", "encode"):
        assert grown(before, after, "convgrad_part_seconds_count", api="rest", part=part) == 1
    assert grown(before, after, "convgrad_received_bytes_total", api="rest") > SMALL.inputs()["src"].nbytes
    assert grown(before, after, "convgrad_sent_bytes_total", api="rest") > 0
    assert grown(before, after, "convgrad_macs_total") > 0
    assert grown(before, after, "convgrad_units_total") > 0


@pytest.mark.parametrize("api", list(APIS))
def test_encoding_of_a_large_reply_is_timed(tight: Resident, tight_http: httpx.Client, api: str) -> None:
    """A streamed reply has one encode time, even if its pieces are encoded while they are sent."""
    case = replace(LARGE, src_spatial=(512, 512), dst_spatial=(1024, 1024))
    call = prepare(api, case, case.floats(), np.empty(0))
    before = scrape(tight)
    assert tight_http.post(call.path, content=call.content, headers=call.headers).status_code == 200
    labels = {"api": api_of(call.path), "part": "encode"}
    after = scrape(tight)
    assert grown(before, after, "convgrad_part_seconds_count", **labels) == 1
    assert grown(before, after, "convgrad_part_seconds_sum", **labels) > 0


def test_every_call_of_a_batch_counts(tight: Resident, tight_http: httpx.Client) -> None:
    """Three calls in one batch are three calls and one request; the invalid item among them is not a call."""
    params = document(SMALL, SMALL.inputs())
    batch = [{"jsonrpc": "2.0", "id": number, "method": SMALL.op, "params": params} for number in range(2)]
    batch.append({"jsonrpc": "2.0", "id": 2, "method": SMALL.op, "params": {}})
    before = scrape(tight)
    assert len(tight_http.post("/rpc", json=batch).json()) == 3
    after = scrape(tight)
    labels = {"operation": SMALL.op, "dtype": "f32", "api": "rpc", "outcome": "ok"}
    assert grown(before, after, "convgrad_calls_total", **labels) == 2
    assert grown(before, after, "convgrad_requests_total", api="rpc", outcome="invalid_params") == 1


@pytest.mark.parametrize("accept", [JSON, SSE, FRAMES])
def test_a_late_deadline_is_an_outcome(tight: Resident, tight_http: httpx.Client, accept: str) -> None:
    """A call that fails in the middle of its stream is counted under its error, and so is its request."""
    before = scrape(tight)
    post(tight_http, SLOW, SLOW.floats(), accept, deadline_ms=100, reference=True)
    after = scrape(tight)
    labels = {"operation": SLOW.op, "dtype": "f32", "api": "rest", "outcome": "deadline_exceeded"}
    assert grown(before, after, "convgrad_calls_total", **labels) == 1
    assert grown(before, after, "convgrad_requests_total", api="rest", outcome="deadline_exceeded") == 1


def test_refusals_have_reasons(tight: Resident, tight_http: httpx.Client) -> None:
    """A full queue and a body over the limit are counted separately; the gauges show what is running."""
    before = scrape(tight)
    with rest_connection(tight.url, SLOW, SSE, reference=True), rest_connection(tight.url, SLOW, SSE, reference=True):
        tight.until(lambda: len(tight.service.calls) == 2 and tight.service.engine.snapshot()["jobs"] == 2)
        assert post(tight_http, SMALL, SMALL.inputs()).status_code == 503
        during = scrape(tight, idle=False)
        assert during[("convgrad_calls_open", frozenset())] == 2
        assert during[("convgrad_calls_limit", frozenset())] == 2
        assert during[("convgrad_shared_memory_bytes", frozenset({("state", "used")}))] > 0
    tight.run(tight.service.admission.idle(), 5.0)
    content = b" " * (8 << 20)
    assert tight_http.post("/v1/ops/ConvTranspose", content=content, headers={"content-type": JSON}).status_code == 413
    after = scrape(tight)
    assert grown(before, after, "convgrad_refusals_total", api="rest", reason="queue") == 1
    assert grown(before, after, "convgrad_refusals_total", api="rest", reason="json") == 1
    labels = {"operation": SLOW.op, "dtype": "f32", "api": "rest", "outcome": "cancelled"}
    assert grown(before, after, "convgrad_calls_total", **labels) == 2


def test_openmetrics_on_request(tight_http: httpx.Client) -> None:
    """The OpenMetrics format is sent on request."""
    reply = tight_http.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    assert reply.headers["content-type"].startswith("application/openmetrics-text")
    assert reply.text.endswith("# EOF\n")


def test_callers_cannot_create_label_values(tight: Resident, tight_http: httpx.Client) -> None:
    """Whatever path or method a caller invents, no label is created for it."""
    for path in ("/made/up", "/v1/ops/made_up", "/v2/models/made_up", "/rpc/made_up"):
        tight_http.get(path)
    names = {value for _, labels in scrape(tight) for _, value in labels}
    assert not [name for name in names if "made" in name]
