"""A worker's private scratch stays within 64 MB for every real layer, forward passes included."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest

from kernels import plan, run_unit, storage_dtype
from kernels.arena import arena_bytes
from tests.kernels.harness import problem_of
from tests.problems import Case, real_layers

LIMIT = 64 << 20
LAYERS = {case.name: replace(case, n=1) for case in real_layers()}


def _private_bytes(case: Case) -> int:
    """Return the scratch left by the first unit, run in a new thread, whose scratch starts empty."""
    problem = problem_of(case)
    chosen = plan(problem)
    inputs = [np.zeros(shape, storage_dtype(case.dtype)) for shape in problem.input_shapes]
    output = np.empty(problem.output_shape, storage_dtype(case.dtype))
    scratch = np.empty(chosen.scratch_bytes, np.uint8) if chosen.scratch_bytes else None
    held: list[int] = []

    def work() -> None:
        run_unit(chosen, chosen.units[0], inputs, output, scratch)
        held.append(arena_bytes())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return held[0]


@pytest.mark.parametrize("name", LAYERS)
def test_private_scratch_is_bounded(name: str) -> None:
    """In addition to inputs, outputs and the plan's shared scratch, a worker holds at most 64 MB."""
    case = LAYERS[name]
    geometry = case if case.transposed else case.mirrored()
    for each in (case, replace(geometry, op="ConvTranspose")):
        assert _private_bytes(each) <= LIMIT, each.op
