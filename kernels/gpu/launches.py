"""Launches of kernels, prepared with what follows from a problem, and from the second on with the compiled code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

__all__ = ["ALIGNED", "Launch"]

ALIGNED = 16
"""Bytes of an alignment that Triton compiles loads for."""


class Launch:
    """A launch on the current device and stream, for tensors of the same dtypes on one device; none of an empty grid.

    Triton finds compiled code by the dtype, alignment and value of each argument, which takes longer than the launch.
    So code for aligned tensors, which almost all are, is kept; `numbers` follow the tensors and never change.
    """

    def __init__(self, kernel: Any, grid: Sequence[int], *numbers: int, **settings: Any) -> None:
        self.kernel = kernel
        self.grid = (*grid, 1, 1)[:3]
        self.numbers = numbers
        self.settings = {"enable_fp_fusion": True, **settings}
        self._empty = not all(grid)
        self._aligned: Callable[..., None] | None = None
        self._rest: tuple[Any, ...] = ()

    def __call__(self, *tensors: Tensor) -> None:
        """Launch the kernel."""
        if self._empty:
            return
        bits = 0
        for tensor in tensors:
            bits |= (tensor.base if type(tensor) is TensorDescriptor else tensor).data_ptr()
        if bits % ALIGNED:
            self.find(self.kernel[self.grid], tensors)
        elif self._aligned is not None:
            self._aligned(*tensors, *self._rest)
        elif (compiled := self.find(self.kernel[self.grid], tensors)) is not None:
            constants = [self.settings[name] for name in self.kernel.arg_names if name in self.settings]
            self._rest = *self.numbers, *constants
            self._aligned = compiled[self.grid]

    def find(self, run: Callable[..., Any], tensors: Sequence[Tensor]) -> Any:
        """Return the compiled code that `run`, of Triton's, finds for tensors; None from Triton's interpreter."""
        return run(*tensors, *self.numbers, **self.settings)
