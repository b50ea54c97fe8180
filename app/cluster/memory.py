"""A job's memory as the bridge sees it: the server's segments, mapped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from app.cluster.units import scratch_share
from kernels import Plan, Unit, box, storage_dtype

__all__ = ["Memory"]

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Memory:
    """The inputs and the output as tensors, and the bytes of the scratch, if the plan has any."""

    inputs: tuple[Array, ...]
    output: Array
    scratch: Array | None

    @staticmethod
    def count(plan: Plan) -> int:
        """Return the number of segments of a job: inputs, output, scratch."""
        return len(plan.problem.input_shapes) + 1 + bool(plan.scratch_bytes)

    @classmethod
    def of(cls, plan: Plan, segments: Sequence[Any]) -> Self:
        """View the segments of a job, of which all but the inputs must be writable."""
        problem, shapes = plan.problem, plan.problem.input_shapes
        dtype = storage_dtype(problem.dtype)
        inputs = tuple(_tensor(*each, dtype) for each in zip(segments[: len(shapes)], shapes, strict=True))
        output = _tensor(segments[len(shapes)], problem.output_shape, problem.output_dtype)
        scratch = np.frombuffer(segments[-1], np.uint8, plan.scratch_bytes) if plan.scratch_bytes else None
        return cls(inputs, output, scratch)

    def write(self, plan: Plan, unit: Unit, result: Array) -> None:
        """Put the result of a unit of the first stage in its place: a box of the output, or a share of the scratch."""
        if unit.offset is None:
            assert self.scratch is not None
            self.scratch[scratch_share(plan, unit)] = result
        else:
            box(self.output, unit)[...] = result


def _tensor(memory: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    return np.frombuffer(memory, dtype, count=prod(shape)).reshape(shape)
