"""The float64 reference behind the same interface as the compiled kernels: one unit a kernel position or image."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from kernels import reference
from kernels.plan import Stop, Storage, Unit, box
from kernels.problem import ConvProblem

__all__ = ["REFERENCE"]


class ReferenceKernel:
    """Sums in float64 over NumPy matrix products and rounds once; takes every problem."""

    name = "reference_f64"

    def refuse(self, problem: ConvProblem) -> str | None:
        """Refuse nothing."""
        return None

    def units(self, problem: ConvProblem, workers: int) -> tuple[list[Unit], int]:
        """Cut a weight gradient by kernel positions and a ConvTranspose by images."""
        if problem.forward:
            shape = (1, *problem.output_shape[1:])
            offsets = [(image, *(0,) * (len(shape) - 1)) for image in range(problem.n)] or [(0,) * len(shape)]
            if problem.n == 0:
                shape = problem.output_shape
        else:
            x = problem.weights_format.index("X")
            ones = (1,) * problem.rank
            full = problem.weights_shape
            shape = (*full[:x], *ones, *full[x + problem.rank :])
            offsets = [(*(0,) * x, *map(int, position), *(0,) * (2 - x)) for position in np.ndindex(*problem.kernel)]
        macs = problem.macs // max(1, len(offsets))
        return [Unit(i, 0, offset, shape, macs, (i,)) for i, offset in enumerate(offsets)], 0

    def run(
        self,
        problem: ConvProblem,
        unit: Unit,
        inputs: Sequence[Storage],
        output: Storage,
        scratch: Storage | None,
        stop: Stop,
    ) -> bool:
        """Compute one kernel position or one image."""
        if stop():
            return False
        if output.size == 0:
            return True
        target = box(output, unit)
        if problem.forward:
            result = reference.conv_transpose(problem, inputs, unit.part[0])
            channels = result.reshape(problem.dst_channels, *problem.dst_spatial)
            if problem.data_format == "NXC":
                channels = np.moveaxis(channels, 0, -1)
            target[0] = reference.narrow(channels, problem.dtype)
            return True
        position = [int(at) for at in np.unravel_index(unit.part[0], problem.dims.kernel)]
        gradient = reference.tap_gradient(problem, inputs, reference.tap_slices(problem.dims, position), stop)
        if gradient is None:
            return False
        target[...] = reference.narrow(_arrange(gradient, problem), problem.dtype).reshape(target.shape)
        return True


def _arrange(gradient: reference.Array, problem: ConvProblem) -> reference.Array:
    """Bring (groups, wide, narrow) of one kernel position into the order of the weight letters."""
    wide, narrow = ("O", "I") if problem.op.startswith("ConvT") else ("I", "O")
    # the axis that groups do not divide holds the channels of all groups one after another
    if problem.groups_axis == wide:
        rows = {wide: gradient.shape[1], narrow: prod(gradient.shape[::2])}
        matrix = gradient.transpose(1, 0, 2).reshape(rows[wide], rows[narrow])
    else:
        matrix = gradient.reshape(-1, gradient.shape[2])
    letters = problem.weights_format.replace("X", "")
    return matrix if letters == wide + narrow else matrix.T


REFERENCE = ReferenceKernel()
