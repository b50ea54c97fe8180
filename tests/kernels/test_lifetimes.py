"""Compiled functions name an array that they allocate at least as long as they use its rows.

Numba frees an array after the last use of its name, although a row or an address of it is still in use: what is
allocated next then lies in the same memory. Records and arrays on the stack (`kernels.emit.intrinsics`) live until the
function returns.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import numba
import numpy as np
import pytest

import kernels.registry  # noqa: F401 -- importing the kernels registers their compiled functions
from kernels.emit.brgemm import Batch, Element
from kernels.emit.compiler import ENTRIES
from kernels.emit.intrinsics import address_of, stack_array, stack_record

BATCH, ELEMENT = Batch.dtype, Element.dtype

FUNCTIONS = {entry.name: entry.function for entry in ENTRIES if entry.function is not None}


def _assigned(tree: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Give each name that is assigned, with its value."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                pairs = [(target, node.value)]
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs = list(zip(target.elts, node.value.elts, strict=True))
                yield from ((name.id, value) for name, value in pairs if isinstance(name, ast.Name))


def _is_made(value: ast.expr) -> bool:
    """Whether a value is a new array."""
    return (
        isinstance(value, ast.Call)
        and isinstance(value.func, ast.Attribute)
        and value.func.attr in ("array", "empty", "ones", "zeros")
    )


def _part_of(value: ast.expr) -> str | None:
    """Return the name that a value is a row, a field or an address of, if it is one."""
    while isinstance(value, ast.Subscript | ast.Attribute):
        value = value.value
        if isinstance(value, ast.Name):
            return value.id
    return None


def _last_use(tree: ast.AST, name: str) -> int:
    """Return the last line in which a name lives: a loop that begins after it is made, and uses it, keeps it."""
    lines = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == name]
    last = max(lines)
    for node in ast.walk(tree):
        if isinstance(node, ast.For | ast.While) and min(lines) < node.lineno <= max(lines) <= (node.end_lineno or 0):
            last = max(last, node.end_lineno or 0)
    return last


def _outlived(function: Callable[..., Any]) -> list[str]:
    """List what a function uses after the table that it is part of."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    assigned = list(_assigned(tree))
    tables = {name for name, value in assigned if _is_made(value)}
    owners: dict[str, str] = {name: name for name in tables}
    for _ in assigned:  # a row of a row has the same owner
        for name, value in assigned:
            part = _part_of(value)
            if part in owners:
                owners.setdefault(name, owners[part])
    uses = [(name, table) for name, table in owners.items() if name != table]
    return [f"{name} of {table}" for name, table in uses if _last_use(tree, table) < _last_use(tree, name)]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_rows_do_not_outlive_their_table(name: str) -> None:
    """No row, field or address is used after the last use of the name of its table."""
    assert _outlived(FUNCTIONS[name]) == []


def test_a_row_that_outlives_its_table_is_found() -> None:
    """The search finds a row that is used after its table, also where a loop uses it, and not one that is kept."""

    def lost(count: int) -> int:
        rows = np.zeros((1, 4), np.int64)
        row = rows[0]
        for _ in range(count):
            row[0] += 1
        return int(row[0])

    def kept(count: int) -> int:
        rows = np.zeros((1, 4), np.int64)
        row = rows[0]
        for _ in range(count):
            row[0] += rows.shape[0]
        return count

    assert _outlived(lost) == ["row of rows"]
    assert _outlived(kept) == []


def test_the_stack() -> None:
    """Records and arrays on the stack are zeros each time, apart from each other, and begin at a line of memory."""

    def use(count: int) -> tuple[int, int, int]:
        found, places, apart = 0, 0, 0
        for _ in range(count):
            record, rows, numbers = stack_record(BATCH), stack_array(3, ELEMENT), stack_array(4, np.int64)
            found += record.rows + rows[2].steps + numbers[3] + rows.shape[0] + numbers.shape[0]
            record.rows, rows[2].steps, numbers[3] = 10, 20, 30
            apart += record.rows + rows[2].steps + numbers[3]
            places += (address_of(record) | address_of(rows) | address_of(numbers)) % 64
        return found, places, apart

    compiled: Any = numba.njit(use)
    assert compiled(3) == (21, 0, 180)
