"""The peer: oneDNN as PyTorch ships it, computing exactly the same result.

PyTorch pads both ends of an axis equally. If `pads_begin` and `pads_end` differ and no symmetric padding is
equivalent, the sampled tensor is extended with zeros beforehand (or dst cropped afterwards), outside the timing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from benchmarks.accuracy import Tensor
from benchmarks.contenders import Contender
from benchmarks.padding import padding
from kernels import ConvProblem

__all__ = ["TorchPeer", "as_torch"]


def as_torch(tensor: Tensor) -> torch.Tensor:
    """Return a tensor that shares a NumPy tensor's memory; PyTorch accepts bfloat16 only by its bits."""
    if tensor.dtype.itemsize == 2:
        kind = torch.float16 if tensor.dtype == np.float16 else torch.bfloat16
        return torch.from_numpy(tensor.view(np.int16)).view(kind)
    return torch.from_numpy(tensor)


class TorchPeer(Contender):
    """PyTorch on one layer in one layout; tensors (N, C, X) whose memory is NCX or channels last.

    PyTorch has no channels-last form for one spatial axis, so an axis of size 1 is added in front of it.
    """

    def __init__(self, problem: ConvProblem, inputs: list[Tensor], threads: int, clock: str) -> None:
        super().__init__("torch", problem, clock)
        torch.set_num_threads(threads)
        p = problem
        self._transposed = p.op.startswith("ConvTranspose")
        self._last = p.data_format == "NXC"
        self._flat = p.rank == 1 and self._last
        wide, narrow = (p.dst_spatial, p.src_spatial) if self._transposed else (p.src_spatial, p.dst_spatial)
        columns = zip(wide, narrow, p.kernel, p.strides, p.dilations, p.pads_begin, strict=True)
        self._axes = [padding(*column) for column in columns]
        src = self._data(inputs[0], not self._transposed)
        settings = (
            self._each(p.strides, 1),
            self._each([a.pads for a in self._axes], 0),
            self._each(p.dilations, 1),
        )
        extra = self._each([a.left_over for a in self._axes], 0)
        if p.forward:
            name = "conv_transpose" if self._transposed else "conv"
            self._function: Any = getattr(torch.nn.functional, f"{name}{2 if self._flat else p.rank}d")
            strides, pads, dilations = settings
            rest = (extra, p.groups, dilations) if self._transposed else (dilations, p.groups)
            self._arguments: tuple[Any, ...] = (src, self._weights(inputs[1]), None, strides, pads, *rest)
            return
        kernel_shape = (p.src_channels, p.dst_channels // p.groups)
        if not self._transposed:
            kernel_shape = (p.dst_channels, p.src_channels // p.groups)
        weights = torch.zeros(*kernel_shape, *self._each(p.kernel, 1), dtype=src.dtype)
        if self._last:
            weights = weights.contiguous(memory_format=self._format(weights))
        diff_dst = self._data(inputs[1], self._transposed)
        self._function = torch.ops.aten.convolution_backward
        self._arguments = (
            diff_dst, src, weights, None, *settings, self._transposed, extra if self._transposed else [0] * len(extra),
            p.groups, [False, True, False],
        )  # fmt: skip

    def call(self) -> Any:
        """Compute once."""
        with torch.inference_mode():
            return self._function(*self._arguments)

    def result(self, called: Any) -> tuple[Tensor, ConvProblem]:
        """Return the gradient or dst in the layout of the NCX problem."""
        p = self.problem
        found = called if p.forward else called[1]
        if self._flat:
            found = found.squeeze(2)
        if p.forward:
            for axis, (each, size) in enumerate(zip(self._axes, p.dst_spatial, strict=True)):
                found = found.narrow(2 + axis, each.low if self._transposed else 0, size)
        found = found.contiguous()
        bits = found if p.dtype == "f32" else found.view(torch.int16)
        formats: Any = {"data_format": "NCX", "weights_format": "IOX" if self._transposed else "OIX"}
        return bits.numpy(), replace(p, **formats)

    def _each(self, values: Sequence[int], fill: int) -> list[int]:
        """Return one value for each spatial axis that PyTorch sees."""
        return [fill, *values] if self._flat else list(values)

    def _format(self, tensor: torch.Tensor) -> torch.memory_format:
        return torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d

    def _data(self, tensor: Tensor, wide: bool) -> torch.Tensor:
        """Return src or diff_dst as (N, C, X), with zeros added if the tensor is the wide one."""
        data = as_torch(tensor)
        if self._flat:
            data = data.unsqueeze(1)
        if self._last:
            data = data.movedim(-1, 1)
        zeros = [side for axis in reversed(self._axes) for side in (axis.low, axis.high)]
        if wide and any(zeros):
            data = torch.nn.functional.pad(data, zeros)
            data = data.contiguous(memory_format=self._format(data) if self._last else torch.contiguous_format)
        return data

    def _weights(self, tensor: Tensor) -> torch.Tensor:
        """Return the weights of a forward problem as (I, O, X) for ConvTranspose, as (O, I, X) for Convolution."""
        weights = as_torch(tensor)
        if not self._last:
            return weights
        # (X, O, I) or (X, I, O) to PyTorch's channels last, where the second letter follows X: the memory differs, so
        # this copies
        weights = weights.movedim((-1, -2), (0, 1))
        if self._flat:
            weights = weights.unsqueeze(2)
        return weights.contiguous(memory_format=self._format(weights))
