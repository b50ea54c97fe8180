"""Suites: fixed problems with a score that can be quoted, and seconds beside those of the library in the same run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cache
from math import exp, log
from typing import Any

from convgrad._check.cases import Case
from convgrad._check.issues import ISSUES
from convgrad._check.named import LAYERS, layer
from convgrad._check.problems import Problem, Takes
from convgrad._client import Client

__all__ = ["KINDS", "SUITES", "listed", "problems", "score", "text"]

SUITES = ("backward-40",)

KINDS = ("integers", "normal")
"""Data of each problem: a problem is passed if both results are right. The second one, of a shape that the kernel has
seen and data that it has not, is the one whose seconds count."""

_MACS = 30_000_000
_UPSAMPLING = ("DCGAN, 4x4 upsampling", "U-Net, 2x2 upsampling")
_BIASES = ("ResNet-50, 3x3", "MobileNet v2, depthwise", "ViT, patches", "C3D, 3x3x3")
_FAULTS = (
    "pytorch#50042", "oneDNN#4074", "oneDNN#6035", "pytorch#68868", "pytorch#51430", "burn#1891", "pytorch#34344",
    "fujitsu/oneDNN#43", "pytorch#63314", "rocm-libraries#7732", "MIOpen#575", "mlx#3800", "candle#2337",
    "pytorch#68048",
)  # fmt: skip


@cache
def problems(suite: str) -> Sequence[tuple[str, Problem]]:
    """Return the 40 problems of the suite with the names of their layers and issues; raises `ValueError` for others.

    Weight and data gradients of eleven layers, with as many channels and pixels as 30 million multiply-adds allow,
    four bias gradients, and fourteen gradients that were published as wrong.
    """
    if suite not in SUITES:
        raise ValueError(f"--suite {suite[:40]!r} is none of {', '.join(SUITES)}")
    wanted = []
    for name in LAYERS:
        family = "ConvTranspose" if name in _UPSAMPLING else "Convolution"
        wanted += [(name, f"{family}BackwardWeights"), (name, f"{family}BackwardData")]
    wanted += [(name, "BiasAddBackward") for name in _BIASES]
    found = [(name, layer(name, op, "f32", Takes(), _MACS)) for name, op in wanted]
    return [(name, each) for name, each in found if each is not None] + [
        (name, ISSUES[name].problems[0]) for name in _FAULTS
    ]


def listed(takes: Takes, suite: str) -> list[tuple[str, Problem]]:
    """Return the problems that a kernel takes, in formats that it takes."""
    found = ((name, takes.reformatted(problem)) for name, problem in problems(suite))
    return [(name, problem) for name, problem in found if problem is not None]


def score(data: dict[str, Any], suite: str, client: Client | None) -> dict[str, Any]:
    """Return how many problems of a report are passed, and the kernel's seconds as a ratio to those of `client`.

    The ratio is the geometric mean of the passed ones; there is none without a client that computes in this process.
    """
    rows = []
    for name, problem in problems(suite):
        cases = [case for case in data["cases"] if (case["name"], case["op"]) == (name, problem.op)]
        statuses = {case["status"] for case in cases}
        status = "not taken" if statuses <= {"unsupported"} else "passed" if statuses == {"passed"} else "failed"
        timed = next((case for case in cases if case["kind"] == KINDS[-1]), None)
        row: dict[str, Any] = {"name": name, "op": problem.op, "status": status}
        if status == "passed" and timed is not None:
            row |= {"seconds": timed["seconds"]}
            row |= {} if client is None else {"library": _seconds(client, problem, data["seed"])}
        rows.append(row)
    counted = {word: sum(row["status"] == word for row in rows) for word in ("passed", "failed", "not taken")}
    ratios = [log(row["seconds"] / row["library"]) for row in rows if row.get("library") and row["seconds"]]
    ratio = exp(sum(ratios) / len(ratios)) if ratios else None
    return {"name": suite, "problems": len(rows), "counts": counted, "ratio": ratio, "rows": rows}


def _seconds(client: Client, problem: Problem, seed: int) -> float:
    """Return the seconds of the library for a problem, after a first call, as the kernel's are."""
    inputs = Case(problem, KINDS[-1], seed).inputs()
    client.run(problem.op, inputs, problem.attributes())
    begun = time.perf_counter()
    client.run(problem.op, inputs, problem.attributes())
    return round(time.perf_counter() - begun, 6)


def text(scored: dict[str, Any]) -> str:
    """Return the score in a line."""
    counts = scored["counts"]
    others = ", ".join(f"{counts[word]} {word}" for word in ("failed", "not taken") if counts[word])
    line = f"{scored['name']}: {counts['passed']} of {scored['problems']} passed" + (f" ({others})" if others else "")
    if scored["ratio"] is None:
        return line
    return f"{line}; {scored['ratio']:.3g} times the seconds of convgrad in this run (geometric mean of those passed)"
