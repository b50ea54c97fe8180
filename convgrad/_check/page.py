"""The report of a check as one page of HTML that needs no other file."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from convgrad._check.cases import KINDS, Case
from convgrad._check.examine import FAULTS
from convgrad._check.large import SIGNS
from convgrad._check.relations import RELATIONS
from convgrad._check.report import Data, accuracy, counts, declaration, headline, relations, table
from convgrad._report import Report

__all__ = ["page"]

_CELL = 14
_MOST = 420
"""Width and height of a map in pixels, at most."""

_WIDEST = 60
"""Width of the longest bar: percent of its cell, or pixels."""

_SINGLE = 1024
"""Most cells that are drawn one by one; in larger maps neighbours of one colour are one rectangle."""

_AXES = {"channels": "dst channel (down) and src channel (across)"}
"""What the axes of a map are, where its name does not say it."""

_LIMITS = (0, 0.03, 0.3, 1, 30, 1000)
"""The largest share of what is allowed of each colour but the last."""

_LEFT, _BELOW = 30, 16
"""Space for the first and the last index beside a map, and below it."""


def page(data: Data) -> str:
    """Return the page."""
    failed = counts(data)["failed"]
    parts = [*_head(data), *_matrix(data), *_faults(data), *_relations(data), *_accuracy(data), *_named(data)]
    return _PAGE.format(
        title=_text(headline(data)), style=_STYLE, verdict="bad" if failed else "good", body="\n".join(parts)
    )


def _text(value: object) -> str:
    return html.escape(str(value))


def _head(data: Data) -> Iterator[str]:
    counted = counts(data)
    word = "failed" if counted["failed"] else "passed" if counted["passed"] else "nothing checked"
    yield f'<header><p class="verdict">{word}</p><h1>{_text(data["kernel"])}</h1>'
    facts = {
        "cases": f"{sum(counted.values()):,}",
        "failed": f"{counted['failed']:,}",
        "not taken": f"{counted['unsupported']:,}",
        "seconds": f"{data['seconds']:.1f}",
        "restarts": data["restarts"],
        "seed": data["seed"],
        "started": data["started"].replace("T", " ").replace("+00:00", " UTC"),
        "convgrad": data["version"],
    }
    yield "<dl>" + "".join(f"<div><dt>{name}</dt><dd>{_text(value)}</dd></div>" for name, value in facts.items())
    yield f"</dl><p>{_text(declaration(data))}</p></header>"


def _matrix(data: Data) -> Iterator[str]:
    rows, seconds = table(data, "op", "dtype", "kind"), table(data, "op", "dtype")
    kinds = [kind for kind in (*KINDS, SIGNS) if any(key[2] == kind for key in rows)]
    yield '<section><h2>What was run</h2><div class="wide"><table class="matrix"><thead><tr><th>operation</th><th></th>'
    yield "".join(f"<th>{kind}</th>" for kind in kinds) + "<th>seconds</th></tr></thead><tbody>"
    for op, dtype in sorted(seconds):
        cells = "".join(_cell(rows.get((op, dtype, kind))) for kind in kinds)
        name = op.replace("Backward", "<wbr>Backward<wbr>")
        yield f"<tr><th>{name}</th><th>{dtype}</th>{cells}<td>{seconds[op, dtype]['seconds']:.3g}</td></tr>"
    yield "</tbody></table></div><p>Cases that passed; in red those that failed, of all.</p></section>"


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return "<td></td>"
    checked = row["passed"] + row["failed"]
    if not checked:
        return '<td class="none" title="not taken by the kernel">-</td>'
    if row["failed"]:
        return f'<td class="bad">{row["failed"]}/{checked}</td>'
    return f'<td class="good">{row["passed"]}</td>'


def _faults(data: Data) -> Iterator[str]:
    if not data["faults"]:
        return
    yield "<section><h2>What failed</h2><p>Each picture is of the result that shows most. Its colours are the "
    yield f"largest errors as multiples of what is allowed: blue is less, red is more.</p>{_legend()}"
    for number, fault in enumerate(data["faults"], 1):
        yield f"<article><h3>{number}. {_text(_sentence(FAULTS[fault['kind']]))}</h3>"
        yield f'<p class="why">{_text(fault["text"])}</p>'
        first = Case.from_json(fault["first"])
        yield f"<p>{_cases(fault['count'])}. The first is number {first.number} ({_text(first.kind)}; "
        yield f"{_text(first.name)}), found after {fault['after']:.2g} s:<br><code>{_text(first.problem)}</code></p>"
        yield f"<p>It shows most clearly in:<br><code>{_text(Case.from_json(fault['clearest']).problem)}</code></p>"
        yield f"<p>The smallest of {fault['tries'] + 1} tried ({_text(fault['smallest']['kind'])}): "
        yield f"{_text(fault['smallest_text'])}<br><code>{_text(fault['problem'])}</code></p>"
        if report := fault["report"]:
            yield '<div class="maps">' + "".join(_maps(report)) + "</div>"
            yield f"<details><summary>Verdict</summary><pre>{_text(Report(report).text())}</pre></details>"
        yield f"<details><summary>Reproducer</summary><pre>{_text(fault['reproducer'])}</pre></details></article>"
    yield "</section>"


def _cases(count: int) -> str:
    return "1 case" if count == 1 else f"{count:,} cases"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _maps(report: dict[str, Any]) -> Iterator[str]:
    for name, entry in report["maps"].items():
        rows = _plane(entry["values"])
        if len(rows) * len(rows[0]) > 1:
            yield _map(name, rows, entry["shape"])
    yield _histogram(report["ulp"])


def _plane(values: Any) -> list[list[float]]:
    """Return nested lists of any depth as rows; an Inf or NaN, which is a string, is infinite."""
    if not isinstance(values[0], list):
        return [[_number(value) for value in values]]
    if isinstance(values[0][0], list):
        return [row for plane in values for row in _plane(plane)]
    return [[_number(value) for value in row] for row in values]


def _number(value: Any) -> float:
    found = float(value)
    return math.inf if math.isnan(found) else found


def _shade(share: float) -> int:
    """Return the class of a share of what is allowed: 4 and more fail."""
    return 0 if share == 0 else sum(share > limit for limit in _LIMITS)


def _legend() -> str:
    names = ["none", *[f"up to {limit:g}" for limit in _LIMITS[1:]], "more"]
    swatches = [f'<li><svg width="12" height="12"><rect class="s{at}" width="12" height="12"/></svg>{name}</li>'
                for at, name in enumerate(names)]  # fmt: skip
    return f'<ul class="legend">{"".join(swatches)}</ul>'


def _map(name: str, rows: Sequence[Sequence[float]], shape: Sequence[int]) -> str:
    size = max(2, min(_CELL, _MOST // max(len(rows), len(rows[0]))))
    cells, single = [], len(rows) * len(rows[0]) <= _SINGLE
    for y, row in enumerate(rows):
        x = 0
        for (_, shade), run in groupby(enumerate(map(_shade, row)), lambda cell: (cell[0] if single else 0, cell[1])):
            count = len(list(run))
            cells.append(
                f'<rect class="s{shade}" x="{x * size}" y="{y * size}" width="{count * size}" height="{size}"/>'
            )
            x += count
    width, height = len(rows[0]) * size, len(rows) * size
    worst = max(max(row) for row in rows)
    number = f"{worst:,.0f}" if 100 <= worst < 1e6 else f"{worst:.3g}"
    shown = "wrong where every bit counts" if math.isinf(worst) else f"at most {number} times what is allowed"
    planes = f", {shape[0]} planes below each other" if len(shape) == 3 and shape[0] > 1 else ""
    title = f"largest error by {_AXES.get(name, name)}{planes}"
    return (
        f'<figure><svg{" class=cells" * single} viewBox="{-_LEFT} 0 {width + _LEFT} {height + _BELOW}" '
        f'width="{width + _LEFT}" role="img" aria-label="{_text(title)}">{"".join(cells)}'
        f"{''.join(_ends(shape, width, height))}</svg><figcaption>{_text(title)}: {shown}</figcaption></figure>"
    )


def _ends(shape: Sequence[int], width: int, height: int) -> Iterator[str]:
    """Yield the first and the last index of the axes of a map, where there is room for both."""
    down, across = shape[-2] if len(shape) == 2 else 1, shape[-1]
    if down > 1 and height >= 24:
        yield '<text x="-4" y="11" text-anchor="end">0</text>'
        yield f'<text x="-4" y="{height - 2}" text-anchor="end">{down - 1}</text>'
    if across > 1 and width >= 24:
        yield f'<text x="0" y="{height + 12}">0</text>'
        yield f'<text x="{width}" y="{height + 12}" text-anchor="end">{across - 1}</text>'


def _histogram(buckets: Sequence[dict[str, Any]]) -> str:
    """Return bars of the number of elements by their error in ULP, on a logarithmic scale."""
    most = max((math.log1p(row["count"]) for row in buckets), default=1.0)
    bars = []
    for row in buckets:
        name = f"{row['from']}+" if row["to"] is None else f"{row['from']}-{row['to']}"
        name = str(row["from"]) if row["to"] == row["from"] else name
        width = _WIDEST * math.log1p(row["count"]) / most
        bars.append(f'<tr><th>{name}</th><td><i style="width:{width:.0f}%"></i>{row["count"]:,}</td></tr>')
    return (
        f'<figure><table class="bars">{"".join(bars)}</table><figcaption>elements by error in ULP, on a '
        "logarithmic scale</figcaption></figure>"
    )


def _relations(data: Data) -> Iterator[str]:
    found = relations(data)
    if not found:
        return
    yield '<section><h2>Relations between results</h2><div class="wide"><table><tbody>'
    for name, (run, bad) in found.items():
        text = (
            "the same bits when the call is repeated, with the tensors elsewhere and other data in the result's memory"
        )
        if name != "repeat":
            text = f"the right bits when {RELATIONS[name].text}"
        yield f'<tr><th>{_text(text)}</th><td class="{"bad" if bad else "good"}">{run - bad} of {run}</td></tr>'
    yield "</tbody></table></div></section>"


def _accuracy(data: Data) -> Iterator[str]:
    rows = accuracy(data)
    if not rows:
        return
    yield '<section><h2>Errors of the results that passed</h2><div class="wide"><table><thead><tr><th>dtype</th>'
    yield "<th>products in a sum</th><th>cases</th><th>error / naive sum's</th><th>largest</th>"
    yield "<th>error / one rounding's</th><th>largest</th></tr></thead><tbody>"
    most = {name: max(row[name]["median"] for row in rows) for name in ("naive", "best")}
    for row in rows:
        length = f"{row['from']:,} to {row['to']:,}"
        figures = "".join(
            f'<td><i style="width:{_bar(row[name]["median"], most[name]):.0f}px"></i>{row[name]["median"]:.2f}</td>'
            f"<td>{row[name]['max']:.2f}</td>"
            for name in ("naive", "best")
        )
        yield f"<tr><th>{row['dtype']}</th><td>{length}</td><td>{row['cases']}</td>{figures}</tr>"
    yield "</tbody></table></div><p>RMS errors, the median of the cases and the largest, divided by those of two other "
    yield "results: a naive f32 sum, one product after the other, and the exact sum rounded once.</p></section>"


def _bar(value: float, most: float) -> float:
    """Return the pixels of a bar, on a logarithmic scale."""
    return _WIDEST * math.log1p(value) / (math.log1p(most) or 1.0)


def _named(data: Data) -> Iterator[str]:
    rows = {key[0]: row for key, row in table(data, "name").items() if key[0] != "random"}
    if not rows:
        return
    yield '<section><h2>Problems by name</h2><ul class="names">'
    for name, row in sorted(rows.items(), key=lambda pair: (-pair[1]["failed"], pair[0])):
        state = "bad" if row["failed"] else "good" if row["passed"] else "none"
        number = f"{row['failed']}/{row['failed'] + row['passed']}" if row["failed"] else str(row["passed"])
        yield f'<li class="{state}"><span>{_text(name)}</span> {number}</li>'
    yield "</ul></section>"


_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{style}</style>
<body class="{verdict}">
<main>
{body}
</main>
</body>
</html>
"""

_STYLE = """
:root { --page: #fff; --card: #f6f7f9; --ink: #1b1f24; --soft: #5a6472; --line: #dde1e6; --good: #1a7f4b;
  --good-back: #e3f4ea; --bad: #b3261e; --bad-back: #fce8e6; --bar: #9db7d8;
  --s0: #eef0f3; --s1: #4a7fb5; --s2: #8fb4d6; --s3: #d3e2ef; --s4: #f3b39a; --s5: #d9604a; --s6: #a11d1d; }
@media (prefers-color-scheme: dark) { :root { --page: #14171b; --card: #1c2026; --ink: #e6e9ee; --soft: #9aa4b2;
  --line: #323943; --good: #5fd39a; --good-back: #17352a; --bad: #ff8f85; --bad-back: #43201e; --bar: #3d5878;
  --s0: #262b32; --s1: #27527d; --s2: #35689a; --s3: #4d7ca8; --s4: #a8573f; --s5: #d9604a; --s6: #ff8a80; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1100px; margin: 0 auto; padding: 24px 16px 64px; }
h1 { font-size: 1.5rem; margin: .2em 0 .6em; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2em 0 .6em; }
h3 { font-size: 1rem; margin: 0 0 .4em; }
p { color: var(--soft); margin: .5em 0; }
.verdict { display: inline-block; margin: 0; padding: .1em .8em; border-radius: 1em; font-weight: 600;
  background: var(--good-back); color: var(--good); }
.bad .verdict { background: var(--bad-back); color: var(--bad); }
dl { display: flex; flex-wrap: wrap; gap: .4em 2em; margin: 0; }
dt { color: var(--soft); font-size: .8rem; } dd { margin: 0; font-variant-numeric: tabular-nums; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3em .7em; border-bottom: 1px solid var(--line); text-align: left; font-weight: 400; }
thead th { color: var(--soft); font-size: .8rem; white-space: nowrap; }
.matrix td { text-align: right; } .matrix thead th:nth-child(n+3) { text-align: right; }
td.good { color: var(--good); } td.bad { color: var(--bad); background: var(--bad-back); font-weight: 600; }
td.none { color: var(--soft); } td.good, td.bad { white-space: nowrap; }
article { background: var(--card); border: 1px solid var(--line); border-left: 4px solid var(--bad); border-radius: 6px;
  padding: 14px 16px; margin: 0 0 16px; }
.why { color: var(--ink); font-weight: 500; overflow-wrap: anywhere; }
code { font-size: .85rem; overflow-wrap: anywhere; }
pre { overflow-x: auto; font-size: .8rem; background: var(--page); border: 1px solid var(--line); padding: 10px;
  border-radius: 4px; max-height: 30em; }
summary { cursor: pointer; padding: .3em 0; }
.maps { display: flex; flex-wrap: wrap; gap: 20px; align-items: flex-start; }
figure { margin: 8px 0; max-width: 100%; } svg { display: block; max-width: 100%; height: auto; }
figcaption { color: var(--soft); font-size: .8rem; margin-top: 4px; }
.cells rect { stroke: var(--card); stroke-width: 1; }
.s0 { fill: var(--s0); } .s1 { fill: var(--s1); } .s2 { fill: var(--s2); } .s3 { fill: var(--s3); }
svg text { font-size: 11px; fill: var(--soft); }
.legend { display: flex; flex-wrap: wrap; gap: 2px 14px; padding: 0; margin: .3em 0 1em; list-style: none; }
.legend li { color: var(--soft); font-size: .8rem; } .legend svg { display: inline-block; margin-right: 5px; }
.s4 { fill: var(--s4); } .s5 { fill: var(--s5); } .s6 { fill: var(--s6); }
td:has(i) { white-space: nowrap; }
td i { display: inline-block; height: .7em; margin-right: .5em; background: var(--bar); border-radius: 2px;
  min-width: 1px; }
.bars { width: 280px; } .bars th { width: 8em; white-space: nowrap; color: var(--soft); font-size: .8rem; }
.bars th, .bars td { padding: .1em .5em; border: 0; }
@media (max-width: 600px) { th, td { padding: .3em .35em; font-size: .85rem; } }
.names { display: flex; flex-wrap: wrap; gap: 8px; padding: 0; list-style: none; }
.names li { border: 1px solid var(--line); border-radius: 1em; padding: .1em .8em; font-size: .85rem; }
.names .bad { background: var(--bad-back); color: var(--bad); border-color: var(--bad); }
.names .good { color: var(--good); } .names .none { color: var(--soft); } .names span { color: var(--ink); }
"""
