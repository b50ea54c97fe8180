"""Spans as a collector receives them from a real service."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.app.samples import SMALL, post, wait_for
from tests.live import running_service

pytestmark = pytest.mark.heavy

pytest.importorskip("opentelemetry.instrumentation.asgi")

_STEPS = ("job queued", "job running", "job done")
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@contextmanager
def collector() -> Iterator[tuple[str, list[Any]]]:
    """Listen like an OpenTelemetry collector; yields its address and the received spans."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    spans: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            request = ExportTraceServiceRequest.FromString(body)
            spans.extend(
                span for resource in request.resource_spans for scope in resource.scope_spans for span in scope.spans
            )
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", spans
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def attributes(span: Any) -> dict[str, Any]:
    """Return a span's attributes."""
    return {entry.key: getattr(entry.value, entry.value.WhichOneof("value")) for entry in span.attributes}


def test_a_job_is_a_span_above_its_call(tmp_path: Path) -> None:
    """An attempt at a job has a span with its outcome, whose child is the call; its lines in the log have the id."""
    with (
        collector() as (endpoint, spans),
        running_service("--spool", str(tmp_path), OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=endpoint) as service,
        httpx.Client(base_url=service.url) as http,
    ):
        reply = post(http, SMALL, SMALL.inputs(), headers={"prefer": "respond-async"})
        job = reply.json()["job"]
        wait_for(lambda: http.get(f"/v1/jobs/{job}").json()["state"] == "done")
    by_name = {span.name: span for span in spans}
    assert by_name[SMALL.op].parent_span_id == by_name["job"].span_id
    found = attributes(by_name["job"])
    assert (found["convgrad.job"], found["convgrad.outcome"], found["convgrad.attempt"]) == (job, "done", 1)
    assert found["convgrad.ms"] > 0
    lines = [line for line in service.log if f"job={job}" in line]
    assert tuple(next(each for each in _STEPS if each in line) for line in lines) == _STEPS
    assert f"request_id={reply.headers['x-request-id']}" in lines[-1]


def test_a_call_is_a_span_below_its_caller() -> None:
    """The request's span continues the caller's trace, the call's span is its child, and both have the outcome."""
    with collector() as (endpoint, spans):
        with (
            running_service(OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=endpoint) as service,
            httpx.Client(base_url=service.url) as http,
        ):
            http.headers["traceparent"] = f"00-{TRACE}-{PARENT}-01"
            reply = post(http, SMALL, SMALL.inputs())
            assert reply.status_code == 200
        ours = [span for span in spans if span.trace_id.hex() == TRACE]
    by_name = {span.name: span for span in ours}
    request, call = by_name["POST rest"], by_name[SMALL.op]
    assert request.parent_span_id.hex() == PARENT
    assert call.parent_span_id == request.span_id
    assert reply.headers["traceresponse"] == f"00-{TRACE}-{request.span_id.hex()}-01"
    assert attributes(request)["convgrad.outcome"] == "ok"
    assert attributes(request)["convgrad.request_id"] == reply.headers["x-request-id"]
    assert attributes(call)["convgrad.macs"] > 0
    assert any(TRACE in line for line in service.log)
