"""A worker's private scratch: at most 64 MB for every real layer, and in tests full of NaN when it is requested."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest

from kernels import arena, plan, run_unit, storage_dtype
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
        held.append(arena.arena_bytes())

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


def test_scratch_does_not_grow_from_problem_to_problem() -> None:
    """What a thread keeps after a unit is bounded, whatever names the units before it used."""
    problem = problem_of(Case(src_spatial=(3,), dst_spatial=(3,), kernel=(1,)))
    inputs = [np.zeros(shape, storage_dtype(problem.dtype)) for shape in problem.input_shapes]
    for number in range(3):
        arena.arena(f"of problem {number}", arena.MOST_BYTES // 8)
    assert arena.arena_bytes() > arena.MOST_BYTES
    assert run_unit(plan(problem), plan(problem).units[0], inputs, np.empty(problem.output_shape, np.float32))
    assert arena.arena_bytes() <= arena.MOST_BYTES


def test_requested_scratch_is_nan() -> None:
    """In tests of kernels no request finds what an earlier one left."""
    for _ in range(2):
        scratch = arena.arena("vector", 100)[:100]
        assert np.isnan(scratch).all()
        assert np.isnan(scratch.view(np.float16)).all()
        scratch.fill(0)
