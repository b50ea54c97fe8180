"""Kernels that `benchmarks.conformance` checks beside those of `convgrad check`.

`torch_alone` is PyTorch without oneDNN, `ours` are convgrad's own kernels, on the path that the environment chooses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from convgrad._check.frameworks import FRAMEWORKS, Array
from convgrad._dtypes import dtype_of_array
from engine.planning import problem_of
from kernels import compute
from schemas.ops import TensorMeta, resolve

__all__ = ["ours", "torch_alone"]


def ours(op: str, inputs: Mapping[str, Array], attributes: Mapping[str, Any], out: Array) -> None:
    """Compute an operation in this process."""
    metas = {name: TensorMeta(dtype_of_array(array).name, array.shape) for name, array in inputs.items()}
    problem = problem_of(resolve(op, attributes, metas))
    _stored(out)[...] = compute(problem, *map(_stored, inputs.values()))


def _stored(array: Array) -> Array:
    return array.view(np.uint16) if array.itemsize == 2 else array


def torch_alone(op: str, inputs: dict[str, Any], attributes: Mapping[str, Any], output_shape: Sequence[int]) -> Any:
    """Compute as the kernel `torch` does, with oneDNN switched off."""
    import torch

    with torch.backends.mkldnn.flags(enabled=False):
        return FRAMEWORKS["torch"](op, inputs, attributes, output_shape)


ours.takes = torch_alone.takes = {"dtypes": ["f32", "f16", "bf16"]}  # type: ignore[attr-defined]
