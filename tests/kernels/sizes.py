"""Change the sizes in `kernels.blocks`, so that small problems have several blocks, slabs or units."""

from __future__ import annotations

from typing import Any

import pytest

from kernels.blocks import STEPS, SUMS

__all__ = ["resize"]


def resize(patch: pytest.MonkeyPatch, **sizes: Any) -> None:
    """Change sizes in whichever table has them; code already compiled and plans already cached keep the old ones."""
    for name, value in sizes.items():
        (table,) = (vars(each) for each in (SUMS, STEPS) if name in vars(each))
        patch.setitem(table, name, value)
