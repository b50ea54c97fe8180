"""Settings and what the container allows."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ByteSize, ValidationError

from app.__main__ import parse_settings
from app.pool.container import cpu_count, memory_bytes
from app.settings import Settings


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """CONVGRAD_* is read; sizes take units, counts take the scientific form."""
    monkeypatch.setenv("CONVGRAD_BODY_LIMIT", "64MiB")
    monkeypatch.setenv("CONVGRAD_WORK_LIMIT", "1e12")
    monkeypatch.setenv("CONVGRAD_CORS", '["https://example.org"]')
    settings = Settings()
    assert settings.body_limit == 64 << 20
    assert settings.work_limit == 10**12
    assert settings.cors == ("https://example.org",)


def test_flags_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flag is a setting in kebab case, and stronger than the variable."""
    monkeypatch.setenv("CONVGRAD_QUEUE_LENGTH", "7")
    monkeypatch.setenv("CONVGRAD_PORT", "1234")
    settings = parse_settings(["--queue-length", "9"])
    assert (settings.queue_length, settings.port) == (9, 1234)


@pytest.mark.parametrize(
    "wrong",
    [{"port": 70000}, {"queue_length": 0}, {"deadline_s": 0}, {"engine": "gpu"}, {"log_format": "xml"}, {"nope": 1}],
)
def test_wrong_settings_are_refused(wrong: dict[str, object]) -> None:
    """A value out of range, or an unknown name, is an error."""
    with pytest.raises(ValidationError):
        Settings(**wrong)  # type: ignore[arg-type]


def test_defaults_depend_on_the_container() -> None:
    """Zero workers and zero memory mean: what there is."""
    settings = Settings()
    assert settings.worker_count == cpu_count()
    assert 0 < settings.memory_budget < memory_bytes()
    chosen = Settings(workers=3, memory_limit=ByteSize(5 << 20))
    assert (chosen.worker_count, chosen.memory_budget) == (3, 5 << 20)


@pytest.mark.parametrize(
    ("quota", "most"), [("50000 100000", 1), ("150000 100000", 2), ("max 100000", 10**6), ("junk", 10**6)]
)
def test_the_quota_cuts_the_processors(tmp_path: Path, quota: str, most: int) -> None:
    """A control group of half a processor gives one worker, of one and a half two."""
    (tmp_path / "cpu.max").write_text(quota)
    assert 1 <= cpu_count(tmp_path) <= most


def test_the_quota_of_the_first_version(tmp_path: Path) -> None:
    """Version 1 of control groups is read too; -1 is no quota."""
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("100000")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000")
    assert cpu_count(tmp_path) == 1
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1")
    assert cpu_count(tmp_path) == cpu_count(tmp_path / "none")


def test_the_memory_limit_cuts_the_memory(tmp_path: Path) -> None:
    """memory.max counts when it is a number."""
    (tmp_path / "memory.max").write_text("1048576\n")
    assert memory_bytes(tmp_path) == 1 << 20
    (tmp_path / "memory.max").write_text("max\n")
    assert memory_bytes(tmp_path) == memory_bytes(tmp_path / "none")
