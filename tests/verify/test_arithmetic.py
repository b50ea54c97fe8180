"""Declared arithmetic: honest kernels pass as what they say they are, and nothing else does; orders of sums."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.problems import Case, Tensor
from tests.verify.judged import verify
from verify.arithmetic import Arithmetic, _matrices, round_bits, truncate_bits

LAYER = Case(
    n=2, src_channels=12, dst_channels=8, src_spatial=(14, 14), dst_spatial=(14, 14), kernel=(3, 3), pads_begin=(1, 1),
    pads_end=(1, 1),
)  # fmt: skip
POINTWISE = Case(n=16, src_channels=8, dst_channels=8, src_spatial=(9, 9), dst_spatial=(9, 9), kernel=(1, 1))
FORWARD = replace(LAYER, op="Convolution")

Inputs = dict[str, Tensor]


def read(tensor: Tensor, change: Callable[[Any, int], Any], digits: int) -> Tensor:
    """Return a tensor with fewer significant bits."""
    return np.asarray(change(tensor.astype(np.float64), digits), np.float32)


def each(inputs: Inputs, change: Callable[[Any, int], Any], digits: int) -> Inputs:
    """Return inputs with fewer significant bits."""
    return {name: read(tensor, change, digits) for name, tensor in inputs.items()}


def by_image(case: Case, inputs: Inputs, kind: Any) -> Tensor:
    """Add the sums of images in another dtype."""
    total = np.zeros(case.output_shape, kind)
    for image in range(case.n):
        one = {name: tensor[image : image + 1] for name, tensor in inputs.items()}
        total = total + replace(case, n=1).expected(one).astype(kind)
    return total.astype(np.float32)


def kept(case: Case, inputs: Inputs, kind: Any) -> Tensor:
    """Keep the sums of a 1x1 gradient in another dtype."""
    src, dst = (inputs[name].transpose(1, 0, 2, 3).reshape(8, -1) for name in ("src", "diff_dst"))
    total = np.zeros((8, 8), kind)
    for at in range(src.shape[1]):
        total = total + np.multiply.outer(dst[:, at], src[:, at]).astype(kind)
    return total.astype(np.float32).reshape(case.output_shape)


def winograd(case: Case, inputs: Inputs, tile: int) -> Tensor:
    """Compute a padded 3x3 gradient by Winograd's F(3, tile) in f32."""
    a, g, b = (np.array(matrix, float).astype(np.float32) for matrix in _matrices(3, tile))
    src, dst = (tiled(inputs[name], tile, before) for name, before in (("src", 1), ("diff_dst", 0)))
    points = tile + 2
    total = np.zeros((points, points, case.dst_channels, case.src_channels), np.float32)
    for y, x in np.ndindex(*(-(-size // tile) for size in case.dst_spatial)):
        at = tile * y, tile * x
        wide = b @ src[:, :, at[0] : at[0] + points, at[1] : at[1] + points] @ b.T
        narrow = g @ dst[:, :, at[0] : at[0] + tile, at[1] : at[1] + tile] @ g.T
        total += np.einsum("niyx,noyx->yxoi", wide, narrow)
    return np.ascontiguousarray(np.einsum("ay,yxoi,bx->oiab", a, total, a))


def tiled(tensor: Tensor, tile: int, before: int) -> Tensor:
    """Pad planes by some pixels on each side, and to whole tiles."""
    sides = [(before, before + -size % tile) for size in tensor.shape[2:]]
    return np.pad(tensor, ((0, 0), (0, 0), *sides))


def forward_winograd(case: Case, inputs: Inputs, tile: int) -> Tensor:
    """Compute a padded 3x3 convolution by Winograd's F(tile, 3) in f32."""
    a, g, b = (np.array(matrix, float).astype(np.float32) for matrix in _matrices(tile, 3))
    src, points = tiled(inputs["src"], tile, 1), tile + 2
    narrow = np.einsum("xa,oiab,yb->xyoi", g, inputs["weights"], g)
    result = np.zeros((case.n, case.dst_channels, *(size + -size % tile for size in case.dst_spatial)), np.float32)
    for y, x in np.ndindex(*(-(-size // tile) for size in case.dst_spatial)):
        at = tile * y, tile * x
        wide = b @ src[:, :, at[0] : at[0] + points, at[1] : at[1] + points] @ b.T
        result[:, :, at[0] : at[0] + tile, at[1] : at[1] + tile] = a @ np.einsum("nixy,xyoi->noxy", wide, narrow) @ a.T
    height, width = case.dst_spatial
    return np.ascontiguousarray(result[:, :, :height, :width])


def by_fft(case: Case, inputs: Inputs) -> Tensor:
    """Compute a padded 3x3 gradient by transforms of whole planes in f32."""
    height, width = planes = tuple(size + 2 for size in case.dst_spatial)
    src, dst = (np.fft.rfft2(inputs[name], planes) for name in ("src", "diff_dst"))
    found = np.fft.irfft2(np.einsum("nihw,nohw->oihw", src, dst.conj()), (height, width))
    assert found.dtype == np.float32
    return np.ascontiguousarray(np.roll(found, (1, 1), (2, 3))[:, :, :3, :3])


def split(tensor: Tensor, digits: int, parts: int) -> list[Tensor]:
    """Return a tensor as a sum of some of fewer digits, each cut from what is left."""
    found, rest = [], tensor.astype(np.float64)
    for _ in range(parts):
        found.append(np.asarray(truncate_bits(rest, digits)))
        rest = rest - found[-1]
    return found


def of_parts(case: Case, inputs: Inputs, digits: int, parts: int) -> Tensor:
    """Sum the products of split inputs but for the smallest ones."""
    both = [split(tensor, digits, parts) for tensor in inputs.values()]
    names = list(inputs)
    kept = [(i, j) for i in range(parts) for j in range(parts - i)]
    products = [case.exact({names[0]: both[0][i], names[1]: both[1][j]}) for i, j in kept]
    return case.rounded(np.asarray(sum(products)))


def tensor_cores(case: Case, inputs: Inputs) -> Tensor:
    """Compute a 1x1 gradient as an A100 does: of four TF32 products and the sum so far, one more bit than f32 stays."""
    src, dst = (
        read(inputs[name], round_bits, 11).transpose(1, 0, 2, 3).reshape(8, -1).astype(float)
        for name in ("src", "diff_dst")
    )
    total = np.zeros((8, 8))
    for at in range(0, src.shape[1], 4):
        some = dst[:, None, at : at + 4] * src[None, :, at : at + 4]
        top = np.maximum(np.abs(total), np.abs(some).max(2))
        unit = np.ldexp(1.0, np.frexp(top)[1] - 25)
        total = truncate_bits((np.trunc(total / unit) + np.trunc(some / unit[..., None]).sum(2)) * unit, 24)
    return total.astype(np.float32).reshape(case.output_shape)


def test_cut_sums_are_not_rounded_ones() -> None:
    """They all become smaller: rounded sums of as many products may not."""
    case = replace(POINTWISE, src_spatial=(32, 32), dst_spatial=(32, 32))
    inputs = case.floats()
    result = tensor_cores(case, inputs)
    assert verify(case, inputs, result, said=Arithmetic("tf32", "f32 truncated"))["passed"]
    (hint,) = verify(case, inputs, result, said=Arithmetic("tf32"))["hints"]
    assert "TF32 products, truncated f32 sums" in hint


KERNELS: list[tuple[str, Case, Arithmetic, Callable[[Case, Inputs], Tensor]]] = [
    ("TF32", LAYER, Arithmetic("tf32"), lambda case, inputs: case.expected(each(inputs, round_bits, 11))),
    ("TF32, truncated", LAYER, Arithmetic("tf32"), lambda case, inputs: case.expected(each(inputs, truncate_bits, 11))),
    (
        "TF32 of one input", LAYER, Arithmetic("tf32"),
        lambda case, inputs: case.expected({**inputs, "src": read(inputs["src"], round_bits, 11)}),
    ),
    ("bf16", LAYER, Arithmetic("bf16"), lambda case, inputs: case.expected(each(inputs, round_bits, 8))),
    ("bf16x3", LAYER, Arithmetic("bf16x3"), lambda case, inputs: case.expected(each(inputs, round_bits, 16))),
    ("3xTF32", LAYER, Arithmetic("3xtf32"), lambda case, inputs: of_parts(case, inputs, 11, 2)),
    ("bf16x6", LAYER, Arithmetic("bf16x6"), lambda case, inputs: of_parts(case, inputs, 8, 3)),
    ("FFT", LAYER, Arithmetic(algorithm="fft"), by_fft),
    (
        "forward Winograd F(4, 3)", FORWARD, Arithmetic(algorithm="winograd F(4, 3)"),
        lambda case, inputs: forward_winograd(case, inputs, 4),
    ),
    ("TF32, tensor cores", POINTWISE, Arithmetic("tf32", "f32 truncated"), tensor_cores),
    (
        "split-K in bf16", POINTWISE, Arithmetic(segments=16, segment_sum="bf16"),
        lambda case, inputs: by_image(case, inputs, ml_dtypes.bfloat16),
    ),
    ("f16 sums", POINTWISE, Arithmetic(sum="f16"), lambda case, inputs: kept(case, inputs, np.float16)),
    ("bf16 sums", POINTWISE, Arithmetic(sum="bf16"), lambda case, inputs: kept(case, inputs, ml_dtypes.bfloat16)),
    (
        "Winograd F(4, 3)", LAYER, Arithmetic(algorithm="winograd F(4, 3)"),
        lambda case, inputs: winograd(case, inputs, 4),
    ),
]  # fmt: skip
"""Honest kernels: name, layer, what they declare, and what they compute."""

AS_PRECISE = ("3xTF32", "bf16x6", "FFT")
"""Kernels whose errors are no larger than those of f32 in these layers."""


@pytest.mark.parametrize(("name", "case", "said", "kernel"), KERNELS, ids=[kernel[0] for kernel in KERNELS])
@pytest.mark.parametrize("data", ["normal", "positive"])
def test_an_honest_kernel_passes_as_what_it_declares(
    name: str, case: Case, said: Arithmetic, kernel: Callable[[Case, Inputs], Tensor], data: str
) -> None:
    """It fails as plain f32 on normal data, unless it is as precise, and the report says by how much."""
    inputs = {key: np.abs(tensor) if data == "positive" else tensor for key, tensor in case.floats().items()}
    result = kernel(case, inputs)
    report = verify(case, inputs, result, said=said)
    assert report["passed"], (name, report["rules"])
    assert report["arithmetic"]["text"].startswith(f"passed as declared: {said.text}")
    if data == "normal" and name not in AS_PRECISE:
        assert not verify(case, inputs, result)["passed"]
        assert "as plain f32 it fails, its errors are" in report["arithmetic"]["text"]


@pytest.mark.parametrize(("name", "case", "said", "kernel"), KERNELS, ids=[kernel[0] for kernel in KERNELS])
def test_no_declaration_hides_a_fault(
    name: str, case: Case, said: Arithmetic, kernel: Callable[[Case, Inputs], Tensor]
) -> None:
    """A row that is left out, a channel that is wrong, and a result that is another precision's fail."""
    inputs = case.floats()
    short = {key: tensor.copy() for key, tensor in inputs.items()}
    short["src"][:, :, -1] = 0
    swapped = kernel(case, inputs)
    swapped[[0, 1]] = swapped[[1, 0]]
    wrong = {"a missing row": kernel(case, short), "exchanged channels": swapped}
    if said.sum.startswith("f32"):
        wrong["4 bits"] = case.expected(each(inputs, round_bits, 4))
    for what, result in wrong.items():
        assert not verify(case, inputs, result, said=said)["passed"], (name, what)


@pytest.mark.parametrize("said", [Arithmetic(sum="f64"), Arithmetic("3xtf32"), Arithmetic("tf32")])
def test_a_more_precise_kernel_passes(said: Arithmetic) -> None:
    """A library may compute better than its caller allows."""
    inputs = LAYER.floats()
    assert verify(LAYER, inputs, LAYER.expected(inputs), said=said)["passed"]


def test_split_products_of_short_sums_are_no_f32() -> None:
    """Where few products are summed, what 3xTF32 leaves out shows; bf16x3 is neither 3xTF32 nor bf16x6."""
    case = replace(POINTWISE, op="Convolution", src_channels=4)
    inputs = case.floats()
    result = of_parts(case, inputs, 11, 2)
    assert verify(case, inputs, result, said=Arithmetic("3xtf32"))["passed"]
    assert not verify(case, inputs, result)["passed"]
    result = of_parts(case, inputs, 8, 2)
    for products in ("3xtf32", "bf16x6"):
        assert not verify(case, inputs, result, said=Arithmetic(products))["passed"]


def test_an_fft_is_not_exact() -> None:
    """Sums of integers that f32 holds exactly may be wrong by an FFT, and by nothing else."""
    inputs = LAYER.inputs()
    result = by_fft(LAYER, inputs)
    assert verify(LAYER, inputs, result, said=Arithmetic(algorithm="fft"))["passed"]
    assert not verify(LAYER, inputs, result)["passed"]


def test_bf16_products_are_no_tf32() -> None:
    """A result of fewer digits than declared fails."""
    inputs = LAYER.floats()
    result = LAYER.expected(each(inputs, round_bits, 8))
    assert not verify(LAYER, inputs, result, said=Arithmetic("tf32"))["passed"]


def alternating(axis: int) -> tuple[Case, Inputs]:
    """Return a layer with positive src whose diff_dst alternates along an axis."""
    case = replace(LAYER, src_channels=4, dst_channels=8, src_spatial=(24, 24), dst_spatial=(24, 24))
    inputs = {key: np.abs(tensor) + np.float32(0.5) for key, tensor in case.floats().items()}
    odd = [slice(None)] * 4
    odd[axis] = slice(1, None, 2)
    inputs["diff_dst"][tuple(odd)] *= -1
    return case, inputs


@pytest.mark.parametrize("axis", [0, 2, 3])
def test_an_honest_sum_passes_in_the_order_of_a_kernel(axis: int) -> None:
    """Where signs alternate along images, rows or pixels, sums in lanes or in order are as large as their parts."""
    case, inputs = alternating(axis)
    padded = np.pad(inputs["src"], ((0, 0), (0, 0), (1, 1), (1, 1)))
    result = np.empty(case.output_shape, np.float32)
    for y, x in np.ndindex(3, 3):
        some = padded[:, :, y : y + 24, x : x + 24]
        lanes = [np.einsum("nohw,nihw->oi", inputs["diff_dst"][..., at::2], some[..., at::2]) for at in range(2)]
        result[:, :, y, x] = lanes[0] + lanes[1]
    assert verify(case, inputs, result)["passed"]
    result[0] *= np.float32(1 + 2.0**-9)
    assert not verify(case, inputs, result)["passed"]


def test_one_hard_channel_does_not_excuse_the_others() -> None:
    """Four channels whose sums rise and fall again loosen nothing for those that do not."""
    case = replace(LAYER, n=4, src_channels=8, dst_channels=64, src_spatial=(10, 10), dst_spatial=(10, 10))
    inputs = case.floats()
    inputs["src"] = np.abs(inputs["src"])
    hard = inputs["diff_dst"][:, :4]
    hard[:2], hard[2:] = np.abs(hard[:2]), -np.abs(hard[2:])
    assert verify(case, inputs, case.expected(inputs))["passed"]
    assert not verify(case, inputs, (case.expected(inputs) * np.float32(1 + 2.0**-11)))["passed"]


def test_an_exact_zero_has_no_sign() -> None:
    """A sum of integers that is 0 is never -0, unless all that it adds is."""
    inputs = LAYER.inputs()
    inputs["src"][:] = 1
    inputs["diff_dst"][:] = np.where(np.arange(14) % 2, 1, -1)
    result = LAYER.expected(inputs)
    assert (result == 0).any()
    assert verify(LAYER, inputs, result)["passed"]
    result[result == 0] = -0.0
    assert not verify(LAYER, inputs, result)["passed"]


@pytest.mark.parametrize("case", [LAYER, POINTWISE])
def test_the_likely_arithmetic_is_named(case: Case) -> None:
    """Errors that are those of Winograd, or of bf16 sums, are said to be as large as theirs."""
    inputs = case.floats()
    result = winograd(case, inputs, 4) if case is LAYER else kept(case, inputs, ml_dtypes.bfloat16)
    (hint,) = verify(case, inputs, result)["hints"]
    assert ("Winograd's F(" if case is LAYER else "bf16") in hint


def test_products_that_vanish_may_be_negative_zeros() -> None:
    """Where products are below the smallest number of f32, sums of them are 0 of either sign."""
    case = replace(POINTWISE, dtype="bf16", n=1, src_spatial=(1, 1), dst_spatial=(1, 1))
    inputs = {name: np.full_like(tensor, 2.0**-76) for name, tensor in case.floats().items()}
    inputs["src"] *= -1
    result = np.zeros_like(case.expected(inputs))
    assert verify(case, inputs, result)["passed"]
    assert verify(case, inputs, -result)["passed"]
