"""A page with the ratios of all measurements of `benchmarks.kernels`, and a picture of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from math import log2
from pathlib import Path
from typing import Any

from benchmarks.summary import geometric_mean, label

__all__ = ["picture", "write_page"]

Record = dict[str, Any]
LEFT, LINE, WIDTH = 330, 18, 900
LEAST, MOST = -3, 3
"""Powers of two at the ends of the scale; what is beyond them is drawn there."""


def write_page(records: Sequence[Record], path: Path) -> None:
    """Write a Markdown page, and the picture beside it: a table of measurements, then all layers below 0.95."""
    image = path.with_suffix(".svg")
    image.write_text(picture(records), encoding="utf-8")
    text = [
        "# The kernels against oneDNN",
        f"The peer's time over ours, each in its better layout. {_where(records[0])}",
        f"![A dot for each layer, by operation, dtype and threads]({image.name})",
        "| operation, dtype, threads | layers | geometric mean | least | below 0.95 | NCX / NXC |\n"
        "| --- | ---: | ---: | ---: | ---: | ---: |\n" + "\n".join(_lines(records)),
        "Layers below 0.95:",
        "| operation, dtype, threads | layer | ratio | ours ms | peer ms |\n| --- | --- | ---: | ---: | ---: |\n"
        + "\n".join(_slow(records)),
    ]
    path.write_text("\n\n".join(text) + "\n", encoding="utf-8")


def _where(record: Record) -> str:
    machine, settings = record["machine"], record["settings"]
    cpu, versions = machine["cpu"], machine["versions"]
    return (
        f"Processor: {cpu['processors']} of {cpu['model']} ({cpu['llvm_name']}, code path `{cpu['code_path']}`);"
        f" PyTorch {versions.get('torch', '-')}, Numba {versions['numba']}; {machine['date'][:10]}. Layers have at most"
        f" {settings['gmac'] or 'any'} GMAC, or one image; {settings['runs']} samples in turn, {settings['clock']}"
        " clock. In a depthwise layer each group has one src channel."
    )


def _parts(records: Sequence[Record]) -> Iterator[tuple[str, list[Record]]]:
    """Yield a title and layers, slowest first, for each operation and measurement, depthwise layers separately."""
    for op in dict.fromkeys(row["op"] for record in records for row in record["layers"]):
        for record in records:
            settings = record["settings"]
            for depthwise in (False, True):
                rows = [
                    row
                    for row in record["layers"]
                    if row["op"] == op and "ratio" in row and depthwise == (row["groups"] == row["src_channels"] > 1)
                ]
                name = f"{op}{', depthwise' if depthwise else ''}, {settings['dtype']}, {settings['threads']}"
                if rows:
                    yield name, sorted(rows, key=lambda row: float(row["ratio"]))


def _lines(records: Sequence[Record]) -> Iterator[str]:
    for name, rows in _parts(records):
        ratios = [row["ratio"] for row in rows]
        layouts = geometric_mean(row["ratios"]["NXC"] / row["ratios"]["NCX"] for row in rows)
        below = sum(ratio < 0.95 for ratio in ratios)
        yield f"| {name} | {len(rows)} | {geometric_mean(ratios):.2f} | {ratios[0]:.2f} | {below} | {layouts:.2f} |"


def _slow(records: Sequence[Record]) -> Iterator[str]:
    for name, rows in _parts(records):
        for row in rows:
            if row["ratio"] < 0.95:
                times = (1e3 * row[who][row["best"][who]]["median_s"] for who in ("ours", "peer"))
                yield f"| {name} | {row['name']} | {row['ratio']:.2f} | {' | '.join(f'{ms:.3f}' for ms in times)} |"


def picture(records: Sequence[Record]) -> str:
    """Return an SVG: a line for each measurement, a dot for each layer at its ratio, a bar at the geometric mean."""
    parts = list(_parts(records))
    height = LINE * len(parts) + 50

    def at(ratio: float) -> float:
        power = min(MOST, max(LEAST, log2(ratio)))
        return LEFT + (WIDTH - LEFT - 20) * (power - LEAST) / (MOST - LEAST)

    shapes = []
    for power in range(LEAST, MOST + 1):
        x, colour = at(2.0**power), "#333" if power == 0 else "#ddd"
        shapes += [
            f'<line x1="{x:.0f}" x2="{x:.0f}" y1="24" y2="{height - 22}" stroke="{colour}"/>',
            f'<text x="{x:.0f}" y="{height - 8}" text-anchor="middle">{2.0**power:g}</text>',
        ]
    for index, (name, rows) in enumerate(parts):
        y = 34 + LINE * index
        shapes.append(f'<text x="{LEFT - 10}" y="{y + 4}" text-anchor="end">{escape(name)}</text>')
        for row in rows:
            title = escape(f"{label(row)} {row['ratio']:.2f}")
            shapes.append(f'<circle cx="{at(row["ratio"]):.1f}" cy="{y}" r="3"><title>{title}</title></circle>')
        mean = at(geometric_mean(row["ratio"] for row in rows))
        shapes.append(f'<rect x="{mean - 1.5:.1f}" y="{y - 7}" width="3" height="14" fill="#d9822b"/>')
    style = "text{font:11px sans-serif;fill:#333}circle{fill:#0b6e99;fill-opacity:.55}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}">'
        f'<style>{style}</style><rect width="100%" height="100%" fill="#fff"/>'
        f'<text x="{LEFT}" y="14">the peer\'s time over ours: right of 1 ours is faster; bar: geometric mean</text>'
        f"{''.join(shapes)}</svg>\n"
    )
