"""The bits of the kernels on a GPU: integers against the oracle, the reference against the CPU's."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256

import numpy as np
import pytest

from tests.kernels import harness
from tests.kernels.gpu.running import INTERPRETED, compute, device, needs_triton
from tests.kernels.harness import assert_same_bits
from tests.kernels.special import SPECIAL
from tests.problems import WITH_WEIGHTS, Case, random_case

pytestmark = needs_triton

COUNT = 3 if INTERPRETED else 125
MACS = 2_000 if INTERPRETED else 60_000
BLOCKS = 2 if INTERPRETED else 16


def cases(block: int, count: int = COUNT) -> list[Case]:
    """Return random problems of every dtype; those of the interpreter are small."""
    rng = np.random.default_rng([49, block])
    found: list[Case] = []
    while len(found) < count:
        case = random_case(rng, macs=MACS, small=INTERPRETED)
        if case.macs <= MACS:
            found.append(replace(case, dtype="f64") if rng.random() < 0.1 else case)
    return found


@pytest.mark.parametrize("block", range(BLOCKS))
def test_integers(block: int) -> None:
    """Sums of integers, which are exact, have the oracle's bits, whatever layout, groups, steps and pads."""
    for case in cases(block):
        inputs = case.inputs()
        assert_same_bits(compute(case, inputs), case.expected(inputs), case)


@pytest.mark.parametrize("block", range(BLOCKS))
def test_the_reference_has_the_bits_of_the_cpus(block: int) -> None:
    """The reference of random numbers is the CPU's, bit for bit: one digest of both."""
    gpu, cpu = sha256(), sha256()
    for case in cases(16 + block):
        inputs = case.floats()
        found, right = compute(case, inputs, reference=True), harness.compute(case, inputs, reference=True)
        assert_same_bits(found, right, case)
        gpu.update(found.tobytes())
        cpu.update(right.tobytes())
    assert gpu.digest() == cpu.digest()


@pytest.mark.parametrize("op", ["Convolution", "ConvTranspose", "ConvolutionBackwardWeights", "BiasAddBackward"])
def test_the_reference_adds_in_the_order_of_the_cpus(op: str) -> None:
    """Sums that cancel to what their order rounds have the bits of the CPU's reference, and are not zero."""
    transposed, forward = op.startswith("ConvT"), op.startswith("Conv") and not op.endswith("Weights")
    case = Case(
        op=op, n=2, src_channels=16, dst_channels=16, src_spatial=(1, 16), dst_spatial=(1, 16), data_format="NXC",
        kernel=(1, 3) if forward else (1, 1), pads_begin=(0, int(forward)), pads_end=(0, int(forward)),
        groups=1 if op.startswith("Conv") else 16, weights_format="IOX" if transposed else "OIX",
        groups_axis="O" if transposed else "I",
    )  # fmt: skip
    rng = np.random.default_rng(49)
    inputs = {
        name: (values * 2.0 ** rng.integers(-20, 20, values.shape)).astype(np.float32)
        for name, values in case.floats().items()
    }
    for name, values in inputs.items():  # the second half of the terms, backwards, takes away the first
        axis = {"src": 3 if forward else 2, "weights": 0 if transposed else 1, "diff_dst": 2}[name]
        terms = np.moveaxis(values, axis, 0)
        terms[8:] = terms[7::-1] * (-1 if name == "diff_dst" or (name == "src" and forward) else 1)
    found, right = compute(case, inputs, reference=True), harness.compute(case, inputs, reference=True)
    assert np.count_nonzero(right) > right.size // 4
    assert_same_bits(found, right, case)


@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("block", range(BLOCKS // 2))
def test_inf_and_nan(block: int, reference: bool) -> None:
    """A few Inf and NaN among integers reach exactly the sums that the oracle gives them to, none by the padding."""
    rng = np.random.default_rng([49, 100 + block])
    for case in cases(32 + block):
        inputs = case.inputs()
        for tensor in inputs.values():
            flat = tensor.reshape(-1)
            if flat.size:
                flat[rng.integers(flat.size, size=2)] = rng.choice(SPECIAL, 2)
        assert_same_bits(compute(case, inputs, reference=reference), case.expected(inputs), case)


def products(op: str, dtype: str, data_format: str) -> Case:
    """Return a layer whose channels fill blocks of products, or end inside of one, with strides."""
    transposed = op.startswith("ConvTranspose")
    small, large = (3, 5), (6, 9)
    return Case(
        op=op, dtype=dtype, n=2, src_channels=40, dst_channels=18, src_spatial=small if transposed else large,
        dst_spatial=large if transposed else small, kernel=(3, 3), strides=(2, 2), pads_begin=(1, 1), pads_end=(0, 1),
        data_format=data_format, weights_format="IOX" if transposed else "OIX", groups_axis="O" if transposed else "I",
    )  # fmt: skip


@pytest.mark.parametrize("op", WITH_WEIGHTS)
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_blocks_of_products(op: str, dtype: str) -> None:
    """Products of blocks sum what they should, in both layouts, and strides by phases."""
    from kernels.gpu.compute import prepared

    for data_format in ("NCX", "NXC"):
        case = products(op, dtype, data_format)
        inputs = case.inputs()
        assert_same_bits(compute(case, inputs), case.expected(inputs), case)
        used = prepared(harness.problem_of(case), False, device()).kernel
        assert used == ("multiply_weights" if op.endswith("Weights") else "multiply_dst")


@pytest.mark.parametrize("op", ["Convolution", "ConvolutionBackwardData"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_blocks_that_are_boxes(op: str, dtype: str) -> None:
    """Boxes of positions, at the edges of images, sum what they should, in groups, with bias, and strides of dst."""
    from kernels.gpu.compute import prepared

    strided = op == "ConvolutionBackwardData"
    case = Case(
        op=op, dtype=dtype, n=8, src_channels=128, dst_channels=128, groups=2, kernel=(3, 3), pads_begin=(1, 1),
        src_spatial=(14, 8) if strided else (7, 4), dst_spatial=(7, 4), strides=(2, 2) if strided else (1, 1),
        pads_end=(0, 0) if strided else (1, 1), data_format="NXC",
    )  # fmt: skip
    inputs = case.inputs()
    assert_same_bits(compute(case, inputs), case.expected(inputs), case)
    assert prepared(harness.problem_of(case), False, device()).kernel == "multiply_boxes"


def test_random_boxes() -> None:
    """Integers in boxes of one to three axes, whatever steps, pads, taps, layout and groups, have the oracle's bits."""
    from kernels.gpu.compute import prepared

    rng, found = np.random.default_rng([49, 200]), 0
    while found < (2 if INTERPRETED else 200):
        case, groups = random_case(rng, small=INTERPRETED), int(rng.integers(1, 3))
        if case.op in WITH_WEIGHTS and not case.op.endswith("Weights"):
            channels, n = (
                64 * groups * int(rng.integers(1, 1 if INTERPRETED else 4, endpoint=True)),
                rng.integers(1, 40),
            )
            case = replace(case, n=int(n), groups=groups, src_channels=channels, dst_channels=channels)
            if prepared(harness.problem_of(case), False, device()).kernel == "multiply_boxes":
                inputs, found = case.inputs(), found + 1
                assert_same_bits(compute(case, inputs), case.expected(inputs), case)


@pytest.mark.skipif(not INTERPRETED, reason="the memory is the CPU's")
def test_parts_of_large_tensors() -> None:
    """Three parts of a tensor of more than 2^30 elements, at offsets beyond 31 bits, are its values."""
    import torch

    from kernels.gpu.products import split
    from tests.kernels.gpu.parts import add_parts

    count = (1 << 30) + 64
    parts = torch.from_numpy(np.empty(3 * count, np.uint16)).view(torch.bfloat16)  # of pages that are not touched
    values, found = torch.randn(64), torch.zeros(64)
    split[(1,)](values, parts, count, BLOCK=64)
    add_parts[(1,)](parts, count, found, BLOCK=64)
    assert torch.equal(found, values)


@pytest.mark.parametrize("op", WITH_WEIGHTS)
def test_f32_is_f32(op: str) -> None:
    """Sums of random numbers in f32 are as close to those in float64 as sums of products in f32 are."""
    case = products(op, "f32", "NXC")
    inputs = case.floats()
    most = case.exact({name: np.abs(values) for name, values in inputs.items()})
    assert (np.abs(compute(case, inputs) - case.exact(inputs)) <= 4e-7 * most).all()


@pytest.mark.parametrize("special", [1e300, 1e-300, np.inf, np.nan])
@pytest.mark.parametrize("op", ["Convolution", "ConvolutionBackwardWeights", "BiasAddBackward"])
def test_f64_beyond_exact_sums_is_the_cpus(op: str, special: float) -> None:
    """Values of f64 whose products are not exact, and Inf and NaN, give the bits of the CPU's reference."""
    case = next(each for each in cases(64, 200) if each.op == op and each.macs)
    case = replace(case, dtype="f64")
    inputs = case.floats()
    next(iter(inputs.values())).reshape(-1)[0] = special
    right = harness.compute(case, inputs, reference=True)
    assert np.array_equal(compute(case, inputs, reference=True).view(np.uint64), right.view(np.uint64))


@pytest.mark.parametrize("reference", [False, True])
def test_addresses_of_64_bits(reference: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With tables of 64 bits, as tensors of 2**30 elements have, results are the same."""
    from kernels.gpu import tables
    from kernels.gpu.compute import prepared

    monkeypatch.setattr(tables, "addresses_of", lambda _: np.int64)
    prepared.cache_clear()
    for op in ("Convolution", "ConvTransposeBackwardWeights", "BiasAddBackward"):
        case = next(each for each in cases(65, 200) if each.op == op and each.macs)
        inputs = case.inputs()
        assert_same_bits(compute(case, inputs, reference=reference), case.expected(inputs), case)
    prepared.cache_clear()
