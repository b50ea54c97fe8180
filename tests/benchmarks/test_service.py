"""The benchmark of the service: its requests, its report, and one small run of it."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import service
from benchmarks.service_cases import APIS, CASES, Case, Reply
from benchmarks.service_load import Connection, throughput
from benchmarks.service_report import markdown
from benchmarks.startup import free_port

ROOT = Path(__file__).parents[2]
TINY = CASES[0]


@pytest.mark.parametrize("api", APIS, ids=lambda api: api.name)
def test_requests_are_complete(api: Any) -> None:
    """Every request's head states the length of its body."""
    wire = b"".join(api.build(TINY).pieces)
    head, _, body = wire.partition(b"\r\n\r\n")
    lengths = [line.split(b":")[1] for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
    assert [int(length) for length in lengths] == [len(body)]


@pytest.mark.heavy
def test_a_run_measures_every_api(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run without peers checks and times our own APIs, and records figures for each."""
    record = tmp_path / "found.json"
    arguments = ["--no-peers", "--cases", "tiny", "--rounds", "1", "--seconds", "0.02", "--workers", "1"]
    assert service.main([*arguments, "--json", str(record)]) == 0
    rows = json.loads(record.read_text())["cases"]["tiny"]
    expected = {api.name for api in APIS if api.server == "convgrad"}
    assert expected < set(rows)
    for row in rows.values():
        assert 0 < row["min_ms"] <= row["p50_ms"] <= row["p99_ms"]
        assert row["per_s"] is None or row["per_s"] > 0
    printed = capsys.readouterr().out
    assert all(f"| {name} |" in printed for name in rows)


def test_a_wrong_result_ends_the_run() -> None:
    """If a contender computes something else, the run ends and its time is not reported."""
    api = next(api for api in APIS if api.name == "hand-written")
    contender = service.Contender(api.name, api.server, lambda *_: lambda: None, api.read)
    expected = TINY.expected()
    service._check(contender, Reply(200, {}, expected.tobytes()), TINY, expected)
    with pytest.raises(SystemExit, match="computes something else"):
        service._check(contender, Reply(200, {}, (expected + 1).tobytes()), TINY, expected)


def test_the_endpoint_that_only_reads() -> None:
    """The peer that only reads the body returns its length."""
    port = free_port()
    case = Case("some", 2, 8, 20, 8)
    api = next(api for api in APIS if api.server == "body_only")
    script = ROOT / "benchmarks" / "peers" / "body_only.py"
    process = subprocess.Popen([sys.executable, str(script), str(port)])
    try:
        while not answers(port):
            assert process.poll() is None
        with Connection(port) as connection:
            assert int(connection.call(api.build(case)).body) == 4 * 2 * 400 * 16
            count, seconds = throughput([lambda: connection.call(api.build(case))], 0.05)
        assert count >= 1
        assert seconds >= 0.05
    finally:
        process.terminate()
        process.wait()


def answers(port: int) -> bool:
    """Return whether a server accepts connections on the port."""
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionRefusedError:
        return False
    return True


def test_the_report() -> None:
    """Ratios are to the peers that were measured; those that were not are named."""
    row = {"p50_ms": 2.0, "p99_ms": 3.0, "min_ms": 1.0, "per_s": None}
    document = {
        "cases": {"tiny": {"ours": row, "hand-written": row | {"p50_ms": 4.0}}},
        "memory": {"idle_mib": 100.0, "peak_mib": 150.0, "tensors_mib": 25.0},
        "absent": {"pytriton": "pytriton could not be installed: no network"},
    }
    text = markdown(document)
    assert "| ours | 2.00 | 3.00 | 1.00 | - | 0.50 |" in text
    assert "25.0 MiB" in text
    assert "Not measured: pytriton could not be installed" in text


def test_expected_results_follow_the_definition() -> None:
    """The expected result of a case is its gradient by the definition: float64 sums of small integers."""
    case = Case("small", 2, 3, 5, 4)
    src, diff_dst = case.inputs().values()
    padded = np.pad(src, [(0, 0), (0, 0), (1, 1), (1, 1)]).astype(np.float64)
    windows = np.lib.stride_tricks.sliding_window_view(padded, (5, 5), (2, 3))
    np.testing.assert_allclose(case.expected(), np.einsum("ncklhw,nohw->ockl", windows, diff_dst), rtol=1e-5)
