"""The kernels on a GPU as others plan and run them: a problem is one unit, its tensors are copied there and back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kernels.gpu.device import REFERENCE_NAME
from kernels.plan import Kernel, Stop, Storage, Unit
from kernels.problem import ConvProblem

__all__ = ["GPU_KERNELS"]


class GpuKernel:
    """Computes every problem on the GPU of this process; `reference` with the bits of the CPU's reference."""

    def __init__(self, name: str, *, reference: bool) -> None:
        self.name = name
        self._reference = reference

    def refuse(self, problem: ConvProblem) -> str | None:
        """Refuse nothing."""
        return None

    def units(self, problem: ConvProblem, workers: int) -> tuple[list[Unit], int]:
        """Return one unit."""
        shape = problem.output_shape
        return [Unit(0, 0, (0,) * len(shape), shape, problem.macs)], 0

    def run(
        self, problem: ConvProblem, unit: Unit, inputs: Sequence[Storage], output: Storage, scratch: Storage | None,
        stop: Stop,
    ) -> bool:  # fmt: skip
        """Compute the output; raises `MemoryError` if the GPU's memory is too small, and what CUDA raises."""
        from kernels.gpu.arrays import compute_arrays  # PyTorch and Triton are loaded where they compute

        if stop():
            return False
        np.copyto(output, compute_arrays(problem, inputs, reference=self._reference))
        return True


GPU_KERNELS: dict[bool, Kernel] = {
    False: GpuKernel("triton", reference=False),
    True: GpuKernel(REFERENCE_NAME, reference=True),
}
"""The kernels on a GPU: the fast one, and by True the reference."""
