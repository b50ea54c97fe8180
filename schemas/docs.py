"""Generate the pages of `docs/operations/` and the docstrings of the client, or check that they are up to date.

python -m schemas.docs            write
python -m schemas.docs --check    exit 1 and name the stale files
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from schemas.describe import weights_layouts
from schemas.docstrings import CLIENT, with_attributes
from schemas.examples import call_example
from schemas.rows import DTYPE_NAMES, REFERENCE_DTYPES, AttributeRow, Operation, TensorRow
from schemas.tables import OPERATIONS, find_operation

__all__ = ["main", "pages", "stale"]

_FOLDER = Path(__file__).resolve().parent.parent / "docs" / "operations"
_DRAWINGS = _FOLDER.parent / "drawings.json"
_AXES = {(3, 4, 5): "one, two or three", (2, 3, 4, 5): "up to three", (4, 5): "two or three"}
_EXTRAS = (
    "",
    'A call computes the first one unless `options.outputs` names others, such as `["diff_weights", "diff_bias"]`.',
)
_CONVOLUTIONS = [operation for operation in OPERATIONS if operation.convolves]
_COMMON = [
    row for row in _CONVOLUTIONS[0].attributes if all(row in operation.attributes for operation in _CONVOLUTIONS)
]
"""The attributes that all convolutions have, which the index describes."""
# Characters of code that a screen of 400 pixels shows in a line.
_WIDTH = 40
_NOTICE = "<!-- Made from schemas/tables.py by scripts/docs. Change the table, not this page. -->"


def pages() -> dict[str, str]:
    """Return the text of every page by its file name."""
    return {"README.md": _index(), **{f"{operation.name}.md": _page(operation) for operation in OPERATIONS}}


def stale(folder: Path) -> list[str]:
    """Return the names of the pages in a folder that are missing, out of date, or not of an operation."""
    made = pages()
    there = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.md")}
    return sorted(name for name in made.keys() | there.keys() if made.get(name) != there.get(name))


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check the pages; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m schemas.docs", description="Generate the operations' pages.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a page is out of date")
    parser.add_argument("--folder", type=Path, default=_FOLDER, help="folder of the pages")
    chosen = parser.parse_args(arguments)
    old = stale(chosen.folder)
    source = CLIENT.read_text(encoding="utf-8")
    made = with_attributes(source)
    if chosen.check:
        if made != source:
            sys.stderr.write(f"out of date: {CLIENT} (run scripts/docs)\n")
        for name in old:
            sys.stderr.write(f"out of date: {chosen.folder / name} (run scripts/docs)\n")
        return 1 if old or made != source else 0
    if made != source:
        CLIENT.write_text(made, encoding="utf-8")
    chosen.folder.mkdir(parents=True, exist_ok=True)
    for name in old:
        path = chosen.folder / name
        if name in pages():
            path.write_text(pages()[name], encoding="utf-8")
        else:
            path.unlink()
    return 0


def _index() -> str:
    lines = [
        _NOTICE,
        "",
        "# Operations",
        "",
        "Calls may spell attributes and inputs in either way; a reply uses the spelling that belongs to",
        "the operation's name in the call. Every name may have the suffix `-1`.",
        "",
        *_table(
            ("operation", "also called", "computes"),
            (
                (f"[{row.name}]({row.name}.md)", f"`{row.old_name}`" if row.old_name else "", row.summary)
                for row in OPERATIONS
            ),
        ),
        "",
        f"Tensors are {', '.join(DTYPE_NAMES)}, all of a call the same; also {', '.join(REFERENCE_DTYPES)} with",
        "`options.reference` and in verifications.",
        "",
        "In formulas n is an image, i and o are channels of `src` and `dst` (i_l and o_l within their group), x and y",
        "positions, k a tap of the weights. I and O are the numbers of channels, g is `groups`, X the spatial axes.",
        "",
        "## Attributes of convolutions",
        "",
        *_table(("name", "type and values", "meaning"), map(_attribute, _COMMON)),
        "",
        'Values may also be wrapped as in dumps of oneDNN Graph: `{"type": "s64[]", "value": [2, 2]}`.',
        "",
        "## Layouts of the weights",
        "",
        *_layouts(),
        "",
        "With more than one group both readings of the pages of transposed convolutions are accepted: the shape of the",
        "weights shows which axis is divided, and the reply's `groups_axis` names it.",
    ]
    return "\n".join(lines) + "\n"


def _page(operation: Operation) -> str:
    called = find_operation(operation.name)
    drawing = json.loads(_DRAWINGS.read_text(encoding="utf-8"))[operation.name]
    names = " and ".join(f"`{name}`" for name in operation.names if not name.endswith("-1"))
    lines = [
        _NOTICE,
        "",
        f"# {operation.name}",
        "",
        operation.summary,
        "",
        "```text",
        *_formula(operation.formula),
        "```",
        "",
        f"![{drawing['title']}](../images/drawings/{operation.name}.svg)",
        "",
        f"[In the explorer](http://127.0.0.1:8000/#{drawing['state']}) of a service on this machine.",
        "",
        f"Called as {names}, with {_AXES[operation.ranks]} spatial axes.",
        "Specified in " + " and ".join(f"`{page}`" for page in operation.pages) + ".",
        "",
        "## Attributes",
        "",
        *_attributes(operation),
        "",
        "## Inputs",
        "",
        "In the order of their indices:",
        "",
        *_table(("name", "required", "meaning"), map(_input, operation.inputs)),
        "",
        "## Outputs" if operation.extras else "## Output",
        "",
        *_table(("name", "meaning"), ((_spellings(row), row.doc) for row in operation.outputs)),
        *(_EXTRAS if operation.extras else ()),
        "",
        "## Example",
        "",
        f"The body of `POST /v1/ops/{operation.name}`, or `params` in JSON-RPC:",
        "",
        "```json",
        *_json(call_example(called)),
        "```",
    ]
    return "\n".join(lines) + "\n"


def _formula(formula: str) -> Iterator[str]:
    """Yield a formula in short lines, broken between its terms but not within their indices."""
    unbroken = re.sub(r"\[[^]]*\]", lambda index: index[0].replace(" ", "\0"), formula)
    whole, *definitions = re.split(r", where | and (?=\w+ (?:=|is) )", unbroken)
    parts = [whole] if len(whole) <= _WIDTH else [whole.replace(" = ", " =\n  ")]
    for part in "\n".join([*parts, *(f"  where {each}" for each in definitions)]).splitlines():
        lines = textwrap.wrap(part, _WIDTH, subsequent_indent="    ")
        yield from (line.replace("\0", " ") for line in lines)


def _json(value: dict[str, dict[str, object]]) -> Iterator[str]:
    """Yield an object with one line for each member of its members."""
    lines = {
        part: ",\n".join(f'    "{name}": {json.dumps(each, separators=(",", ": "))}' for name, each in members.items())
        for part, members in value.items()
    }
    yield "{"
    yield ",\n".join(f'  "{part}": {{\n{members}\n  }}' for part, members in lines.items())
    yield "}"


def _table(head: Sequence[str], rows: Iterator[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield "| " + " | ".join(row) + " |"


def _spellings(row: AttributeRow | TensorRow) -> str:
    return f"`{row.name}`" + (f" (`{row.old_name}`)" if row.old_name else "")


def _names(rows: Sequence[AttributeRow]) -> str:
    return ", ".join(f"`{row.name}`" for row in rows)


def _attributes(operation: Operation) -> Iterator[str]:
    own = operation.attributes
    if operation.convolves:
        yield f"[Those of all convolutions](README.md#attributes-of-convolutions): {_names(_COMMON)}."
        yield "Its own, with the [layouts of the weights](README.md#layouts-of-the-weights):"
        yield ""
        own = tuple(row for row in own if row not in _COMMON)
    yield from _table(("name", "type and values", "meaning"), map(_attribute, own))


def _attribute(row: AttributeRow) -> tuple[str, ...]:
    facts: list[str] = [row.kind]
    if row.required != "no":
        facts.append("required" if row.required == "yes" else f"required {row.required}")
    if row.default is not None:
        facts.append(f"default `{row.default}`")
    if row.old_default is not None:
        facts[-1] += f" (`{row.old_default}` under an old name)"
    if row.choices:
        facts.append(f"one of {', '.join(f'`{value}`' for value in row.choices)}")
    if row.minimum is not None:
        facts.append(f"at least {row.minimum}")
    return _spellings(row), "; ".join(facts), row.doc


def _input(row: TensorRow) -> tuple[str, ...]:
    required = "yes" if row.required else "no" if row.only_for is None else f"for `{row.only_for}`"
    return _spellings(row), required, row.doc


def _layouts() -> Iterator[str]:
    straight, transposed = (weights_layouts(find_operation(name)) for name in ("Convolution", "ConvTranspose"))
    head = ("format", "convolution", *(f"transposed, `groups_axis` {axis}" for axis in transposed["XIO"]))
    yield from _table(
        head,
        (
            (f"`{name}`", *(f"`{shape}`" for shape in (*straight[name].values(), *transposed[name].values())))
            for name in straight
        ),
    )


if __name__ == "__main__":
    raise SystemExit(main())
