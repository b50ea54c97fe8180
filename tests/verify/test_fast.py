"""Fast verification by random projections: honest results pass, faults anywhere are found, and full sizes are quick."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.kernels.harness import compute, problem_of, stored
from tests.problems import Case, Tensor, random_case
from tests.verify import judged
from verify.arithmetic import Arithmetic
from verify.fast import plan_fast_verification
from verify.projections import Projection, is_projectable, projected_macs

LAYER = Case(
    n=3, src_channels=12, dst_channels=20, src_spatial=(12, 10), dst_spatial=(12, 10), kernel=(3, 3), pads_begin=(1, 1),
    pads_end=(1, 1),
)  # fmt: skip
OPS = ("ConvolutionBackwardWeights", "Convolution")


def verify(case: Case, inputs: dict[str, Tensor], result: Tensor, seed: int = 1) -> dict[str, Any]:
    """Return the report of a fast verification."""
    return judged.verify(case, inputs, result, plan_fast_verification(problem_of(case), seed=seed))


def test_honest_results_pass() -> None:
    """Results of the kernels pass, of integers and of real numbers, for random problems of every operation."""
    rng = np.random.default_rng(4)
    seen = set()
    for number in range(160):
        case = random_case(rng, macs=20_000)
        if case.of_bias or case.n == 0:
            continue
        inputs = case.inputs() if number % 2 else case.floats()
        report = verify(case, inputs, compute(case, inputs))
        assert report["passed"], (case, report["projections"])
        seen.add((case.op, case.dtype))
    assert len(seen) > 15


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("data_format", ["NCX", "NXC"])
def test_one_wrong_unit_of_integers_is_found(op: str, data_format: str) -> None:
    """One unit in one element fails, and the report names the element, of the whole result."""
    rng = np.random.default_rng(2)
    case = replace(LAYER, op=op, data_format=data_format)
    inputs = {name: rng.integers(-3, 4, shape).astype(np.float32) for name, shape in case.input_shapes.items()}
    result = case.expected(inputs)
    for seed in range(5):
        wrong = result.copy()
        index = tuple(int(rng.integers(size)) for size in result.shape)
        wrong[index] += 1
        report = verify(case, inputs, wrong, seed)
        assert not report["passed"]
        assert report["projections"]["exact"] is False
        if op == "ConvolutionBackwardWeights" or index[0] == 0:  # of a forward result the first image is looked at
            assert report["worst"]["index"] == list(index)
            assert report["where"]["text"].startswith("the one wrong element has")
    assert verify(case, inputs, result)["passed"]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("groups", [1, 2])
def test_faults_are_found(op: str, groups: int) -> None:
    """A channel scaled by 1.001, inputs cut to bf16, and a zero tail fail; the channel that is wrong is looked at."""
    case = replace(LAYER, op=op, groups=groups)
    inputs = case.floats()
    right = case.expected(inputs)
    assert verify(case, inputs, right)["passed"]
    scaled = right.copy()
    place = np.s_[:, 13] if op == "Convolution" else np.s_[13]
    scaled[place] *= np.float32(1.001)
    report = verify(case, inputs, scaled)
    assert not report["passed"]
    assert not report["projections"]["passed"]
    assert report["projections"]["checked"]["first"][1 if op == "Convolution" else 0] == 13
    narrow = {name: (tensor.view(np.uint32) & 0xFFFF0000).view(np.float32) for name, tensor in inputs.items()}
    assert not verify(case, inputs, case.expected(narrow))["passed"]
    tail = right.copy()
    tail[(slice(None), slice(-2, None)) if op == "Convolution" else slice(-2, None)] = 0
    report = verify(case, inputs, tail)
    assert report["where"]["text"].endswith("they are 0")
    tail[:] = np.nan
    assert not verify(case, inputs, tail)["passed"]


def test_what_it_costs() -> None:
    """A layer of 256 channels takes a small part of the reference's multiply-adds; small ones are not projected."""
    case = replace(LAYER, n=8, src_channels=256, dst_channels=256)
    problem = problem_of(case)
    assert is_projectable(problem)
    assert 30 * projected_macs(problem) < 2 * problem.macs
    assert not is_projectable(problem_of(replace(LAYER, groups=4, src_channels=4, dst_channels=4)))
    assert not is_projectable(problem_of(replace(case, dtype="f64")))


@pytest.mark.parametrize("data_format", ["NCX", "NXC"])
@pytest.mark.parametrize("op", ["ConvolutionBackwardWeights", "ConvTransposeBackwardWeights", "Convolution"])
def test_projected_sums_are_those_of_the_result(op: str, data_format: str) -> None:
    """Of integers, the sums over all blocks are the oracle's result, added up with the signs of its channels."""
    case = replace(LAYER, op=op, data_format=data_format, n=5)
    inputs = case.inputs()
    right = stored(case.expected(inputs))
    projection = Projection(problem_of(case), 7)
    slots = np.zeros((projection.blocks, projection.slots))
    tensors = [*map(stored, inputs.values())]
    for block in range(projection.blocks):
        projection.run(block, tensors, right, slots[block], lambda: False)
    t = projection.signs("dst", case.dst_channels)
    if case.forward:
        dst = right if data_format == "NCX" else np.moveaxis(right, -1, 1)
        expected = np.einsum("pn,po,noyx->pyx", projection.signs("images", case.n), t, dst)
        found = slots[:, :-3].sum(0)[-(projection.count + 2) * expected[0].size :]
    else:
        expected = np.einsum("po,pi,oiyx->pyx", t, projection.signs("src", case.src_channels), right)
        found = slots[:, :-3].sum(0)
    places = expected[0].size
    assert np.array_equal(found[: projection.count * places], expected.reshape(-1))
    judged = projection.judge(tensors, slots, lambda: False)
    assert judged is not None
    assert judged.exact


def test_sums_that_all_lose_the_same_share() -> None:
    """Positive images added in bf16 come to a halt, in all elements alike: honest as declared, with any projections."""
    images = 256
    case = Case(n=images, src_channels=12, dst_channels=8, src_spatial=(4, 4), dst_spatial=(4, 4), kernel=(1, 1))
    inputs = {name: np.abs(tensor) for name, tensor in case.floats().items()}
    total = np.zeros(case.output_shape, ml_dtypes.bfloat16)
    for image in range(images):
        one = {name: tensor[image : image + 1] for name, tensor in inputs.items()}
        total = total + replace(case, n=1).expected(one).astype(total.dtype)
    said = Arithmetic(segments=images, segment_sum="bf16")
    for seed in range(4):
        plan = plan_fast_verification(problem_of(case), arithmetic=said, seed=seed)
        assert judged.verify(case, inputs, total.astype(np.float32), plan)["passed"], seed
