"""The layers to measure: rows of a shapes file, and their problems in either layout."""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import inf, prod
from pathlib import Path
from typing import Any

from kernels import ConvProblem

__all__ = ["LAYOUTS", "OPERATIONS", "Layer", "inside_macs", "read_layers"]

OPERATIONS = (
    "ConvolutionBackwardWeights",
    "ConvTransposeBackwardWeights",
    "ConvTranspose",
    "Convolution",
    "ConvolutionBackwardData",
    "ConvTransposeBackwardData",
)
LAYOUTS = ("NCX", "NXC")

_WEIGHTS = {("Convolution", "NCX"): "OIX", ("Convolution", "NXC"): "XIO"} | {
    ("ConvTranspose", "NCX"): "IOX",
    ("ConvTranspose", "NXC"): "XOI",
}
"""The weights' axes for each layout: the graph's own pairs for channels first and channels last."""


@dataclass(frozen=True)
class Layer:
    """One row of a shapes file for one operation, with the batch that is measured."""

    name: str
    op: str
    row: dict[str, Any]

    def problem(self, dtype: str, layout: str) -> ConvProblem:
        """Return the kernels' problem in `layout` (NCX or NXC), weights in the format that belongs to it.

        A gradient with respect to src is the other forward operation on diff_dst, for the peer too.
        """
        transposed = self.op.startswith("ConvTranspose")
        family = "ConvTranspose" if transposed else "Convolution"
        per_axis = ("src_spatial", "dst_spatial", "kernel", "strides", "dilations", "pads_begin")
        described: dict[str, Any] = {key: tuple(self.row[key]) for key in per_axis}
        described |= {key: self.row[key] for key in ("src_channels", "dst_channels", "groups")}
        described |= {"op": self.op, "dtype": dtype, "n": self.row.get("bench_n", self.row["n"])}
        described |= {"data_format": layout, "weights_format": _WEIGHTS[family, layout]}
        described["groups_axis"] = "O" if transposed else "I"
        if self.op.endswith("BackwardData"):
            described |= {"op": "Convolution" if transposed else "ConvTranspose"}
            for part in ("channels", "spatial"):
                src, dst = described[f"src_{part}"], described[f"dst_{part}"]
                described |= {f"src_{part}": dst, f"dst_{part}": src}
            for name in ("weights_format", "groups_axis"):
                described[name] = described[name].translate(str.maketrans("IO", "OI"))
        return ConvProblem(**described)


def inside_macs(problem: ConvProblem) -> int:
    """Return the number of effective multiply-adds: the nominal ones minus those whose tap is in the padding."""
    dims = problem.dims
    pairs = 1
    for axis in range(3):
        ranges = (dims.tap_range(axis, tap) for tap in range(dims.kernel[axis]))
        pairs *= sum(high - low for low, high in ranges)
    return problem.n * pairs * dims.groups * dims.wide_channels * dims.narrow_channels


def read_layers(path: Path, ops: list[str], only: list[str], gmac: float = inf) -> list[Layer]:
    """Return the rows of `path` whose operation is in `ops` and whose name contains one of `only` (empty: all).

    The rows are weight gradients; for the other operations each becomes a problem of that one. The batch is reduced
    until a layer has at most `gmac` of work, or one image. Raises ValueError if a row's shapes contradict each other,
    because a peer would then compute something else.
    """
    layers = []
    for row in json.loads(path.read_text(encoding="utf-8")):
        _check(row)
        images = row.get("bench_n", row["n"])
        if row.get("bench_gmac", 0) > gmac:
            row["bench_n"] = max(1, int(images * gmac / row["bench_gmac"]))
        family = row["op"].removesuffix("BackwardWeights")
        made = [row["op"], family, f"{family}BackwardData"]
        if not only or any(word in row["name"] for word in only):
            layers += [Layer(row["name"], op, row) for op in made if op in ops]
    return sorted(layers, key=lambda layer: OPERATIONS.index(layer.op))


def _check(row: dict[str, Any]) -> None:
    """Check a row against the operations' shape rules."""
    transposed = row["op"].startswith("ConvTranspose")
    wide, narrow = ("dst", "src") if transposed else ("src", "dst")
    rank = len(row["kernel"])
    extra = row.get("output_padding", [0] * rank)
    for axis in range(rank):
        stride, padding = row["strides"][axis], row["pads_begin"][axis] + row["pads_end"][axis]
        extent = (row["kernel"][axis] - 1) * row["dilations"][axis] + 1
        unused = row[f"{wide}_spatial"][axis] + padding - extent - (row[f"{narrow}_spatial"][axis] - 1) * stride
        if unused != extra[axis] if transposed else not 0 <= unused < stride:
            raise ValueError(f"{row['name']}: axis {axis} breaks the shape rule: {unused} positions left over")
    if prod(row[key] % row["groups"] == 0 for key in ("src_channels", "dst_channels")) == 0:
        raise ValueError(f"{row['name']}: groups={row['groups']} does not divide the channels")
