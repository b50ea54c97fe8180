"""The record of `benchmarks.service` as Markdown."""

from __future__ import annotations

from typing import Any

__all__ = ["markdown"]

_BASES = ("hand-written", "PyTriton", "reads the body", "bare kernels")


def markdown(document: dict[str, Any]) -> str:
    """Return a table for each size, then memory, then what was not measured."""
    parts = [_table(name, rows) for name, rows in document["cases"].items()]
    if memory := document["memory"]:
        over = memory["peak_mib"] - memory["idle_mib"] - memory["tensors_mib"]
        parts.append(
            f"Server memory (all processes, shared pages once) in the large run: idle {memory['idle_mib']:.0f} MiB, "
            f"peak {memory['peak_mib']:.0f} MiB; its tensors once are {memory['tensors_mib']:.1f} MiB, "
            f"which leaves {over:.1f} MiB."
        )
    parts += [f"Not measured: {reason}." for reason in document["absent"].values()]
    return "\n\n".join(parts) + "\n"


def _table(case: str, rows: dict[str, Any]) -> str:
    bases = [base for base in _BASES if base in rows]
    titles = [case, "p50 ms", "p99 ms", "min ms", "calls/s (4 callers)", *(f"p50 / {base}" for base in bases)]
    lines = [titles, ["---", *["---:"] * (len(titles) - 1)]]
    for name, row in rows.items():
        rate = "-" if row["per_s"] is None else f"{row['per_s']:,.0f}"
        ratios = [f"{row['p50_ms'] / rows[base]['p50_ms']:.2f}" for base in bases]
        lines.append([name, *(f"{row[key]:.2f}" for key in ("p50_ms", "p99_ms", "min_ms")), rate, *ratios])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
