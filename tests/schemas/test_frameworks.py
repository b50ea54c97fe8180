"""Names of other frameworks."""

from __future__ import annotations

import pytest

from schemas.frameworks import dtype_here, format_here
from schemas.rows import DATA_FORMATS, WEIGHTS_FORMATS


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
