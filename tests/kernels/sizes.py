"""Other sizes than those of `kernels.blocks`, for problems that would otherwise be one block, one slab or one unit."""

from __future__ import annotations

from typing import Any

import pytest

from kernels.blocks import STEPS, SUMS

__all__ = ["resize"]


def resize(patch: pytest.MonkeyPatch, **sizes: Any) -> None:
    """Change sizes in whichever table has them; code that is compiled, and plans that are cached, keep the old ones."""
    for name, value in sizes.items():
        (table,) = (vars(each) for each in (SUMS, STEPS) if name in vars(each))
        patch.setitem(table, name, value)
