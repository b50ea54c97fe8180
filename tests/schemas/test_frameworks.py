"""Names of other frameworks: the page and the errors have the same ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from schemas.frameworks import NAMES, OPERATIONS, Here, dtype_here, format_here
from schemas.rows import DATA_FORMATS, WEIGHTS_FORMATS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "names.md"


def written(here: Here) -> str:
    """Return the cell of the page for what a name is here."""
    names = " or ".join(" and ".join(f"`{name}`" for name in each.split()) for each in here.names)
    notes = "; ".join(filter(None, (here.note, here.transposed and f"transposed: {here.transposed}")))
    return ", ".join(filter(None, (names, notes)))


def test_names_in_errors() -> None:
    """The names that errors translate are those of the page."""
    (section,) = (part for part in PAGE.read_text("utf-8").split("\n## ") if part.startswith("Names in errors"))
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")][2:]
    found = [(name, here.strip()) for names, here in rows for name in re.findall(r"`([^`]+)`", names)]
    expected = [(name, written(here)) for table in (NAMES, OPERATIONS) for name, here in table.items()]
    operations = [(name.lower().replace("_", ""), here) for name, here in found[len(NAMES) :]]
    assert found[: len(NAMES)] + operations == expected


def test_formats() -> None:
    """The layouts of other frameworks are translated."""
    assert [format_here(name, DATA_FORMATS) for name in ("NCHW", "NHWC")] == ["NCX", "NXC"]
    assert [format_here(name, WEIGHTS_FORMATS) for name in ("OIHW", "HWIO")] == ["OIX", "XIO"]


@pytest.mark.parametrize("name", ["float32", "torch.float32", "torch.float", "FP32", "F32", "numpy.float32", "<f4"])
def test_dtypes(name: str) -> None:
    """Names that other frameworks give an element type are translated."""
    here = dtype_here(name)
    assert here is not None
    assert here.name == "f32"
    assert dtype_here(f"{name}x") is None
