"""The benchmark measures the constants of the cost model."""

from __future__ import annotations

import pytest


def test_constants(measured: dict[str, float], capsys: pytest.CaptureFixture[str]) -> None:
    """It prints each constant, measured between two nodes."""
    with capsys.disabled():
        print("", *(f"{name} {value:.2g}" for name, value in measured.items()), sep="\n")
    assert list(measured) == ["unit_s", "put_rate", "send_rate", "mac_rate"]
    assert all(value > 0 for value in measured.values())
