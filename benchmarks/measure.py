"""Measure one layer: ours and the peer in both layouts, alternately, and the error of each against float64."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.accuracy import Reference, Tensor, channels_last, grouped_result, make_inputs
from benchmarks.contenders import Contender, Ours
from benchmarks.layers import LAYOUTS, Layer, inside_macs
from benchmarks.machine import Neighbours
from kernels import ConvProblem
from kernels.problem import Algorithm

__all__ = ["Settings", "measure", "take_turns"]

SAMPLE_S = 0.01
"""Shortest sample: quick calls are repeated up to this, for the precision of the clock."""

PAUSE_S = 0.02
"""Pause between samples of several threads: a finished team spins for milliseconds on the next one's processors."""

TOLERANCE = {"f32": 1e-2, "bf16": 0.25, "f16": 5e-2}
"""Largest difference, in units of the exact values' RMS, that rounding can explain, even for a peer that rounds often.
A wrong index causes differences of about 1; the precision of a result is reported as its error."""


@dataclass(frozen=True)
class Settings:
    """How to measure: `budget` is in seconds per layer, `limit` is the processor's in GFLOP/s."""

    dtype: str
    threads: int
    peer: str
    runs: int
    budget: float
    clock: str
    limit: float
    algorithm: Algorithm = "direct"


def measure(layer: Layer, settings: Settings) -> dict[str, Any]:
    """Measure `layer`; return its row of the record."""
    problems = {
        layout: replace(layer.problem(settings.dtype, layout), algorithm=settings.algorithm) for layout in LAYOUTS
    }
    first = problems["NCX"]
    inputs = {"NCX": make_inputs(first)}
    inputs["NXC"] = channels_last(first, inputs["NCX"])
    exact = Reference(first, inputs["NCX"])
    row: dict[str, Any] = {"name": layer.name, "op": layer.op, "n": first.n, "groups": first.groups}
    row |= {"src_channels": first.src_channels, "dst_channels": first.dst_channels, "kernel": first.kernel}
    row |= {"gmac": first.macs / 1e9, "inside_gmac": inside_macs(first) / 1e9, "ours": {}, "peer": {}}
    with ExitStack() as stack:
        contenders: list[Contender] = []
        for layout, problem in problems.items():
            contenders += _contenders(problem, inputs[layout], settings)
        for contender in contenders:
            stack.callback(contender.close)
        row |= _record(contenders, exact, row, settings)
    return row | _compare(row)


def _contenders(problem: ConvProblem, inputs: list[Tensor], settings: Settings) -> list[Contender]:
    ours: Contender = Ours(problem, inputs, settings.threads, settings.clock)
    found = [ours]
    if settings.algorithm != "direct":
        direct = replace(problem, algorithm="direct")
        found.append(Ours(direct, inputs, settings.threads, settings.clock, who="direct"))
    if settings.peer != "none":
        from benchmarks.peer import TorchPeer

        found.append(TorchPeer(problem, inputs, settings.threads, settings.clock))
    return found


def _record(contenders: list[Contender], exact: Reference, row: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """Run all contenders; return their entries by who and layout, and whether results are right and agree."""
    entries: dict[str, dict[str, Any]] = {"ours": {}, "peer": {}}
    if settings.algorithm != "direct":
        entries["direct"] = {}
    firsts: dict[Contender, float] = {}
    base, agree, right = None, True, True
    tolerance = TOLERANCE[settings.dtype]
    for contender in contenders:
        entry = entries[contender.part].setdefault(contender.layout, {})
        if contender.who != "ours" and any(t > settings.budget for c, t in firsts.items() if c.who == contender.who):
            entry["error"] = "not run: the other layout took more than the whole budget"
            continue
        try:
            seconds, called = contender.first()
        except RuntimeError as error:  # PyTorch raises it for what it does not support
            if contender.who == "ours":
                raise
            entry["error"] = str(error).splitlines()[0][:200]
            continue
        firsts[contender] = seconds
        found = grouped_result(*contender.result(called))
        del called
        entry["error_f64"] = exact.error(found)
        base = found if base is None else base
        entry["difference"] = float(np.abs(found - base).max()) / exact.scale
        same, near = entry["difference"] <= tolerance, entry["error_f64"]["max"] <= tolerance
        agree = agree and same
        # if the peer is right in the compared part and differs elsewhere, our result is wrong there
        right = right and (same if near else contender.who != "ours")
    neighbours = Neighbours()
    samples = take_turns(firsts, settings, time.sleep if settings.threads > 1 else None)
    others = neighbours.mean()
    for contender, taken in samples.items():
        entry = entries[contender.part][contender.layout]
        entry |= taken | contender.about()
        entry["gflops"] = 2 * row["gmac"] / entry["median_s"]
        entry["share"] = 2 * row["inside_gmac"] / entry["median_s"] / settings.limit
    return entries | {"agree": agree, "right": right, "others_busy": others}


def take_turns(
    firsts: dict[Contender, float], settings: Settings, pause: Callable[[float], None] | None = None
) -> dict[Contender, dict[str, Any]]:
    """Sample the contenders in turn (A B A B ..) up to `settings.runs` times, each within its share of the budget.

    `firsts` are the seconds of each one's first call, the warm-up. If there is no time for another, it is the
    only sample.
    """
    share = settings.budget / max(1, len(firsts))
    spent, guess = dict(firsts), dict(firsts)
    samples: dict[Contender, list[float]] = {contender: [] for contender in firsts}
    repeats = dict.fromkeys(firsts, 1)
    for contender, seconds in firsts.items():
        if seconds < SAMPLE_S:  # a second warm-up: the first call ran with cold memory
            guess[contender] = max(contender.time(1), 1e-7)
            repeats[contender] = max(1, math.ceil(SAMPLE_S / guess[contender]))
    for _ in range(settings.runs):
        for contender, taken in samples.items():
            needed = guess[contender] * repeats[contender]
            if spent[contender] + needed > share:
                continue
            if pause:
                pause(PAUSE_S)
            taken.append(contender.time(repeats[contender]))
            spent[contender] += taken[-1] * repeats[contender]
    return {
        contender: _times(taken or [firsts[contender]], repeats[contender], warm=bool(taken))
        for contender, taken in samples.items()
    }


def _times(samples: list[float], repeats: int, warm: bool) -> dict[str, Any]:
    return {
        "median_s": statistics.median(samples),
        "min_s": min(samples),
        "samples_s": samples,
        "repeats": repeats,
        "warm": warm,
    }


def _compare(row: dict[str, Any]) -> dict[str, Any]:
    """Return the better layouts and the ratios: the peer's time over ours."""
    best, least = {}, {}
    for who in ("ours", "peer", "direct"):
        timed = {layout: entry for layout, entry in row.get(who, {}).items() if "median_s" in entry}
        if timed:
            best[who] = min(timed, key=lambda layout: float(timed[layout]["median_s"]))
            least[who] = min(entry["min_s"] for entry in timed.values())
    found: dict[str, Any] = {"best": best, "ratios": {}}
    if "direct" in best:
        medians = [row[who][best[who]]["median_s"] for who in ("direct", "ours")]
        found["ratio_direct"] = medians[0] / medians[1]
    if "peer" not in best:
        return found
    peer = row["peer"][best["peer"]]
    for layout, entry in row["ours"].items():
        found["ratios"][layout] = peer["median_s"] / entry["median_s"]
        same = row["peer"].get(layout, {})
        if "median_s" in same:
            found["ratios"][f"{layout}/{layout}"] = same["median_s"] / entry["median_s"]
    ours = row["ours"][best["ours"]]
    return found | {"ratio": peer["median_s"] / ours["median_s"], "ratio_of_minima": least["peer"] / least["ours"]}
