"""Counts and times of every inference, by model, as Triton's statistics extension reports them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from app.telemetry.context import Timings

__all__ = ["Statistics"]

# Triton's names for the parts of a request, and ours.
_PARTS = {"queue": "queue", "compute_input": "decode", "compute_infer": "compute", "compute_output": "encode"}
_COMPUTE = ("compute_input", "compute_infer", "compute_output")


@dataclass(slots=True)
class _Duration:
    count: int = 0
    ns: int = 0

    def add(self, seconds: float) -> None:
        self.count += 1
        self.ns += round(seconds * 1e9)

    def report(self) -> dict[str, int]:
        return {"count": self.count, "ns": self.ns}


def _durations() -> dict[str, _Duration]:
    return {name: _Duration() for name in ("success", "fail", *_PARTS)}


@dataclass(slots=True)
class _Model:
    last_ms: int = 0
    durations: dict[str, _Duration] = field(default_factory=_durations)


class Statistics:
    """Count the inferences of each model name since the service started."""

    def __init__(self) -> None:
        self._models: dict[str, _Model] = {}

    def succeeded(self, model: str, seconds: float, timings: Timings) -> None:
        """Count a successful request and its timings."""
        entry = self._entry(model)
        entry.durations["success"].add(seconds)
        for name, part in _PARTS.items():
            entry.durations[name].add(timings.seconds.get(part, 0.0))

    def failed(self, model: str, seconds: float) -> None:
        """Count a request that was rejected, failed or abandoned by its client."""
        self._entry(model).durations["fail"].add(seconds)

    def report(self, model: str, version: str) -> dict[str, Any]:
        """Return the protocol's object for one model; zeros if it was never called."""
        entry = self._models.get(model) or _Model()
        done = entry.durations["success"].count
        durations = {name: duration.report() for name, duration in entry.durations.items()}
        unused = _Duration().report()  # there is no response cache
        return {
            "name": model,
            "version": version,
            "last_inference": entry.last_ms,
            "inference_count": done,
            "execution_count": done,
            "inference_stats": {**durations, "cache_hit": unused, "cache_miss": unused},
            "batch_stats": [{"batch_size": 1, **{name: durations[name] for name in _COMPUTE}}] if done else [],
        }

    def _entry(self, model: str) -> _Model:
        if (entry := self._models.get(model)) is None:
            entry = self._models[model] = _Model()
        entry.last_ms = int(time.time() * 1000)
        return entry
