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

from kernels import ConvProblem, arena, plan, run_unit, storage_dtype
from kernels.target import target

__all__ = ["check_that_later_images_are_not_read", "poisoned"]

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


def check_that_later_images_are_not_read(problem: ConvProblem, inputs: list[np.ndarray[Any, Any]]) -> None:
    """Run each unit with NaN after the images that it states it reads: its bits are those of the whole inputs."""
    chosen = plan(problem, workers=2)
    output = np.empty(problem.output_shape, storage_dtype(problem.dtype))
    scratch = np.zeros(chosen.scratch_bytes, np.uint8)
    for unit in chosen.units:
        assert run_unit(chosen, unit, inputs, output, scratch)
    expected, again = output.tobytes(), np.zeros_like(scratch)
    needed = [unit.images for unit in chosen.units if unit.images is not None]
    assert needed == sorted(needed)
    assert needed[0] < problem.n, "the problem has no unit that can run early"
    assert needed[-1] == problem.n
    for unit in chosen.units:
        some, read = [array.copy() for array in inputs], problem.n if unit.images is None else unit.images
        for array in some:
            array[read:] = np.nan if array.dtype == np.float32 else 0x7FFF
        assert run_unit(chosen, unit, some, output, again)
    assert output.tobytes() == expected
