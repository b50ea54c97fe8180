"""The benchmark of the service: its requests, its report, and one small run of it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import service
from benchmarks.service_cases import APIS, CASES, Case, Reply

TINY = CASES[0]


@pytest.mark.release
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


def test_expected_results_follow_the_definition() -> None:
    """The expected result of a case is its gradient by the definition: float64 sums of small integers."""
    case = Case("small", 2, 3, 5, 4)
    src, diff_dst = case.inputs().values()
    padded = np.pad(src, [(0, 0), (0, 0), (1, 1), (1, 1)]).astype(np.float64)
    windows = np.lib.stride_tricks.sliding_window_view(padded, (5, 5), (2, 3))
    np.testing.assert_allclose(case.expected(), np.einsum("ncklhw,nohw->ockl", windows, diff_dst), rtol=1e-5)
