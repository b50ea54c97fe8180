"""Records: rows with named fields, the same for NumPy, for compiled code and for emitted code."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import kernels
from kernels.emit.compiler import Record, row_of
from kernels.gradient.tiles.records import Block, Box, Slab

PARAMETERS_MAX, FIELDS_MAX = 8, 16

WIDE = {"Batch"}
"""The records that have more fields: what a micro-kernel reads is one list of words."""


def functions() -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield every function of the kernels, with the name of its file."""
    root = Path(kernels.__file__).parent
    for file in sorted(root.rglob("*.py")):
        name = file.relative_to(root).as_posix()
        yield from ((name, node) for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef))


def parameters(function: ast.FunctionDef) -> list[str]:
    """List the parameters of a function, without the object that it is a method of."""
    every = function.args.posonlyargs + function.args.args + function.args.kwonlyargs
    return [each.arg for each in every if each.arg not in ("self", "cls")]


def test_no_function_has_many_parameters() -> None:
    """Parameters that belong together are a record or a named tuple, as everywhere in the project."""
    found = list(functions())
    assert len(found) > 500
    # a kernel in Triton has a parameter for each tensor, size and step
    own = [(name, node) for name, node in found if not name.startswith("gpu/") or not node.decorator_list]
    many = [f"{name}: {node.name}" for name, node in own if len(parameters(node)) > PARAMETERS_MAX]
    assert not many


def test_no_record_has_many_fields() -> None:
    """Fields that belong together are a record inside the record."""
    assert {kind.__name__ for kind in Record.__subclasses__() if len(kind.__annotations__) > FIELDS_MAX} == WIDE


def test_no_two_records_have_one_name() -> None:
    """An annotation is looked up by its name alone, so a second record of that name is an error."""
    with pytest.raises(AssertionError):
        type("Box", (Record,), {"__annotations__": {"first": "int"}})


def test_rows_of_records() -> None:
    """A slab contains the boxes of both tensors, with their own fields; a row names every field, in any order."""
    assert Slab.dtype["vector"] == Slab.dtype["scalar"] == Box.dtype
    slabs = np.zeros(2, Slab.dtype)
    slabs["vector"]["first"][1] = 1, 2, 3, 4
    assert slabs[1]["vector"]["first"].tolist() == [1, 2, 3, 4]
    assert row_of(Block, panel=6, acc=5, lane=4, vectors=3, valid=2, first=1).tolist() == [(1, 2, 3, 4, 5, 6)]
    with pytest.raises(AssertionError):
        row_of(Block, first=1)
