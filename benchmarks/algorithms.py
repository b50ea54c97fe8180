"""Errors of direct sums, of Winograd and of the peer against float64, for six kinds of data.

    python -m benchmarks.algorithms [--op NAME] [--peer none] [--json OUT.json] [--picture OUT.svg]

The layer is a weight gradient, or another operation, in f32: 3x3, 64 to 64 channels, 4 images of 28x28. Errors are in
units of the exact values' RMS. The verdict is that of `verify`, whose model of an honest result is a direct sum.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from math import log10
from pathlib import Path
from typing import Any, get_args

import numpy as np

from benchmarks.accuracy import Array, Tensor
from benchmarks.machine import describe_machine
from kernels import ConvProblem, run_unit
from kernels.problem import OpName
from kernels.registry import compute
from verify.unit import plan_verification, read_report

PROBLEM = ConvProblem(
    op="ConvolutionBackwardWeights", dtype="f32", n=4, src_channels=64, dst_channels=64, groups=1,
    src_spatial=(28, 28), dst_spatial=(28, 28), kernel=(3, 3), strides=(1, 1), dilations=(1, 1), pads_begin=(1, 1),
    data_format="NCX", weights_format="OIX",
)  # fmt: skip

LEFT, WIDTH, LINE = 150, 640, 26
COLOURS = {"direct": "#0b6e99", "winograd": "#d9822b", "peer": "#777"}


def data(problem: ConvProblem) -> dict[str, list[Tensor]]:
    """Return both inputs of each kind, of which the second is diff_dst, or weights."""
    rng = np.random.default_rng(0)
    src, grad = (rng.standard_normal(shape) for shape in problem.input_shapes)
    kept = rng.random(grad.shape) < 0.002
    kinds = {
        "normal": (src, grad),
        "positive": (rng.random(src.shape), rng.random(grad.shape)),
        "after ReLU": (np.maximum(src, 0), grad),
        "smooth": (src.cumsum(2).cumsum(3), grad.cumsum(2).cumsum(3)),
        "0.2 % nonzero": (src, grad * kept),
        "Cauchy": (rng.standard_cauchy(src.shape), rng.standard_cauchy(grad.shape)),
    }
    return {name: [each.astype(np.float32) for each in pair] for name, pair in kinds.items()}


def results(problem: ConvProblem, inputs: list[Tensor], peer: bool) -> dict[str, Tensor]:
    """Compute the output with each algorithm, and with the peer."""
    found: dict[str, Tensor] = {
        "direct": compute(problem, *inputs),
        "winograd": compute(replace(problem, algorithm="winograd"), *inputs),
    }
    if peer:
        from benchmarks.peer import TorchPeer

        torch = TorchPeer(problem, inputs, 1, "wall")
        found["peer"] = torch.result(torch.call())[0]
    return found


def passes(problem: ConvProblem, inputs: list[Tensor], result: Tensor) -> bool:
    """Return the verdict of `verify`."""
    work = plan_verification(problem)
    output, scratch = np.zeros(work.problem.output_shape, np.uint8), np.empty(work.scratch_bytes, np.uint8)
    for unit in work.units:
        run_unit(work, unit, [*inputs, result], output, scratch)
    return bool(read_report(output.tobytes())["passed"])


def measure(problem: ConvProblem, inputs: list[Tensor], peer: bool) -> dict[str, Any]:
    """Return errors and verdict of each result."""
    exact: Array = compute(replace(problem, dtype="f64"), *(each.astype(np.float64) for each in inputs))
    scale, row = np.sqrt(np.mean(exact**2)), {}
    for name, result in results(problem, inputs, peer).items():
        errors = np.abs(result - exact) / scale
        row[name] = {
            "rms": float(np.sqrt(np.mean(errors**2))),
            "max": float(errors.max()),
            "passed": passes(problem, inputs, np.ascontiguousarray(result)),
        }
    return row


def picture(rows: dict[str, dict[str, Any]]) -> str:
    """Return an SVG: for each kind of data a dot at the RMS error and a ring at the largest one of each result."""
    errors = [entry[key] for row in rows.values() for entry in row.values() for key in ("rms", "max")]
    low, high = int(np.floor(log10(min(errors)))), int(np.ceil(log10(max(errors))))
    height = 60 + 3 * LINE * len(rows) // 2

    def at(error: float) -> float:
        return LEFT + (WIDTH - LEFT - 20) * (log10(error) - low) / (high - low)

    shapes = [
        f'<line x1="{at(10.0**power):.0f}" x2="{at(10.0**power):.0f}" y1="34" y2="{height - 20}" stroke="#ddd"/>'
        f'<text x="{at(10.0**power):.0f}" y="{height - 6}" text-anchor="middle">1e{power}</text>'
        for power in range(low, high + 1)
    ]
    for index, (who, colour) in enumerate(COLOURS.items()):
        shapes.append(f'<text x="{LEFT + 90 * index}" y="14" style="fill:{colour}">● {who}</text>')
    shapes.append(f'<text x="{LEFT + 300}" y="14">dot: RMS, ring: largest error</text>')
    for index, (kind, row) in enumerate(rows.items()):
        y = 50 + 3 * LINE * index // 2
        shapes.append(f'<text x="{LEFT - 10}" y="{y + 12}" text-anchor="end">{kind}</text>')
        for line, (who, entry) in enumerate(row.items()):
            for key, fill in (("rms", COLOURS[who]), ("max", "none")):
                circle = f'cx="{at(entry[key]):.1f}" cy="{y + 8 * line}" r="3.5" fill="{fill}" stroke="{COLOURS[who]}"'
                shapes.append(f"<circle {circle}><title>{who}, {key}: {entry[key]:.2e}</title></circle>")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}">'
        "<style>text{font:11px sans-serif;fill:#333}</style>"
        f'<rect width="100%" height="100%" fill="#fff"/>{"".join(shapes)}</svg>\n'
    )


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print a row for each kind of data, and write what is wanted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", choices=get_args(OpName)[:4], default=PROBLEM.op, help="the operation: %(default)s")
    parser.add_argument("--peer", choices=("torch", "none"), default="torch")
    parser.add_argument("--json", type=Path, help="write the errors here")
    parser.add_argument("--picture", type=Path, help="write a picture of the errors here, as SVG")
    options = parser.parse_args(words)
    rows = {}
    problem = replace(PROBLEM, op=options.op)
    for kind, inputs in data(problem).items():
        rows[kind] = measure(problem, inputs, options.peer == "torch")
        listed = (
            f"{who} {entry['rms']:.2e} {entry['max']:.2e} {'passed' if entry['passed'] else 'FAILED'}"
            for who, entry in rows[kind].items()
        )
        print(f"{kind:14} rms, max, verdict: {'   '.join(listed)}", flush=True)
    if options.json:
        options.json.write_text(json.dumps({"machine": describe_machine(), "errors": rows}, indent=1) + "\n")
    if options.picture:
        options.picture.write_text(picture(rows), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
