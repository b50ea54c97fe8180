"""Scratch memory full of NaN whenever a kernel requests it: what is read without having been written shows.

Without this a test finds there what an earlier call left, which is often zeros, or the right values.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from kernels import ConvProblem, arena, plan, run_unit, storage_dtype

__all__ = ["check_that_other_images_are_not_read", "poisoned"]

CLEARED = {"small"}
"""Requested several times for one sum, at whose beginning it is cleared."""


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill the scratch that any thread requests with NaN, in every dtype."""
    hold, local = arena._hold, arena._local

    def poisoned_hold(name: str, floats: int) -> Any:
        before, held = local.held.get(name), hold(name, floats)
        if before is not held or name not in CLEARED:
            held[0][: floats + arena._LINE].view(np.uint32).fill(0xFFFFFFFF)  # not all: it may be large
        return held

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arena, "_hold", poisoned_hold)
        yield


def check_that_other_images_are_not_read(
    problem: ConvProblem, inputs: list[np.ndarray[Any, Any]], workers: int
) -> None:
    """Run each unit with NaN in the images that it does not name: it leaves the bits of the whole inputs, there alone.

    That is in its box of the output, or in the bytes of the scratch that it names.
    """
    chosen = plan(problem, workers=workers)
    output = np.empty(problem.output_shape, storage_dtype(problem.dtype))
    scratch = np.zeros(chosen.scratch_bytes, np.uint8)
    for unit in chosen.units:
        assert run_unit(chosen, unit, inputs, output, scratch)
    expected, again = output.tobytes(), np.zeros_like(scratch)
    named = any(unit.images not in (None, (0, problem.n)) for unit in chosen.units)
    assert named or problem.algorithm == "winograd", "every unit reads all images"
    for unit in chosen.units:
        some, (low, high), before = [array.copy() for array in inputs], unit.images or (0, problem.n), again.copy()
        for array in some:
            array[:low] = array[high:] = np.nan if array.dtype == np.float32 else 0x7FFF
        assert run_unit(chosen, unit, some, output, again)
        if unit.offset is None:
            assert unit.scratch is not None
            here = slice(*unit.scratch)
            assert again[here].tobytes() == scratch[here].tobytes()
            before[here] = again[here]
        assert again.tobytes() == before.tobytes()
    assert output.tobytes() == expected
