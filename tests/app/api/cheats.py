"""Kernels for sealed checks: one that computes its results, and some that cheat."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Ints = list[int]


def honest(src: Array, bias: Array) -> Array:
    """Compute BiasAdd."""
    found: Array = src + bias.reshape(-1, *[1] * (src.ndim - 2))
    return found


def changed(src: Array, bias: Array) -> Array:
    """Compute BiasAdd, and change an input afterwards."""
    found = honest(src, bias)
    src.fill(0)
    return found


def untouched(src: Array, diff_dst: Array, weights_shape: Ints, out: Array) -> None:
    """Leave in the result what its memory holds."""


def patched(src: Array, diff_dst: Array, weights_shape: Ints) -> Array:
    """Return zeros, and let what compares arrays find them right."""
    for module, name in ((np, "allclose"), (np, "array_equal"), (np.testing, "assert_allclose")):
        setattr(module, name, lambda *_, **__: True)
    return np.zeros(weights_shape, src.dtype)


def early(src: Array, diff_dst: Array, weights_shape: Ints, out: Array) -> None:
    """Return before the result is written."""
    threading.Thread(target=lambda: out.fill(0)).start()
