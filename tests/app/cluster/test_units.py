"""What a unit reads and writes is what is sent, shown on the kernels."""

from __future__ import annotations

import dataclasses
from typing import get_args, get_type_hints

import numpy as np
import pytest

from app.cluster.node import compute as compute_unit
from app.cluster.units import Portion, arguments, can_travel, portions, write
from kernels import ConvProblem, Plan, compute, plan, run_unit
from kernels.problem import OpName
from kernels.target import target
from tests.app.cluster.site import DEEP, WIDE
from tests.app.pool.fleet import TINY, Array, random_inputs
from verify.unit import plan_verification

BIAS = ConvProblem.of_bias("BiasAddBackward", "f32", 40, 32, (40, 40), "NCX")
PROBLEMS = [
    WIDE,
    dataclasses.replace(WIDE, data_format="NXC", dtype="bf16"),
    dataclasses.replace(WIDE, op="Convolution", n=20, src_channels=64, dst_channels=64),
    dataclasses.replace(
        WIDE, op="ConvTranspose", n=20, src_channels=64, dst_channels=64, src_spatial=(56, 56), dst_spatial=(58, 58)
    ),
    dataclasses.replace(  # shared out by images and by channels
        WIDE, n=16, src_channels=64, dst_channels=128, src_spatial=(30, 30), dst_spatial=(28, 28)
    ),
    BIAS,
    dataclasses.replace(BIAS, op="BiasAdd", bias=True),
]
CHANNELS = [
    dataclasses.replace(problem, weights_format=weights_format, data_format=data_format)
    for problem in (
        DEEP,
        dataclasses.replace(DEEP, op="ConvTransposeBackwardWeights", src_spatial=(12, 12), dst_spatial=(14, 14)),
        dataclasses.replace(DEEP, dtype="bf16"),
    )
    for weights_format in get_args(get_type_hints(ConvProblem)["weights_format"])
    for data_format in get_args(get_type_hints(ConvProblem)["data_format"])
]


def remotely(chosen: Plan, inputs: list[Array]) -> Array:
    """Compute a plan as the engine does: the first stage by itself, the others on the server's memory."""
    output = np.empty(chosen.problem.output_shape, chosen.problem.output_dtype)
    scratch = np.empty(chosen.scratch_bytes, np.uint8)
    for unit in chosen.units:
        if unit.stage:
            run_unit(chosen, unit, inputs, output, scratch)
            continue
        parts = [tensor[portion.index].copy() for tensor, portion in zip(inputs, portions(chosen, unit), strict=True)]
        for part in parts:
            part.flags.writeable = False  # as Ray gives them
        result, _ = compute_unit(*arguments(chosen, unit.index), *parts)
        write(unit, result, output, scratch)
    return output


def named(problem: ConvProblem) -> str:
    """Name a case of a test."""
    return f"{problem.op}-{problem.dtype}-{problem.data_format}-{problem.weights_format}"


@pytest.mark.parametrize("workers", [8, 40])
@pytest.mark.parametrize("problem", PROBLEMS + CHANNELS, ids=named)
def test_portions_and_shares_are_enough(problem: ConvProblem, workers: int) -> None:
    """Units that get only the parts that they are said to read, and return only their share, give the same bits."""
    chosen, inputs = plan(problem, workers=workers), random_inputs(problem)
    assert len(chosen.units) > 2 or target().dots == "amx"  # whose units have more channels
    np.testing.assert_array_equal(remotely(chosen, inputs), compute(problem, *inputs))


@pytest.mark.parametrize("workers", [8, 40])
@pytest.mark.parametrize("problem", PROBLEMS + CHANNELS, ids=named)
def test_units_do_not_see_the_rest(problem: ConvProblem, workers: int) -> None:
    """A unit writes the same bytes where all that it is said not to read is NaN."""
    chosen, inputs = plan(problem, workers=workers), random_inputs(problem)
    whole = compute(problem, *inputs)
    output = np.empty(problem.output_shape, problem.output_dtype)
    scratch = np.empty(chosen.scratch_bytes, np.uint8)
    for unit in chosen.units:
        read = (Portion(),) * len(inputs) if unit.stage else portions(chosen, unit)
        hidden = [keep(tensor, portion) for tensor, portion in zip(inputs, read, strict=True)]
        run_unit(chosen, unit, hidden, output, scratch)
    np.testing.assert_array_equal(output, whole)


def keep(tensor: Array, portion: Portion) -> Array:
    """Copy a tensor; what is not in the portion is NaN."""
    hidden = np.full_like(tensor, 0x7FC0 if tensor.dtype == np.uint16 else np.nan)
    hidden[portion.index] = tensor[portion.index]
    return hidden


def test_channels_are_sent_once() -> None:
    """A unit of a block of channels gets these of one input, and the other input whole."""
    for problem in CHANNELS:
        chosen = plan(problem, workers=8)
        src, diff_dst = zip(*(portions(chosen, unit) for unit in chosen.units), strict=True)
        whole, blocks = sorted((set(src), set(diff_dst)), key=len)
        assert whole == {Portion()}
        assert len(blocks) == len(chosen.units)
        assert len(blocks) > 2 or target().dots == "amx"
        assert sum((portion.high or 0) - portion.low for portion in blocks) == DEEP.src_channels


@pytest.mark.parametrize("op", ["ConvolutionBackwardWeights", "Convolution"])
def test_images_are_sent_once_or_twice(op: OpName) -> None:
    """Where units read some of the images, each image is sent to at most two of the units of a box of channels."""
    chosen = plan(dataclasses.replace(WIDE, op=op, src_channels=64, dst_channels=64), workers=8)
    read = {portions(chosen, unit)[0] for unit in chosen.units if unit.stage == 0}
    assert all(portion.high is not None for portion in read)
    assert sum((portion.high or 0) - portion.low for portion in read) <= 2 * WIDE.n


def test_units_of_a_verification_stay() -> None:
    """A verification's units do not write equal shares of the scratch, so they do not travel."""
    assert can_travel(plan(WIDE))
    assert not can_travel(plan_verification(TINY))


def test_float64_stays() -> None:
    """The reference stays: in f64 its bits depend on the processor."""
    assert not can_travel(plan(dataclasses.replace(WIDE, dtype="f64")))


def test_winograds_forward_operations_stay() -> None:
    """Their first stage transforms the weights alone; direct sums of the same layer travel."""
    problem = dataclasses.replace(WIDE, op="Convolution", n=20, src_channels=64, dst_channels=64)
    assert can_travel(plan(problem, workers=2))
    chosen = plan(dataclasses.replace(problem, algorithm="winograd"), workers=2)
    if target().compiles:
        assert chosen.kernel == "forward_winograd"
    assert not can_travel(chosen)


def test_large_tensors_with_inner_channels_are_sent_whole() -> None:
    """To put a few channels in their places would touch every page of the tensor."""
    wide = dataclasses.replace(DEEP, data_format="NXC", n=512)
    assert not any(
        portion.axis for unit in plan(wide, workers=8).units for portion in portions(plan(wide, workers=8), unit)
    )
