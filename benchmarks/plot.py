"""A plot of a measurement: ours and the peer's share of the processor's limit, layer by layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.summary import label

__all__ = ["plot"]

OURS, PEER, LINE = "#0b6e99", "#d9822b", "#b8bfc6"


def plot(document: dict[str, Any], path: Path) -> None:
    """Draw the record of `benchmarks.kernels` as a PNG: a row for each layer, the highest ratio on top.

    Each row has two dots joined by a line, with the ratio on the right. Both are for the better layout.
    """
    rows = sorted(document["layers"], key=lambda row: float(row.get("ratio", 0)))
    figure = Figure(figsize=(11, 1.9 + 0.24 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for y, row in enumerate(rows):
        ours = 100 * row["ours"][row["best"]["ours"]]["share"]
        if "ratio" in row:
            peer = 100 * row["peer"][row["best"]["peer"]]["share"]
            axes.plot([ours, peer], [y, y], color=LINE, linewidth=2, zorder=1)
            axes.plot(peer, y, "o", color=PEER, markersize=6, zorder=2)
            note = f"{row['ratio']:.2f} x" if row["ratio"] < 100 else f"{row['ratio']:.0f} x"
            axes.annotate(note, (1.01, y), xycoords=("axes fraction", "data"), va="center", fontsize=8)
        axes.plot(ours, y, "o", color=OURS, markersize=6, zorder=3)
    axes.plot([], [], "o", color=OURS, label="ours")
    axes.plot([], [], "o", color=PEER, label="PyTorch (oneDNN)")
    axes.set_yticks(range(len(rows)), [label(row) for row in rows], fontsize=8)
    axes.set_ylim(-0.8, len(rows) - 0.2)
    axes.set_xlim(left=0)
    axes.axvline(100, color="#444444", linewidth=1)
    axes.grid(axis="x", color="#e6e9ec")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("share of the processor's f32 limit, %")
    axes.set_title(_title(document), loc="left", fontsize=10)
    axes.legend(loc="lower right", frameon=True, fontsize=8)
    figure.savefig(path, dpi=110)


def _title(document: dict[str, Any]) -> str:
    settings, machine, total = document["settings"], document["machine"], document["summary"]["all"]
    threads = f"{settings['threads']} thread{'s' if settings['threads'] > 1 else ''}"
    text = f"{settings['dtype']}, {threads}, {machine['cpu']['model']}, limit {document['limit']['gflops']:.0f} GFLOP/s"
    if total["compared"]:
        text += f"\nratio over PyTorch {machine['versions']['torch']}: geometric mean {total['geometric_mean']:.2f}"
        text += f", minimum {total['minimum']:.2f}"
    return text
