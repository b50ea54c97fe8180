"""Speed and accuracy of the kernels, layer by layer, against oneDNN as PyTorch ships it.

    python -m benchmarks.kernels --shapes benchmarks/shapes.json --dtype f32 --threads 1 --peer torch --json OUT

Every layer is computed in both layouts by both, alternately in one run, each call into new memory. The ratio is
that of the peer's time to ours, each in its better layout. See benchmarks/README.md for what the figures mean.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.contenders import CLOCKS
from benchmarks.layers import OPERATIONS, Layer, read_layers
from benchmarks.limit import measure_limit
from benchmarks.machine import describe_machine, load
from benchmarks.measure import Settings, measure
from benchmarks.summary import summarise, summary_lines
from kernels import warmup

SHAPES = Path(__file__).parent / "shapes.json"


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--shapes", type=Path, default=SHAPES, help="layers, in the format of benchmarks/shapes.json")
    add("--dtype", choices=("f32", "bf16", "f16"), default="f32")
    add("--threads", type=int, default=1, help="threads, of ours and of the peer (default 1)")
    add("--peer", choices=("torch", "none"), default="torch")
    add("--json", type=Path, help="write all results here, updated after each layer")
    add("--plot", type=Path, help="write a PNG: share of the processor's limit, layer by layer")
    add("--only", action="append", default=[], metavar="TEXT", help="only layers whose name contains TEXT (repeatable)")
    add("--ops", default=",".join(OPERATIONS[:2]), help="operations, separated by commas (default: %(default)s)")
    add("--runs", type=int, default=9, help="samples per layer and layout (default 9)")
    add("--budget", type=float, default=60, help="seconds per layer; slower calls run once (default 60)")
    add("--clock", choices=tuple(CLOCKS), default="wall", help="cpu: the clock of the thread, for --threads 1 only")
    chosen = parser.parse_args(words)
    unknown = set(chosen.ops.split(",")) - set(OPERATIONS)
    if unknown:
        parser.error(f"--ops: {', '.join(sorted(unknown))} not among {', '.join(OPERATIONS)}")
    if chosen.clock == "cpu" and chosen.threads != 1:
        parser.error("--clock cpu reads one thread's clock: it needs --threads 1")
    if chosen.threads < 1 or chosen.runs < 1:
        parser.error("--threads and --runs are at least 1")
    return chosen


def show(text: str, *, last: bool = True) -> None:
    """Print a progress line; on a terminal the next one overwrites it unless it is `last`."""
    if last:
        print(f"\r{text:<78}" if sys.stdout.isatty() else text, flush=True)
    elif sys.stdout.isatty():
        print(f"\r{text:<78.78}", end="", flush=True)


def line(row: dict[str, Any]) -> str:
    """Return the result of one layer as a line of text."""
    ours = row["ours"][row["best"]["ours"]]
    text = f"ours {1e3 * ours['median_s']:9.3f} ms {ours['gflops']:7.1f} GFLOP/s {100 * ours['share']:5.1f} %"
    if "peer" not in row["best"]:
        return text + "".join(f"  peer: {each.get('error')}" for each in list(row["peer"].values())[:1])
    peer = row["peer"][row["best"]["peer"]]
    text += f"   peer {1e3 * peer['median_s']:9.3f} ms {peer['gflops']:7.1f}   ratio {row['ratio']:6.2f}"
    verdict = "" if row["agree"] else "   the peer's result is far from float64"
    return text + (verdict if row["right"] else "   OUR RESULT IS WRONG")


def main(words: Sequence[str] | None = None) -> int:
    """Measure the chosen layers; return 1 if one of our results is wrong."""
    chosen = arguments(words)
    try:
        layers = read_layers(chosen.shapes, chosen.ops.split(","), chosen.only)
    except (OSError, ValueError, KeyError) as error:
        print(f"--shapes {chosen.shapes}: {error!r}", file=sys.stderr)
        return 2
    if not layers:
        print("no layer is left to measure", file=sys.stderr)
        return 2
    for done, total in warmup():
        show(f"compiling or loading the kernels: {done} of {total}", last=False)
    limit = measure_limit(chosen.threads)
    show(f"{chosen.dtype}, threads {chosen.threads}, limit {limit['gflops']:.1f} GFLOP/s (f32), load {load()}")
    document: dict[str, Any] = {
        "benchmark": "kernels",
        "settings": {
            "shapes": chosen.shapes.name,
            "ops": chosen.ops.split(","),
            "only": chosen.only,
            "dtype": chosen.dtype,
            "threads": chosen.threads,
            "peer": chosen.peer,
            "runs": chosen.runs,
            "budget_s": chosen.budget,
            "clock": chosen.clock,
        },
        "machine": describe_machine(),
        "limit": limit,
        "load_before": load(),
        "layers": [],
    }
    settings = Settings(
        chosen.dtype, chosen.threads, chosen.peer, chosen.runs, chosen.budget, chosen.clock, limit["gflops"]
    )
    run(layers, settings, document, chosen.json)
    for text in summary_lines(document["summary"]):
        print(text)
    if chosen.plot:
        from benchmarks.plot import plot

        plot(document, chosen.plot)
    return 0 if all(row["right"] for row in document["layers"]) else 1


def run(layers: list[Layer], settings: Settings, document: dict[str, Any], out: Path | None) -> None:
    """Measure layer by layer into `document`, and write it after each, so that a long run may be interrupted."""
    begin = time.monotonic()
    width = max(len(layer.name) for layer in layers)
    for index, layer in enumerate(layers):
        left = (time.monotonic() - begin) / index * (len(layers) - index) if index else 0.0
        place = f"[{index + 1:>{len(str(len(layers)))}}/{len(layers)}]"
        show(f"{place} {layer.name} ({layer.op}), about {left / 60:.0f} min left", last=False)
        row = measure(layer, settings)
        document["layers"].append(row)
        show(f"{place} {layer.name:<{width}} {line(row)}")
        document["summary"] = summarise(document["layers"])
        document["load_after"] = load()
        if out:
            out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
