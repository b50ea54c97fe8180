"""Units of work: disjoint boxes, any order, any number of workers, repeats, stops."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from kernels import ConvProblem, explain, plan
from tests.kernels.harness import Run, assert_partition, assert_same_bits, problem_of
from tests.kernels.paths import inside, some
from tests.problems import WITH_WEIGHTS, Case, random_case, real_layers
from tests.traps import TRAPS

SMALL = 3_000_000
SLICE = 300_000_000  # multiply-adds that may pass between two checks for a stop
WORKERS = (1, 2, 3, 4, 8, 64)
LARGE = Case(  # so much work that one worker's units differ from eight workers'
    n=16, src_channels=48, dst_channels=72, src_spatial=(40, 40), dst_spatial=(40, 40), kernel=(3, 3),
    pads_begin=(1, 1), pads_end=(1, 1),
)  # fmt: skip


def _random_cases() -> Iterator[Case]:
    rng = np.random.default_rng(11)
    yield from (random_case(rng, macs=60_000) for _ in range(some(60)))
    yield from (random_case(rng, macs=4_000_000, longer=16) for _ in range(some(6)))


def _some_cases() -> Iterator[Case]:
    yield from (trap for trap in TRAPS if trap.macs < SMALL)
    yield from _random_cases()
    for case in (LARGE, LARGE.mirrored(), replace(LARGE.mirrored(), op="ConvTranspose")):
        yield from (replace(case, dtype=dtype) for dtype in ("f32", "f16", "bf16"))


def _assert_partition(problem: ConvProblem, workers: int, reference: bool) -> None:
    chosen = plan(problem, workers=workers, reference=reference)
    assert [unit.index for unit in chosen.units] == list(range(len(chosen.units)))
    assert {unit.stage for unit in chosen.units} == set(range(chosen.stages))
    assert_partition(chosen)


@pytest.mark.parametrize("reference", [False, True])
def test_boxes_are_disjoint_and_cover_the_output(reference: bool) -> None:
    """Every element of the output belongs to exactly one unit, for any number of workers."""
    for case in _some_cases():
        for workers in WORKERS:
            _assert_partition(problem_of(case), workers, reference)


def test_plans_of_real_layers() -> None:
    """At the published batch boxes cover the output, and no plan needs more than 64 MB of shared scratch per worker."""
    for case in real_layers():
        _assert_partition(problem_of(case), 2, reference=False)
        for workers in (1, 2, 8):
            assert plan(problem_of(case), workers=workers).scratch_bytes <= workers * 64 << 20, case.name


@pytest.mark.parametrize("size", [8, 28])
def test_workers_pack_large_tensors_once(size: int) -> None:
    """Where weights are not small each worker gets one unit of a forward operation, or large ones in turn."""
    layer = Case(n=8, src_channels=256, dst_channels=512, src_spatial=(size, size), dst_spatial=(size, size),
                 kernel=(3, 3), pads_begin=(1, 1), pads_end=(1, 1), op="Convolution")  # fmt: skip
    turns = {8: 1, 28: 4}[size]
    assert [len(plan(problem_of(layer), workers=workers).units) for workers in (1, 2)] == [turns, max(2, turns)]


def test_no_worker_waits_for_others() -> None:
    """On up to 16 workers the layers of a network take little longer than if all of them were always busy."""
    waits: dict[tuple[int, str], list[float]] = {}
    for case in real_layers():
        family = case.op.removesuffix("BackwardWeights")
        for op, workers in product((case.op, family), (2, 3, 4, 8, 16)):
            problem = problem_of(replace(case, op=op))
            if problem.macs < workers * 60_000_000:
                continue
            loads = [0] * workers
            for unit in plan(problem, workers=workers).units:
                loads[loads.index(min(loads))] += 0 if unit.stage else unit.macs
            waits.setdefault((workers, op), []).append(max(loads) * workers / sum(loads))
    for key, found in waits.items():
        assert len(found) > 5, key
        assert np.exp(np.mean(np.log(found))) < 1.25, (key, found)
        assert max(found) <= 2, (key, found)


def test_units_of_a_stage_run_in_any_order() -> None:
    """Units of plans for many workers, shuffled inside their stage and run twice, give the bits of one worker's."""
    partial = [sum(unit.offset is None for unit in plan(problem_of(LARGE), workers=n).units) for n in (1, 8)]
    assert 0 < partial[0] < partial[1], "LARGE is too small to tell"
    rng = np.random.default_rng(12)
    for case in _some_cases():
        inputs = case.floats()
        expected = Run(case, inputs, workers=1).all()
        for workers in (8, *(WORKERS[1:] if case.macs < SMALL else ())):
            run = Run(case, inputs, workers=workers)
            for stage in run.stages():
                for index in rng.permutation(stage + stage):
                    assert run.unit(int(index))
            run.check_memory()
            assert_same_bits(run.output, expected, case)


@pytest.mark.path
def test_a_unit_writes_its_box_alone() -> None:
    """While units run, everything outside the finished boxes stays unchanged."""
    for case in _random_cases() if inside() else _some_cases():
        run = Run(case, case.inputs(), workers=8)
        untouched = np.ones(case.output_shape, bool)
        fresh = run.output.copy().view(np.uint8)
        for stage in run.stages():
            for index in stage:
                assert run.unit(index)
                unit = run.plan.units[index]
                if unit.offset is not None and unit.shape is not None:
                    spans = zip(unit.offset, unit.shape, strict=True)
                    untouched[tuple(slice(start, start + size) for start, size in spans)] = False
                if run.output.size:
                    same = (run.output.view(np.uint8) == fresh).reshape(*case.output_shape, -1).all(-1)
                    assert same[untouched].all(), f"unit {index} wrote outside its box: {case}"


@pytest.mark.parametrize("op", WITH_WEIGHTS)
@pytest.mark.parametrize("reference", [False, True])
def test_stop_ends_a_unit(op: str, reference: bool) -> None:
    """A large unit checks for a stop, obeys it, and can then be run again from the start."""
    channels = 20 if reference else 64  # a GMAC, or a tenth of it for the slow kernel
    case = replace(LARGE, src_channels=channels, dst_channels=channels)
    case = replace(case.mirrored() if op.startswith("ConvTranspose") else case, op=op)
    inputs = case.floats()
    expected = Run(case, inputs, reference=reference).all()
    run = Run(case, inputs, reference=reference)
    for stage in run.stages():
        for index in stage:
            asked, macs = run.asks(index), run.plan.units[index].macs
            assert asked >= macs // (SLICE // 100 if reference else SLICE), (
                f"asked {asked} times in {macs} multiply-adds"
            )
            for last in {min(1, asked), (asked + 1) // 2, asked} - {0}:
                assert run.stopped(index, last - 1)
            assert run.unit(index)
    run.check_memory()
    assert_same_bits(run.output, expected, case)


def test_plans_travel_and_are_explained() -> None:
    """They survive pickling, equal problems share one, and the explanation names its kernel and those that refused."""
    for case in _some_cases():
        problem, text = problem_of(case), explain(problem_of(case))
        chosen = plan(problem, workers=2)
        assert pickle.loads(pickle.dumps(problem)) == problem
        assert pickle.loads(pickle.dumps(chosen)) == chosen
        assert plan(problem_of(replace(case)), workers=2) is chosen
        assert chosen.kernel in text
        assert all(refusal in text for refusal in chosen.refusals)
        assert chosen.macs == case.macs
