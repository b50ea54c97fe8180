"""Speed and accuracy of the kernels, layer by layer, against oneDNN as PyTorch ships it.

    python -m benchmarks.kernels --dtype f32 --threads 1 --json OUT.json
    python -m benchmarks.kernels --all --json OUT.json --page OUT.md
    python -m benchmarks.kernels --algorithm winograd --dtype f32,f16 --threads 1,2 --json OUT.json

Every layer is computed in both layouts by both, alternately in one run, in memory that the process keeps. The ratio is
that of the peer's time to ours, each in its better layout. With another algorithm than direct sums, these are timed
beside it, on the layers of shapes_3x3.json. See benchmarks/README.md for what the figures mean.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from itertools import product
from math import inf
from pathlib import Path
from typing import Any, get_args

from benchmarks.contenders import CLOCKS
from benchmarks.layers import OPERATIONS, Layer, read_layers
from benchmarks.limit import measure_limit
from benchmarks.machine import describe_machine, load
from benchmarks.measure import Settings, measure
from benchmarks.memory import keep_memory
from benchmarks.summary import summarise, summary_lines
from kernels import warmup
from kernels.problem import Algorithm

SHAPES = Path(__file__).parent / "shapes.json"
SHAPES_3X3 = Path(__file__).parent / "shapes_3x3.json"
DTYPES = ("f32", "bf16", "f16")

ALL = (
    "--ops", ",".join(OPERATIONS), "--dtype", ",".join(DTYPES), "--threads", "1,2",
    "--gmac", "0.1", "--runs", "5", "--budget", "0.4",
)  # fmt: skip
"""Arguments of `--all`: every operation, dtype and number of threads, on small batches."""


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--shapes", type=Path, help="layers, in the format of benchmarks/shapes.json, the default for direct sums")
    add("--algorithm", choices=get_args(Algorithm), default="direct", help="ours (default direct)")
    add("--dtype", default="f32", help="f32, bf16, f16, or several separated by commas (default f32)")
    add("--threads", default="1", help="threads, of ours and of the peer; several separated by commas (default 1)")
    add(
        "--all",
        action="store_true",
        help=f"{' '.join(ALL)}; what is given beside it wins",
    )
    add("--peer", choices=("torch", "none"), default="torch")
    add("--json", type=Path, help="write all results here, updated after each layer")
    add("--plot", type=Path, help="write a PNG: share of the processor's limit, layer by layer (one dtype, one count)")
    add("--page", type=Path, help="write a Markdown page: all ratios, and beside it a picture of them (.svg)")
    add("--only", action="append", default=[], metavar="TEXT", help="only layers whose name contains TEXT (repeatable)")
    add("--ops", default=",".join(OPERATIONS[:2]), help="operations, separated by commas (default: %(default)s)")
    add("--gmac", type=float, default=inf, help="reduce the batch to at most this work a layer, or to one image")
    add("--runs", type=int, default=9, help="samples per layer and layout (default 9)")
    add("--budget", type=float, default=60, help="seconds per layer; slower calls run once (default 60)")
    add("--clock", choices=tuple(CLOCKS), default="wall", help="cpu: the clock of the thread, for --threads 1 only")
    words = sys.argv[1:] if words is None else words
    chosen = parser.parse_args([*(ALL if "--all" in words else ()), *words])
    chosen.shapes = chosen.shapes or (SHAPES if chosen.algorithm == "direct" else SHAPES_3X3)
    for name, known in (("ops", OPERATIONS), ("dtype", DTYPES)):
        value = getattr(chosen, name).split(",")
        if unknown := set(value) - set(known):
            parser.error(f"--{name}: {', '.join(sorted(unknown))} not among {', '.join(known)}")
        setattr(chosen, name, value)
    try:
        chosen.threads = [int(count) for count in chosen.threads.split(",")]
    except ValueError:
        parser.error(f"--threads: {chosen.threads!r} is no list of numbers")
    if chosen.clock == "cpu" and chosen.threads != [1]:
        parser.error("--clock cpu reads one thread's clock: it needs --threads 1")
    if min(chosen.threads) < 1 or chosen.runs < 1:
        parser.error("--threads and --runs are at least 1")
    if chosen.plot and len(chosen.threads) * len(chosen.dtype) > 1:
        parser.error("--plot draws one dtype and one number of threads; --page draws all")
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
    if "direct" in row["best"]:
        direct = row["direct"][row["best"]["direct"]]
        text += f"   direct {1e3 * direct['median_s']:9.3f} ms ratio {row['ratio_direct']:6.2f}"
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
        layers = read_layers(chosen.shapes, chosen.ops, chosen.only, chosen.gmac)
    except (OSError, ValueError, KeyError) as error:
        print(f"--shapes {chosen.shapes}: {error!r}", file=sys.stderr)
        return 2
    if not layers:
        print("no layer is left to measure", file=sys.stderr)
        return 2
    keep_memory()
    for done, total in warmup():
        show(f"compiling or loading the kernels: {done} of {total}", last=False)
    records: list[dict[str, Any]] = []
    for threads, dtype in product(chosen.threads, chosen.dtype):
        limit = measure_limit(threads)
        show(f"{dtype}, threads {threads}, limit {limit['gflops']:.1f} GFLOP/s (f32), load {load()}")
        settings = Settings(
            dtype, threads, chosen.peer, chosen.runs, chosen.budget, chosen.clock, limit["gflops"], chosen.algorithm
        )
        records.append(_record(chosen, settings, limit))
        run(layers, settings, records, chosen.json)
        for text in summary_lines(records[-1]["summary"]):
            print(text)
    if chosen.plot:
        from benchmarks.plot import plot

        plot(records[0], chosen.plot)
    if chosen.page:
        from benchmarks.ratios import write_page

        write_page(records, chosen.page)
    return 0 if all(row["right"] for record in records for row in record["layers"]) else 1


def _record(chosen: argparse.Namespace, settings: Settings, limit: dict[str, float]) -> dict[str, Any]:
    """Return the record of a measurement that begins."""
    return {
        "benchmark": "kernels",
        "settings": {
            "shapes": chosen.shapes.name,
            "ops": chosen.ops,
            "only": chosen.only,
            "gmac": None if chosen.gmac == inf else chosen.gmac,
            "dtype": settings.dtype,
            "algorithm": settings.algorithm,
            "threads": settings.threads,
            "peer": settings.peer,
            "runs": settings.runs,
            "budget_s": settings.budget,
            "clock": settings.clock,
        },
        "machine": describe_machine(),
        "limit": limit,
        "load_before": load(),
        "layers": [],
    }


def run(layers: list[Layer], settings: Settings, records: list[dict[str, Any]], out: Path | None) -> None:
    """Measure layer by layer into the last record, and write all after each, so that a long run may be interrupted."""
    begin, document = time.monotonic(), records[-1]
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
            out.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
