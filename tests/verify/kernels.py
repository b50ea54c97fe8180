"""Honest weight-gradient kernels of NumPy alone, and mutants of one, on a small layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from tests.problems import Case

__all__ = ["DATA", "LAYER", "honest", "mutants", "products"]

Array = npt.NDArray[Any]
Inputs = dict[str, Array]

LAYER = Case(
    name="layer", n=3, src_channels=2, dst_channels=3, src_spatial=(8, 8), dst_spatial=(8, 8), kernel=(3, 3),
    pads_begin=(1, 1), pads_end=(1, 1),
)  # fmt: skip


def _normal(rng: np.random.Generator) -> Inputs:
    shapes = {"src": LAYER.src_shape, "diff_dst": LAYER.dst_shape}
    return {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def _changed(change: Callable[[Array], Array], *names: str) -> Callable[[np.random.Generator], Inputs]:
    def make(rng: np.random.Generator) -> Inputs:
        return {name: change(each) if name in names else each for name, each in _normal(rng).items()}

    return make


DATA: list[Callable[[np.random.Generator], Inputs]] = [
    _normal,
    _changed(np.abs, "src", "diff_dst"),
    _changed(lambda values: np.maximum(values, np.float32(0)), "src"),
    _changed(lambda values: np.abs(values) * np.resize(np.array([1, -1], np.float32), 8), "diff_dst"),
    _changed(lambda values: np.cumsum(values, -1, dtype=np.float32), "src", "diff_dst"),
]
"""Normal, positive, half positive, with a sign that alternates along x, and smooth data."""


def products(inputs: Inputs) -> Array:
    """Return the products of each element, (O, I, 3, 3, products), in f32, in the order of images and pixels."""
    a, b = _patches(inputs["src"]), _flat(inputs["diff_dst"])
    return (b[:, None] * a).reshape(LAYER.dst_channels, LAYER.src_channels, 3, 3, -1)


def honest(inputs: Inputs, terms: Array) -> Iterator[tuple[str, Array]]:
    """Yield results that kernels may give: sums of the products in five orders."""
    a, b = _patches(inputs["src"]), _flat(inputs["diff_dst"])
    yield "einsum", np.einsum("ok,ik->oi", b, a).reshape(terms.shape[:-1])
    yield "sequential", _sum(terms)
    lanes = terms.reshape(*terms.shape[:-1], -1, 8)
    yield "8 lanes", _sum(_sum(np.swapaxes(lanes, -1, -2)))
    yield "blocks", _sum(_sum(terms.reshape(*terms.shape[:-1], -1, 16)))
    while terms.shape[-1] > 1:
        if terms.shape[-1] % 2:
            terms = np.concatenate([terms, np.zeros_like(terms[..., :1])], -1)
        terms = terms[..., ::2] + terms[..., 1::2]
    yield "pairwise", terms[..., 0]


def mutants(inputs: Inputs) -> Iterator[tuple[str, Array]]:
    """Yield results of kernels with one fault, in float64, so that they have no other error."""
    src, dst = (inputs[name].astype(np.float64) for name in ("src", "diff_dst"))
    right = _exact(src, dst)
    for name, where in (("an image", np.s_[-1]), ("a row", np.s_[-1, :, -1]), ("a pixel", np.s_[-1, :, -1, -1])):
        less = dst.copy()
        less[where] = 0
        yield f"without {name}", _exact(src, less)
    for name, factor in (("twice", 2.0), ("scaled by 1.001", 1.001)):
        yield name, right * factor
    yield "shifted", _exact(np.roll(src, 1, -1), dst)
    yield "mirrored", right[..., ::-1]
    yield "axes of the taps swapped", np.swapaxes(right, -1, -2)
    yield "channels swapped", right[:, ::-1]
    yield "src read as bf16", _exact(inputs["src"].astype(ml_dtypes.bfloat16).astype(np.float64), dst)
    yield "kept in bf16", right.astype(ml_dtypes.bfloat16)
    cut = ((each.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32) for each in inputs.values())
    yield "inputs cut to TF32", _exact(*(each.astype(np.float64) for each in cut))
    wrong = right.copy()
    wrong[0, 0, 0, 0] *= 1.01
    yield "one element off by 1 %", wrong
    wrong = right.copy()
    wrong[-1, -1, -1] = 0
    yield "an unwritten row of taps", wrong


def _sum(values: Array) -> Array:
    return np.asarray(np.add.accumulate(values, axis=-1, dtype=np.float32)[..., -1])


def _flat(tensor: Array) -> Array:
    return np.moveaxis(tensor, 1, 0).reshape(tensor.shape[1], -1)


def _patches(src: Array) -> Array:
    """Return what each tap reads, (channels and taps, pixels)."""
    padded = np.pad(src, ((0, 0), (0, 0), (1, 1), (1, 1)))
    taps = [_flat(padded[:, :, y : y + 8, x : x + 8]) for y in range(3) for x in range(3)]
    return np.stack(taps, 1).reshape(len(taps) * src.shape[1], -1)


def _exact(src: Array, dst: Array) -> Array:
    return np.asarray(_flat(dst) @ _patches(src).T).reshape(dst.shape[1], src.shape[1], 3, 3)
