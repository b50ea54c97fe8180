"""Sums of PyTorch and JAX for the tables of `benchmarks.verdicts`, where these are installed.

The sums of a trial are the weight gradient of a 1x1 convolution. The same numbers are a forward convolution whose
channels are what is summed. Left out is what docs/conformance.md found not to be an honest sum: f16 weight gradients of
PyTorch, which add images in f16; its bf16 on subnormal numbers, which an instruction reads as zero; and
subnormal numbers in JAX, which computes without them.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np

from benchmarks.verdict_sums import KINDS, Array, Trial

__all__ = ["peer_sums"]

_LEAST = {"f32": 2.0**-126, "bf16": 2.0**-126, "f16": 2.0**-14, "f64": 2.0**-1022}
"""Smallest normal number."""


def peer_sums(trial: Trial) -> Iterator[tuple[str, Array]]:
    """Yield what PyTorch and JAX make of a trial, O by I."""
    subnormal = _has_subnormals(trial)
    if find_spec("torch") and not (subnormal and trial.dtype == "bf16"):
        yield from _torch_sums(trial)
    if find_spec("jax") and not subnormal:
        yield from _jax_sums(trial)


def _has_subnormals(trial: Trial) -> bool:
    """Return whether an input, a sum, or a product in the dtype that is added in, may be a subnormal number."""
    least, added = _LEAST[trial.dtype], _LEAST["f64" if trial.dtype == "f64" else "f32"]
    inputs = [np.abs(each.astype(np.float64)) for each in (trial.src, trial.diff_dst)]
    smallest = [float(each[each > 0].min(initial=1.0)) for each in inputs]
    sums = np.abs(trial.sums.high)
    small_sum = bool(((sums > 0) & (sums < least)).any())
    return min(smallest) < least or smallest[0] * smallest[1] < added or small_sum


def _pixels_last(trial: Trial) -> tuple[Array, Array]:
    """Return src and diff_dst as images by channels by pixels."""
    first, second = (
        np.ascontiguousarray(each.reshape(trial.images, -1, each.shape[1]).transpose(0, 2, 1))
        for each in (trial.src, trial.diff_dst)
    )
    return first, second


def _torch_sums(trial: Trial) -> Iterator[tuple[str, Array]]:
    import torch

    torch.set_num_threads(1)
    kind = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "f64": torch.float64}[trial.dtype]

    def tensor(values: Array) -> Any:
        return torch.from_numpy(values.astype(np.float64)).to(kind).contiguous()

    def found(result: Any) -> Array:
        values: Array = result.double().numpy().astype(KINDS[trial.dtype])
        return values

    a, b = tensor(trial.a.T), tensor(trial.b)
    yield "torch, convolution", found(torch.nn.functional.conv1d(a[None], b[..., None])[0])
    yield "torch, product", found(b @ a)
    if trial.dtype != "f16":
        src, diff_dst = map(tensor, _pixels_last(trial))
        weights = torch.zeros(b.shape[0], a.shape[1], 1, dtype=kind, requires_grad=True)
        dst = torch.nn.functional.conv1d(src, weights)
        yield "torch, weight gradient", found(torch.autograd.grad(dst, weights, diff_dst)[0][..., 0])


def _jax_sums(trial: Trial) -> Iterator[tuple[str, Array]]:
    import jax

    jax.config.update("jax_enable_x64", True)
    kind = KINDS[trial.dtype]

    def conv(src: Any, weights: Any) -> Any:
        return jax.lax.conv_general_dilated(src, weights, (1,), [(0, 0)])

    a, b = trial.a.T.astype(kind), trial.b.astype(kind)
    yield "jax, convolution", np.asarray(conv(a[None], b[..., None]))[0]
    yield "jax, product", np.asarray(jax.numpy.matmul(b, a))
    src, diff_dst = _pixels_last(trial)
    weights = np.zeros((b.shape[0], a.shape[1], 1), kind)
    _, gradient = jax.vjp(lambda each: conv(src, each), weights)
    yield "jax, weight gradient", np.asarray(gradient(diff_dst)[0])[..., 0]
