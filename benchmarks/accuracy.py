"""Random inputs for a measurement, and the error of a result against float64."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.memory import aligned
from kernels import ConvProblem
from tests import naive

__all__ = ["Reference", "Tensor", "channels_last", "grouped_result", "make_inputs", "stored"]

Tensor = npt.NDArray[Any]
Array = npt.NDArray[np.float64]

GROUPS, WIDE, NARROW, IMAGES = 4, 4, 8, 2
"""How much of a result is compared with float64: groups, channels of a group on either side, images of a dst.

Depthwise layers compare more groups, and layers with few taps more channels: telling two errors apart takes some
hundred sums.
"""


def stored(tensor: Tensor) -> Tensor:
    """Return a view of a tensor as the kernels store it: f32 unchanged, f16 and bf16 as their bits."""
    return tensor if tensor.dtype == np.float32 else tensor.view(np.uint16)


def make_inputs(problem: ConvProblem, seed: int = 0) -> list[Tensor]:
    """Return normally distributed inputs, rounded to the dtype, in the layout of `problem`."""
    rng = np.random.default_rng(seed)
    dtype = naive.DTYPES[problem.dtype]
    return [aligned(rng.standard_normal(shape, np.float32).astype(dtype)) for shape in problem.input_shapes]


def channels_last(problem: ConvProblem, inputs: list[Tensor]) -> list[Tensor]:
    """Return copies of an NCX problem's inputs in the layout of its NXC twin: (N, X, C), weights with X first."""
    data = [aligned(np.moveaxis(tensor, 1, -1)) for tensor in inputs]
    if problem.forward:
        weights = np.moveaxis(inputs[1], (0, 1), (-1, -2))
        data[1] = aligned(weights)
    return data


def grouped_result(output: Tensor, problem: ConvProblem) -> Array:
    """Return a result in float64 as (group, I, O, *kernel) or, of a forward problem, as (n, group, O, *dst)."""
    values = output.view(naive.DTYPES[problem.dtype])
    if problem.forward:
        return naive.channels_first(values, problem.data_format, problem.groups)
    return naive.to_grouped(values, problem.weights_format, problem.groups_axis, problem.groups)


class Reference:
    """A random part of the exact result of one NCX problem on its inputs.

    A weight gradient is compared for some groups and, in them, some src and some dst channels, at every tap: each
    compared element is a complete sum. A forward operation is compared for some images and some dst channels, at
    every position. The exact values come from the tests' oracle.
    """

    def __init__(self, problem: ConvProblem, inputs: list[Tensor], seed: int = 1) -> None:
        rng = np.random.default_rng(seed)
        p, self.problem = problem, problem
        each_src, each_dst = p.src_channels // p.groups, p.dst_channels // p.groups
        more = 4 if prod(p.kernel) < 9 and not p.forward else 1
        self._groups = _some(rng, p.groups, GROUPS if each_src * each_dst > 1 else 16 * GROUPS)
        self._src = _some(rng, each_src, each_src if p.forward else more * (WIDE if each_src > each_dst else NARROW))
        self._dst = _some(rng, each_dst, more * (NARROW if each_src > each_dst or p.forward else WIDE))
        self._images = _some(rng, p.n, IMAGES if p.forward else p.n)
        src = self._take(inputs[0], self._src, each_src)
        shared: dict[str, Any] = {key: getattr(p, key) for key in ("strides", "pads_begin", "dilations")}
        shared |= {"groups": len(self._groups), "data_format": "NCX", "groups_axis": p.groups_axis}
        shared["weights_format"] = p.weights_format
        if p.forward:
            weights = naive.to_grouped(inputs[1], p.weights_format, p.groups_axis, p.groups)
            weights = weights[self._groups][:, :, self._dst]
            weights = naive.from_grouped(weights, p.weights_format, p.groups_axis)
            forward = naive.conv_transpose if p.op == "ConvTranspose" else naive.convolution
            exact = forward(src, weights, dst_spatial=p.dst_spatial, **shared)
            self.exact = naive.channels_first(exact, "NCX", len(self._groups))
        else:
            dst = self._take(inputs[1], self._dst, each_dst)
            exact = naive.bwd_weights(p.op, src, dst, kernel=p.kernel, **shared)
            self.exact = naive.to_grouped(exact, p.weights_format, p.groups_axis, len(self._groups))
        self.scale = float(np.sqrt(np.mean(self.exact**2))) or 1.0  # 0: no tap meets data

    def _take(self, tensor: Tensor, channels: Tensor, each: int) -> Tensor:
        """Return the chosen channels of the chosen groups and images."""
        chosen = (self._groups[:, None] * each + channels[None, :]).ravel()
        return tensor[self._images][:, chosen]

    def error(self, grouped: Array) -> dict[str, float]:
        """Return the error of a result (see `grouped_result`), in units of the exact values' RMS."""
        if self.problem.forward:
            part = grouped[self._images][:, self._groups][:, :, self._dst]
        else:
            part = grouped[self._groups][:, self._src][:, :, self._dst]
        difference = np.abs(part - self.exact)
        return {
            "rms": float(np.sqrt(np.mean(difference**2))) / self.scale,
            "max": float(difference.max()) / self.scale,
        }


def _some(rng: np.random.Generator, size: int, count: int) -> npt.NDArray[np.int64]:
    """Return `count` distinct random numbers below `size`, sorted; all of them if there are fewer."""
    return np.sort(rng.permutation(size)[:count]).astype(np.int64)
