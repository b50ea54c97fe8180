"""The dashboard and its Prometheus query only metrics that the service reports."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.app.samples import FRAMES, JSON, SMALL, document, post
from tests.convgrad.server import free_port
from tests.live import LiveService, running_service

DEPLOY = Path(__file__).resolve().parent.parent / "deploy"
PANELS: list[dict[str, Any]] = json.loads((DEPLOY / "grafana" / "convgrad.json").read_text("utf-8"))["panels"]
QUERIES = [(panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]]
_PATIENCE_S = 60.0

by_script = pytest.mark.skipif(
    "CONVGRAD_PROMETHEUS" not in os.environ, reason="needs Debian's prometheus: scripts/prometheus-smoke runs it"
)


def test_the_dashboard_queries_existing_metrics(service: LiveService, http: httpx.Client) -> None:
    """Every queried metric is one that the service reports, and each of its own metrics is on the dashboard."""
    post(http, SMALL, SMALL.inputs())
    http.post("/v1/ops/ConvTranspose", json={}, headers={"content-type": "text/plain"})
    families = list(text_string_to_metric_families(http.get("/metrics").text))
    known = {_series(family.name, family.type) for family in families}
    asked = {
        re.sub(r"_(bucket|sum|count)$", "", name)
        for _, query in QUERIES
        for name in re.findall(r"\b(?:convgrad|process)_\w+", query)
    }
    assert asked <= known
    ours = {name for name in known if name.startswith("convgrad_")}
    assert ours - asked <= {
        "convgrad_build_info", "convgrad_target_info", "convgrad_failed", "convgrad_warm_up_ratio",
        "convgrad_shared_memory_refused_total",
    }  # fmt: skip


def _series(name: str, kind: str) -> str:
    return f"{name}_total" if kind == "counter" else name


@contextmanager
def _prometheus(target: str, folder: Path) -> Iterator[httpx.Client]:
    """Run Prometheus with the profile's configuration, scraping the service."""
    text = (DEPLOY / "prometheus.yml").read_text("utf-8").replace("convgrad:8001", target)
    config, port = folder / "prometheus.yml", free_port()
    config.write_text(text.replace("scrape_interval: 5s", "scrape_interval: 1s"), "utf-8")
    subprocess.run(["promtool", "check", "config", str(config)], check=True, capture_output=True)
    listen = [f"--web.listen-address=127.0.0.1:{port}", f"--storage.tsdb.path={folder / 'data'}"]
    process = subprocess.Popen(
        ["prometheus", f"--config.file={config}", *listen], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        transport = httpx.HTTPTransport(retries=8)
        with httpx.Client(transport=transport, base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            yield client
    finally:
        process.terminate()
        process.wait(30)


def _ask(prometheus: httpx.Client, query: str) -> list[Any]:
    reply = prometheus.get("/api/v1/query", params={"query": query.replace("$__rate_interval", "30s")})
    if reply.status_code == 503:
        return []
    assert reply.status_code == 200, f"{query}: {reply.text}"
    result: list[Any] = reply.json()["data"]["result"]
    return result


def _number(result: list[Any]) -> float:
    return float(result[0]["value"][1]) if result else 0.0


@by_script
def test_prometheus_scrapes_the_service_and_answers_the_dashboard(tmp_path: Path) -> None:
    """Prometheus scrapes the metrics without a warning, and answers every query of the dashboard."""
    assert shutil.which("prometheus")
    flags = "--body-limit", "1MiB", "--spool", str(tmp_path / "spool")
    with running_service(*flags) as service, _prometheus(service.url[7:], tmp_path) as prometheus:
        until = time.monotonic() + _PATIENCE_S
        with httpx.Client(base_url=service.url, timeout=60) as http:
            params = document(SMALL, SMALL.inputs())
            while _number(_ask(prometheus, "sum(rate(convgrad_calls_total[30s]))")) <= 0:
                assert time.monotonic() < until, "Prometheus saw no calls"
                post(http, SMALL, SMALL.inputs(), JSON)
                post(http, SMALL, SMALL.inputs(), FRAMES)
                http.post("/rpc", json={"jsonrpc": "2.0", "id": 1, "method": SMALL.op, "params": params})
                http.post("/v1/ops/ConvTranspose", content=b" " * (2 << 20), headers={"content-type": JSON})
            page = http.get("/metrics").text
        lint = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True, text=True)
        assert lint.returncode == 0, lint.stdout + lint.stderr
        empty = [(title, query) for title, query in QUERIES if not _ask(prometheus, query)]
        assert not empty
        assert _number(_ask(prometheus, 'up{job="convgrad"}')) == 1
        assert _number(_ask(prometheus, 'sum(convgrad_refusals_total{reason="body"})')) > 0
