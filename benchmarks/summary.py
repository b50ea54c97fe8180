"""The summary of all layers of a measurement."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from benchmarks.layers import LAYOUTS

__all__ = ["better", "geometric_mean", "label", "summarise", "summary_lines"]

SUFFIX = {
    "ConvTransposeBackwardWeights": " (transposed)",
    "ConvTranspose": " (forward)",
    "Convolution": " (forward)",
}

LARGE_GMAC, LARGE_CHANNELS = 0.5, 64
"""Layers whose share of the limit has a goal: more work than this, and at least this many channels per group."""

QUIET = 0.15
"""Number of processors that others may keep busy during a layer without spoiling it."""


def geometric_mean(values: Iterable[float]) -> float:
    """Return the geometric mean of positive values."""
    logarithms = [math.log(value) for value in values]
    return math.exp(sum(logarithms) / len(logarithms))


def label(row: dict[str, Any]) -> str:
    """Return the name of a layer and, unless it is Convolution's weight gradient, the operation."""
    return f"{row['name']}{SUFFIX.get(row['op'], '')}"


def better(row: dict[str, Any], who: str) -> dict[str, Any]:
    """Return the entry of the better layout."""
    entry: dict[str, Any] = row[who][row["best"][who]]
    return entry


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the summary of the layers, and of each operation's separately."""
    found: dict[str, Any] = {"all": _summary(rows)}
    for op in dict.fromkeys(row["op"] for row in rows):
        found[op] = _summary([row for row in rows if row["op"] == op])
    return found


def _summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    compared = sorted((row for row in rows if "ratio" in row), key=lambda row: float(row["ratio"]))
    found: dict[str, Any] = {
        "layers": len(rows),
        "compared": len(compared),
        "ours_gflops": geometric_mean(better(row, "ours")["gflops"] for row in rows),
        "wrong": [label(row) for row in rows if not row["right"]],
        "differ": [label(row) for row in rows if not row["agree"]],
        "others_busy": max((row["others_busy"] or 0.0 for row in rows), default=0.0),
        "large": _large(rows),
        "scratch": _scratch(rows),
    }
    if over := [[label(row), row["ratio_direct"]] for row in rows if "ratio_direct" in row]:
        found["over_direct"] = {
            "geometric_mean": geometric_mean(ratio for _, ratio in over),
            "worst": sorted(over, key=lambda each: float(each[1]))[:5],
        }
    if compared:
        found |= {
            "peer_gflops": geometric_mean(better(row, "peer")["gflops"] for row in compared),
            "geometric_mean": geometric_mean(row["ratio"] for row in compared),
            "minimum": compared[0]["ratio"],
            "worst": [[label(row), row["ratio"]] for row in compared[:5]],
            "slower": [label(row) for row in compared if row["ratio"] < 1],
            "less_exact": [[label(row), errors] for row in compared if (errors := _errors(row))],
        }
        for layout in LAYOUTS:
            found[f"geometric_mean_{layout}"] = geometric_mean(row["ratios"][layout] for row in compared)
    return found


def _errors(row: dict[str, Any]) -> float:
    """Return the ratio of our RMS error in the worse layout to that of the peer's faster one; 0 if not above 1."""
    ours = max(entry["error_f64"]["rms"] for entry in row["ours"].values())
    peer = better(row, "peer")["error_f64"]["rms"]
    if ours <= peer:
        return 0.0
    return float(ours / peer) if peer else math.inf


def _large(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the shares of the limit of the large layers."""
    shares = {}
    for row in rows:
        channels = min(row["src_channels"], row["dst_channels"]) // row["groups"]
        if row["gmac"] > LARGE_GMAC and channels >= LARGE_CHANNELS:
            shares[label(row)] = better(row, "ours")["share"]
    if not shares:
        return {"layers": 0}
    worst = min(shares, key=lambda name: float(shares[name]))
    return {"layers": len(shares), "mean": sum(shares.values()) / len(shares), "worst": [worst, shares[worst]]}


def _scratch(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the most scratch of each kernel, in bytes: a worker's own and what all workers share."""
    found: dict[str, dict[str, int]] = {}
    for row in rows:
        for entry in row["ours"].values():
            peak = found.setdefault(entry["kernel"], {"worker_bytes": 0, "shared_bytes": 0})
            peak["worker_bytes"] = max(peak["worker_bytes"], entry["worker_scratch_bytes"])
            peak["shared_bytes"] = max(peak["shared_bytes"], entry["shared_scratch_bytes"])
    return found


def summary_lines(summary: dict[str, Any]) -> list[str]:
    """Return the summary as lines for a terminal."""
    lines = []
    for name, part in summary.items():
        if name != "all" and len(summary) == 2:
            continue
        lines.append(f"\n{name}: {part['layers']} layers, ours {part['ours_gflops']:.1f} GFLOP/s (geometric mean)")
        if over := part.get("over_direct"):
            worst = ", ".join(f"{each} {ratio:.2f}" for each, ratio in over["worst"])
            lines.append(f"  ratio over direct sums: geometric mean {over['geometric_mean']:.2f}, worst: {worst}")
        if part["compared"]:
            layouts = ", ".join(f"{layout} {part[f'geometric_mean_{layout}']:.2f}" for layout in LAYOUTS)
            lines.append(
                f"  ratio over the peer ({part['peer_gflops']:.1f} GFLOP/s):"
                f" geometric mean {part['geometric_mean']:.2f}"
                f" ({layouts}), minimum {part['minimum']:.2f}, below 1: {len(part['slower'])}"
            )
            lines.append("  worst: " + ", ".join(f"{each} {ratio:.2f}" for each, ratio in part["worst"]))
            less = ", ".join(f"{each} {ratio:.3f}" for each, ratio in part["less_exact"])
            lines.append(f"  RMS error against float64 above the peer's: {less or 'nowhere'}")
        if part["large"]["layers"]:
            large = part["large"]
            lines.append(
                f"  share of the limit on {large['layers']} large layers: mean {100 * large['mean']:.1f} %,"
                f" least {100 * large['worst'][1]:.1f} % ({large['worst'][0]})"
            )
        if name == "all" and part["others_busy"] > QUIET:
            lines.append(f"  NOT QUIET: others kept up to {part['others_busy']:.1f} processors busy")
        for kernel, peak in part["scratch"].items():
            own, shared = peak["worker_bytes"] / 2**20, peak["shared_bytes"] / 2**20
            lines.append(f"  scratch of {kernel}: {own:.1f} MiB a worker, {shared:.1f} MiB shared")
        texts = {"wrong": "WRONG", "differ": "the peer's result is far from float64, or ours"}
        lines += [f"  {text}: {', '.join(part[kind])}" for kind, text in texts.items() if part[kind]]
    return lines
