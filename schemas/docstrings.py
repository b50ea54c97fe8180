"""The attributes in the docstrings of the client's methods, made from the tables: the client can't import them."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from pathlib import Path

from schemas.rows import AttributeRow, Operation
from schemas.tables import OPERATIONS

__all__ = ["CLIENT", "with_attributes"]

CLIENT = Path(__file__).resolve().parent.parent / "convgrad" / "_operations.py"

_HEAD = "Attributes (defaults in brackets):"
# The methods have one parameter where a call may give a shape as an attribute and as an input.
_INPUT = (" The input of the same name takes precedence. When both are absent the", " Without it the")
_INDENT = " " * 8
_WIDTH = 120


def with_attributes(source: str) -> str:
    """Return the source of the client's operations with the list of attributes in the docstring of each method."""
    lines = source.splitlines()
    methods = {operation.snake_name: operation for operation in OPERATIONS}
    # From the last one up, so that the line numbers of the others stay right.
    for node in reversed([node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]):
        if node.name in methods:
            text = node.body[0]
            assert isinstance(text, ast.Expr)
            assert text.end_lineno is not None
            made = _docstring(lines[text.lineno - 1 : text.end_lineno], methods[node.name])
            lines[text.lineno - 1 : text.end_lineno] = made
    return "\n".join(lines) + "\n"


def _docstring(lines: list[str], operation: Operation) -> list[str]:
    """Return the lines of a docstring of several lines, with its list of attributes replaced."""
    kept = lines[:-1]
    if _INDENT + _HEAD in kept:
        kept = kept[: kept.index(_INDENT + _HEAD)]
    while not kept[-1].strip():
        kept.pop()
    made = [line for row in operation.attributes for line in _item(row)]
    return [*kept, "", _INDENT + _HEAD, "", *made, f'{_INDENT}"""']


def _item(row: AttributeRow) -> Iterator[str]:
    # The methods take the shape of the weights as a parameter that can't be left out.
    required = "yes" if row.name == "weights_shape" else row.required
    doc = row.doc.partition(". ")[0] + "." if row.name == "weights_shape" else row.doc
    needs = {"yes": " (required)", "unless auto_pad": " (required unless `auto_pad` is set)", "no": ""}[required]
    default = "" if row.default is None else f" [{row.default}]"
    values = f" One of {', '.join(row.choices)}." if row.choices and row.name != "auto_pad" else ""
    text = f"* `{row.name}`{default}{needs}: {doc.replace(*_INPUT)}{values}"
    inner = _INDENT + "  "
    yield from textwrap.wrap(text, _WIDTH, initial_indent=_INDENT, subsequent_indent=inner, break_on_hyphens=False)
