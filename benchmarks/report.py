"""Turn the records of `benchmarks.kernels` into Markdown.

    python -m benchmarks.report OUT.json [MORE.json ..] [--into benchmarks/README.md] [--layers FILE.csv]

The section goes to standard output or, with --into, between the two marker lines of that file; with --layers a table of
all layers and measurements goes to a file.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.summary import QUIET, better, geometric_mean

__all__ = ["BEGIN", "END", "insert", "layers", "section"]

BEGIN = "<!-- begin: written by python -m benchmarks.report -->"
END = "<!-- end -->"

WORKERS_GMAC = 0.2
"""The least work per layer for comparing several threads with one."""

LESS_EXACT = 1.001
"""The least ratio of our error to the peer's that is reported."""

Record = dict[str, Any]


def section(records: Sequence[Record]) -> str:
    """Return the whole section: the machines, then a line and a note for each measurement."""
    parts = [*_machines(records), _overview(records), "\n".join(_comparisons(records)), "\n".join(_notes(records))]
    return "\n\n".join(part for part in parts if part) + "\n"


def layers(records: Sequence[Record]) -> Iterator[list[str]]:
    """Yield the rows of the table of layers, the first with the names of the columns; the peer's may be empty."""
    yield ["layer", "op", "dtype", "threads", "gmac", "ours_ms", "peer_ms", "ratio", "ours_error", "peer_error"]
    for record in records:
        settings = record["settings"]
        for row in record["layers"]:
            sides = [better(row, side) if side == "ours" or "ratio" in row else None for side in ("ours", "peer")]
            times = [f"{1e3 * side['median_s']:.3f}" if side else "" for side in sides]
            errors = [f"{side['error_f64']['rms']:.2e}" if side else "" for side in sides]
            ratio = f"{row['ratio']:.2f}" if "ratio" in row else ""
            settled = [row["name"], row["op"], settings["dtype"], str(settings["threads"]), f"{row['gmac']:.3g}"]
            yield [*settled, *times, ratio, *errors]


def insert(text: str, into: str) -> str:
    """Return `into` with the text between its markers replaced by `text`. Raises ValueError if they are missing."""
    before, begin, rest = into.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"there are no marker lines {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n\n{text}\n{END}{after}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table with every column but the first aligned right."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def _title(record: Record) -> str:
    settings = record["settings"]
    threads = f"{settings['threads']} thread{'s' if settings['threads'] > 1 else ''}"
    return f"{settings['dtype']}, {threads}: {', '.join(_ops(record))}"


def _ops(record: Record) -> tuple[str, ...]:
    return tuple(dict.fromkeys(row["op"] for row in record["layers"]))


def _machines(records: Sequence[Record]) -> Iterator[str]:
    """Yield each processor and set of versions once, with the limits measured on it."""
    seen: dict[str, list[str]] = {}
    for record in records:
        cpu, versions = record["machine"]["cpu"], record["machine"]["versions"]
        text = (
            f"{cpu['model']} ({cpu['llvm_name']}, {cpu['processors']} processors, code path `{cpu['code_path']}`),"
            f" {', '.join(f'{name} {number}' for name, number in versions.items())}."
            f" Features: {', '.join(_notable(cpu['features']))}."
        )
        when = record["machine"]["date"][:10]
        limit = f"{record['limit']['gflops']:.0f} GFLOP/s with {record['settings']['threads']} (on {when})"
        seen.setdefault(text, []).append(limit)
    for text, limits in seen.items():
        yield f"{text} Measured f32 limit by threads: {', '.join(dict.fromkeys(limits))}."


def _notable(features: Sequence[str]) -> list[str]:
    """Return the processor's features that affect how fast a convolution can be."""
    return [name for name in features if name.startswith(("avx", "amx", "fma", "f16c", "neon", "sve", "bf16"))]


def _overview(records: Sequence[Record]) -> str:
    head = (
        "measurement",
        "layers",
        "ours GFLOP/s",
        "peer GFLOP/s",
        "ratio",
        "NCX",
        "NXC",
        "minimum",
        "below 1",
        "large",
    )
    rows = []
    for record in records:
        total = record["summary"]["all"]
        row = [_title(record), f"{total['layers']}", f"{total['ours_gflops']:.1f}"]
        if total["compared"]:
            row += [f"{total['peer_gflops']:.1f}", f"**{total['geometric_mean']:.2f}**"]
            row += [f"{total[f'geometric_mean_{layout}']:.2f}" for layout in ("NCX", "NXC")]
            row += [f"{total['minimum']:.2f}", f"{len(total['slower'])}"]
        else:
            row += ["", "", "", "", "", ""]
        large = total["large"]
        share = f"{100 * large['mean']:.0f} % (least {100 * large['worst'][1]:.0f} %)" if large["layers"] else ""
        rows.append([*row, share])
    return _table(head, rows)


def _comparisons(records: Sequence[Record]) -> Iterator[str]:
    """Yield comparisons of our own times: several threads with one, 16-bit types with f32, on their common layers."""
    found: dict[tuple[str, int], dict[tuple[str, str], tuple[float, float]]] = {}
    for record in records:
        times = {(row["name"], row["op"]): (better(row, "ours")["median_s"], row["gmac"]) for row in record["layers"]}
        key = (record["settings"]["dtype"], record["settings"]["threads"])
        found[key] = found.get(key, {}) | times
    for (dtype, threads), times in found.items():
        for base, least, words in (
            ((dtype, 1), WORKERS_GMAC, f"{threads} threads over one"),
            (("f32", threads), 0.0, f"{dtype} over f32"),
        ):
            if base == (dtype, threads):
                continue
            pairs = [found[base][key][0] / times[key][0] for key in times.keys() & found.get(base, {}).keys()
                     if times[key][1] > least]  # fmt: skip
            if pairs:
                scope = f" of more than {least} GMAC" if least else ""
                mean = f"{geometric_mean(pairs):.2f} (geometric mean of {len(pairs)} layers{scope})"
                yield f"* Ours, {dtype} with {threads}, {words}: {mean}, least {min(pairs):.2f}."


def _notes(records: Sequence[Record]) -> Iterator[str]:
    """Yield what to know of the measurements: samples, scratch memory, and of each what is unusual."""
    samples = {f"{record['settings']['runs']} ({record['settings']['clock']} clock)": None for record in records}
    yield f"* Medians of at most so many samples: {', '.join(samples)}."
    peaks = [peak for record in records for peak in record["summary"]["all"]["scratch"].values()]
    if peaks:
        own, shared = (max(peak[name] for peak in peaks) / 2**20 for name in ("worker_bytes", "shared_bytes"))
        yield f"* Peak scratch: {own:.1f} MiB a worker, {shared:.1f} MiB shared by all."
    for record in records:
        if unusual := " ".join(_unusual(record)):
            yield f"* {_title(record)}: {unusual}"


def _unusual(record: Record) -> Iterator[str]:
    total = record["summary"]["all"]
    less = [f"{name} {ratio:.3f} times" for name, ratio in total.get("less_exact", ()) if ratio >= LESS_EXACT]
    if less:
        yield f"RMS error above the peer's: {', '.join(less)}."
    if total["others_busy"] > QUIET:
        yield f"**Not a quiet hour**: others kept up to {total['others_busy']:.1f} processors busy."
    for kind, word in (("wrong", "Wrong results"), ("differ", "Results that differ from the peer's")):
        if total[kind]:
            yield f"**{word}**: {', '.join(total[kind])}."


def main(words: Sequence[str] | None = None) -> int:
    """Print the section, or write it into a file; return 2 if there is nothing to read or no place to write to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, nargs="+", help="what benchmarks.kernels wrote with --json")
    parser.add_argument("--layers", type=Path, help="write the times of all layers to this CSV file")
    parser.add_argument("--into", type=Path, help="replace the section between the markers of this file")
    chosen = parser.parse_args(words)
    try:
        records = [record for path in chosen.records for record in json.loads(path.read_text(encoding="utf-8"))]
        text = section(records)
        if chosen.layers is not None:
            with chosen.layers.open("w", encoding="utf-8", newline="") as file:
                csv.writer(file, lineterminator="\n").writerows(layers(records))
        if chosen.into is None:
            sys.stdout.write(text)
        else:
            chosen.into.write_text(insert(text, chosen.into.read_text(encoding="utf-8")), encoding="utf-8")
    except (OSError, ValueError, KeyError) as error:
        print(f"no report: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
