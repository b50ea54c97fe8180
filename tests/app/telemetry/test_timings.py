"""The phases of a request's time."""

from __future__ import annotations

import pytest

from app.telemetry.context import Timings


def test_parts_add_up_in_processing_order() -> None:
    """Each part is the sum of what was added to it, in milliseconds; unknown parts are left out."""
    timings = Timings()
    timings.add("compute", 0.25)
    timings.add("receive", 0.001)
    timings.add("receive", 0.002)
    assert timings.header() == "receive;dur=3.000, compute;dur=250.000"


def test_a_block_that_fails_is_measured_too() -> None:
    """`measure` adds the time of its block even if the block raises."""
    timings = Timings()
    with pytest.raises(ValueError, match="x"), timings.measure("decode"):
        raise ValueError("x")
    assert timings.seconds["decode"] >= 0
