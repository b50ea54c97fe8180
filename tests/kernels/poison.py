"""Scratch memory full of NaN whenever a kernel requests it: what is read without having been written shows.

Without this a test finds there what an earlier call left, which is often zeros, or the right values.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from kernels import arena
from kernels.target import target

__all__ = ["poisoned"]

CLEARED = {"small"}
"""Requested several times for one sum, at whose beginning it is cleared."""


class _Keeping(threading.local):
    """Whether the request in progress is that of the owner, who has declared the content (`arena_kept`)."""

    owner = False


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill the scratch that any thread requests with NaN, in every dtype, unless its owner has kept it."""
    hold, kept, local, keeping = arena._hold, arena.arena_kept, arena._local, _Keeping()

    def poisoned_hold(name: str, floats: int) -> Any:
        before, held = local.held.get(name), hold(name, floats)
        if before is not held or not (keeping.owner or name in CLEARED):
            held[0][: floats + arena._LINE].view(np.uint32).fill(0xFFFFFFFF)  # not all: it may be large
        return held

    def poisoned_kept(name: str, floats: int, owner: object) -> tuple[int, int | None]:
        keeping.owner = local.marks.get(name, (None, None))[0] is owner
        try:
            return kept(name, floats, owner)
        finally:
            keeping.owner = False

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arena, "_hold", poisoned_hold)
        patch.setattr(arena, "arena_kept", poisoned_kept)
        if target().dots:
            patch.setattr("kernels.gradient.dots.unit.arena_kept", poisoned_kept)
        yield


def later_images_poisoned(array: np.ndarray[Any, Any], images: int) -> np.ndarray[Any, Any]:
    """Return a copy of a tensor with NaN in all but the first `images` images."""
    copy = array.copy()
    copy[images:] = np.nan if array.dtype == np.float32 else 0x7FFF
    return copy
