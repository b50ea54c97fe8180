"""Counts and times of every inference, by model, as Triton's statistics extension reports them."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from app.telemetry.context import Timings

__all__ = ["Statistics"]

# Triton's names for the parts of a request, and ours.
_PARTS = {"queue": "queue", "compute_input": "decode", "compute_infer": "compute", "compute_output": "encode"}
_COMPUTE = ("compute_input", "compute_infer", "compute_output")
# There is no response cache.
_DURATIONS = ("success", "fail", *_PARTS, "cache_hit", "cache_miss")


class Statistics:
    """Count the inferences of each model name since the service started."""

    def __init__(self) -> None:
        self._last_ms: dict[str, int] = {}
        self._counts, self._ns = Counter[tuple[str, str]](), Counter[tuple[str, str]]()  # by model and duration

    def count(self, model: str, seconds: float, timings: Timings | None) -> None:
        """Count a request, with its timings if it succeeded; others were rejected, failed or abandoned."""
        durations = {"fail": seconds}
        if timings is not None:
            durations = {"success": seconds} | {name: timings.seconds.get(part, 0.0) for name, part in _PARTS.items()}
        self._last_ms[model] = int(time.time() * 1000)
        for name, duration in durations.items():
            self._counts[model, name] += 1
            self._ns[model, name] += round(duration * 1e9)

    def report(self, model: str, version: str) -> dict[str, Any]:
        """Return the protocol's object for one model; zeros if it was never called."""
        durations = {name: {"count": self._counts[model, name], "ns": self._ns[model, name]} for name in _DURATIONS}
        done = self._counts[model, "success"]
        return {
            "name": model,
            "version": version,
            "last_inference": self._last_ms.get(model, 0),
            "inference_count": done,
            "execution_count": done,
            "inference_stats": durations,
            "batch_stats": [{"batch_size": 1, **{name: durations[name] for name in _COMPUTE}}] if done else [],
        }
