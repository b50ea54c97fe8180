"""What the kernels on a GPU are told, which needs none: phases and taps of random problems, and errors."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import product
from math import prod

import numpy as np
import pytest

import convgrad
from kernels import plan
from kernels.gpu.configurations import (
    GENERATIONS,
    blocks_of_boxes,
    blocks_of_dst,
    blocks_of_weights,
    box_of,
    chunk_of,
    chunks_of,
    generation,
)
from kernels.gpu.device import refuse
from kernels.gpu.tables import magic, phases_of, pixels_of, spans_of
from kernels.problem import ConvProblem, Dims
from tests.kernels.harness import problem_of
from tests.problems import WITH_WEIGHTS, random_case


def problems(seed: int, count: int = 200) -> list[ConvProblem]:
    """Return random problems with weights."""
    rng = np.random.default_rng([49, seed])
    cases = (random_case(rng) for _ in range(4 * count))
    return [problem_of(case) for case in cases if case.op in WITH_WEIGHTS][:count]


def meetings(dims: Dims, axis: int) -> set[tuple[int, int, int]]:
    """Return every (tap, narrow position, wide position) of an axis that meet."""
    found = product(range(dims.kernel[axis]), range(dims.narrow[axis]))
    return {(tap, x, at) for tap, x in found if 0 <= (at := dims.wide_at(axis, tap, x)) < dims.wide[axis]}


def test_spans_join_the_positions_that_meet() -> None:
    """Low, high and start of each tap give the narrow and wide positions that meet in it, and no others."""
    for problem in problems(0):
        dims, spans, first = problem.dims, spans_of(problem), 0
        for axis, taps in enumerate(dims.kernel):
            stride = min(dims.strides[axis], dims.wide[axis])
            found = {
                (tap, x, int(start) + (x - int(low)) * stride)
                for tap, (low, high, start) in enumerate(spans[first : first + taps])
                for x in range(low, high)
            }
            assert found == meetings(dims, axis), (problem, axis)
            first += taps


def test_phases_join_the_positions_that_meet() -> None:
    """Phases have each position of dst once, and their taps the src positions that it meets, in order."""
    several = 0
    for problem in problems(1):
        if problem.computes != "dst" or (table := phases_of(problem)) is None:
            continue
        several += len(table) > 1
        dims = problem.dims
        for axis in range(3):
            found, positions = set(), []
            for row in {tuple(row) for row in table[:, 12 * axis : 12 * axis + 12].tolist()}:
                count, lane, shift, taps, first, per_tap, tap_step, src, stride, step, size, kernel = row
                assert (src, size, kernel) == (dims.src[axis], dims.dst[axis], dims.kernel[axis])
                for i, j in product(range(count), range(taps)):
                    at = i * stride + shift + j * per_tap
                    if 0 <= at < src:
                        dst, tap = lane + i * step, first + j * tap_step
                        found.add((tap, dst, at) if dims.gathers else (tap, at, dst))
                positions += [lane + i * step for i in range(count)]
            assert found == meetings(dims, axis), (problem, axis)
            assert sorted(positions) == list(range(dims.dst[axis]))
        assert len(table) == len({tuple(row) for row in table[:, [1, 13, 25]].tolist()})
    assert several > 20


def test_division_by_multiplication() -> None:
    """Factor and shift divide any number below 2**31."""
    rng = np.random.default_rng(49)
    for divisor in [*range(1, 200), 2**16 - 1, 2**16, 2**30, 2**31 - 1, *rng.integers(1, 2**31, 200).tolist()]:
        factor, shift = magic(divisor)
        for number in (0, 1, divisor - 1, divisor, divisor + 1, 2**31 - 1, *rng.integers(0, 2**31, 5).tolist()):
            high = number * (factor % 2**32) >> 32
            if number < 2**31:
                assert (high + number) >> shift == number // divisor


def test_chunks_are_those_of_the_problem() -> None:
    """Chunks cover all pixels, none is empty, and pixels of a chunk fill blocks."""
    for of, pixels, programs, depth in product(GENERATIONS, (0, 1, 31, 1000, 200_704), (1, 9, 5000), (32, 64, 2048)):
        chunks = chunks_of(of, pixels, programs, depth)
        chunk = chunk_of(pixels, chunks, depth)
        assert chunk % depth == 0
        assert chunk * chunks >= pixels


def test_configurations_fit_the_shared_memory() -> None:
    """The operands of all stages of a block fit the shared memory of each generation, in every configuration."""
    for of, parts, (few, many) in product(GENERATIONS, (1, 3), product((3, 16, 64, 128, 256, 512), repeat=2)):
        for blocks in (blocks_of_dst(of, parts, few, many), blocks_of_weights(of, parts, few, many)):
            assert (blocks.rows + blocks.columns) * blocks.depth * 2 * parts * blocks.stages <= of.shared


def test_boxes_hold_their_rows_and_waste_little() -> None:
    """A box has its rows, and none if its sides divide the sizes by powers of two."""
    for rows, sizes in product((128, 256), product((1, 3, 64), (1, 5), (7, 56), (14, 224))):
        assert prod(box_of(rows, sizes)) == rows
    assert box_of(128, (64, 1, 56, 56)) == (2, 1, 8, 8)
    assert box_of(128, (256, 1, 14, 14)) == (32, 1, 2, 2)
    for of, parts, dst in product(GENERATIONS[1:], (1, 3), (16, 64, 128, 256, 512)):
        blocks = blocks_of_boxes(of, parts, dst)
        assert (blocks.rows + blocks.columns) * blocks.depth * 2 * parts * blocks.stages <= of.shared


def test_generations() -> None:
    """GPUs of 9 and 10 have code of their own; all others, whose blocks may have less shared memory, that of 8.0."""
    found = [generation(each).capability for each in (80, 86, 89, 90, 100, 103, 110, 120)]
    assert found == [80, 80, 80, 90, 100, 100, 80, 80]


def test_large_numbers_are_left_to_the_general_kernel() -> None:
    """Steps that 32 bits can't hold, and many phases, have no table of the fast kernels, and spans all the same."""
    problem = ConvProblem(
        op="Convolution", dtype="f32", n=1, src_channels=16, dst_channels=16, groups=1, src_spatial=(4,),
        dst_spatial=(1,), kernel=(2,), strides=(1 << 40,), dilations=(1 << 40,), pads_begin=(1 << 40,),
        data_format="NXC", weights_format="OIX",
    )  # fmt: skip
    assert pixels_of(problem, 64) is None
    many = replace(
        problem, op="ConvTranspose", src_spatial=(2,), dst_spatial=(66,), strides=(65,), dilations=(1,), pads_begin=(1,)
    )
    assert phases_of(many) is None
    assert phases_of(replace(many, dst_spatial=(65,), strides=(64,))) is not None
    assert spans_of(problem)[-2:].tolist() == [[0, 0, 0], [0, 1, 0]]


def test_long_axes_have_tables() -> None:
    """An axis of a million positions, of one dimension, is left to no general kernel."""
    long = ConvProblem(
        op="ConvolutionBackwardWeights", dtype="f32", n=2, src_channels=16, dst_channels=16, groups=1,
        src_spatial=(1_000_000,), dst_spatial=(500_000,), kernel=(5,), strides=(2,), dilations=(1000,),
        pads_begin=(2000,), data_format="NXC", weights_format="OIX",
    )  # fmt: skip
    assert pixels_of(long, 64) is not None
    assert phases_of(replace(long, op="Convolution")) is not None


def test_a_problem_is_one_unit_of_a_gpu() -> None:
    """On the device "cuda" the plan of a problem is one unit for the kernel, or its reference, that a GPU has."""
    problem = problems(2, 1)[0]
    found = plan(problem, workers=4, device="cuda"), plan(problem, reference=True, device="cuda")
    assert [each.kernel for each in found] == ["triton", "triton_reference_f64"]
    assert [[unit.shape for unit in each.units] for each in found] == [[problem.output_shape]] * 2


@pytest.mark.skipif(refuse() is None, reason="a GPU can be used here")
def test_without_a_gpu_one_line_says_why() -> None:
    """Where no GPU can be used, a client that chose one raises why in one line, as the service and its probe print."""
    line = refuse()
    assert line is not None
    assert len(line.splitlines()) == 1
    with pytest.raises(RuntimeError) as raised, convgrad.local(device="cuda"):
        pass
    assert str(raised.value) == line
    for command, status in (("kernels.gpu",), 1), (("app", "--device", "cuda"), 2):
        done = subprocess.run(
            [sys.executable, "-m", *command], capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == status
        assert (done.stdout + done.stderr).strip().removeprefix("--device cuda: ") == line


def test_an_unknown_device_is_refused() -> None:
    """A device that is neither is refused when the client is made."""
    with pytest.raises(ValueError, match="device must be cpu or cuda, but is 'gpu'"):
        convgrad.local(device="gpu")  # type: ignore[arg-type]
