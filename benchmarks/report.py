"""Turn the records of `benchmarks.kernels` into Markdown.

    python -m benchmarks.report OUT.json [MORE.json ..] [--into benchmarks/README.md]

The section goes to standard output or, with --into, between the two marker lines of that file.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.summary import QUIET, better, geometric_mean, label

__all__ = ["BEGIN", "END", "insert", "section"]

BEGIN = "<!-- begin: written by python -m benchmarks.report -->"
END = "<!-- end -->"

WORKERS_GMAC = 0.2
"""The least work per layer for comparing several threads with one."""

Record = dict[str, Any]


def section(records: Sequence[Record]) -> str:
    """Return the whole section: the machines, a line for each measurement, then a table of layers for each."""
    parts = [*_machines(records), _overview(records), *_comparisons(records)]
    for record in records:
        parts += [f"### {_title(record)}", *_details(record)]
    return "\n\n".join(parts) + "\n"


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
    ops = ", ".join(dict.fromkeys(row["op"] for row in record["layers"]))
    return f"{settings['dtype']}, {threads}: {ops}"


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
                yield f"Ours, {dtype} with {threads}, {words}: {mean}, least {min(pairs):.2f}."


def _details(record: Record) -> Iterator[str]:
    total, settings = record["summary"]["all"], record["settings"]
    if total["compared"]:
        worst = ", ".join(f"{name} {ratio:.2f}" for name, ratio in total["worst"])
        less = ", ".join(f"{name} {ratio:.3f} times" for name, ratio in total["less_exact"])
        yield f"Five worst: {worst}. RMS error against float64 above the peer's: {less or 'nowhere'}."
    for name, peak in total["scratch"].items():
        own, shared = peak["worker_bytes"] / 2**20, peak["shared_bytes"] / 2**20
        yield f"Peak scratch of `{name}`: {own:.1f} MiB a worker, {shared:.1f} MiB shared by all."
    notes = [f"Median of up to {settings['runs']} samples in turn, {settings['clock']} clock."]
    if total["others_busy"] > QUIET:
        notes.append(f"**Not a quiet hour**: others kept up to {total['others_busy']:.1f} processors busy.")
    for kind, word in (("wrong", "Wrong results"), ("differ", "Results that differ from the peer's")):
        if total[kind]:
            notes.append(f"**{word}**: {', '.join(total[kind])}.")
    yield " ".join(notes)
    head = ("layer", "GMAC", "ours ms", "peer ms", "ours GFLOP/s", "peer GFLOP/s", "ours %", "peer %", "ratio")
    yield _table((*head, "ours error", "peer error"), [_row(row) for row in record["layers"]])


def _row(row: Record) -> list[str]:
    ours = better(row, "ours")
    pairs = [ours]
    if "ratio" in row:
        pairs.append(better(row, "peer"))
    names = [row["best"][who] for who in ("ours", "peer")[: len(pairs)]]
    columns = (
        [f"{1e3 * each['median_s']:.3f} {name}" for each, name in zip(pairs, names, strict=True)],
        [f"{each['gflops']:.1f}" for each in pairs],
        [f"{100 * each['share']:.1f}" for each in pairs],
        [f"{each['error_f64']['rms']:.2e}" for each in pairs],
    )
    missing = next((entry["error"] for entry in row["peer"].values() if "error" in entry), "")
    times, rates, shares, errors = ([*cells, ""][:2] for cells in columns)
    if "ratio" not in row:
        times[1] = missing
    ratio = f"{row['ratio']:.2f}" if "ratio" in row else ""
    return [label(row), f"{row['gmac']:.3g}", *times, *rates, *shares, ratio, *errors]


def main(words: Sequence[str] | None = None) -> int:
    """Print the section, or write it into a file; return 2 if there is nothing to read or no place to write to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, nargs="+", help="what benchmarks.kernels wrote with --json")
    parser.add_argument("--into", type=Path, help="replace the section between the markers of this file")
    chosen = parser.parse_args(words)
    try:
        text = section([record for path in chosen.records for record in json.loads(path.read_text(encoding="utf-8"))])
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
