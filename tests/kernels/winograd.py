"""Problems that Winograd takes, and their results between guards."""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels import ConvProblem, plan, run_unit, storage_dtype
from kernels.arena import arena
from tests.kernels.harness import Guarded, stored
from tests.naive import round_to

ROOMS = (
    *(f"acc{depth}" for depth in range(4)),
    "stage",
    "scalar stage",
    "vector",
    "scalar",
    "taps",
    "panels",
    "sums",
    "staged",
)


def draw(rng: np.random.Generator, **named: Any) -> ConvProblem:
    """Draw a problem that Winograd takes: odd and tiny sizes, uneven pads, groups, depths; both gradients of weights
    where no `op` is named."""

    def pick(*options: Any) -> Any:
        return options[int(rng.integers(len(options)))]

    src, pads = [pick(1, 2, 3, 7, 8, 15), pick(1, 2, 5, 7, 14, 31)], [pick(0, 1, 2, 3), pick(0, 1, 2, 3)]
    dst = [max(1, size + pad + pick(0, 1, 2) - 2) for size, pad in zip(src, pads, strict=True)]
    kernel = [3, 3]
    if pick(True, False, False):
        src, dst, kernel, pads = [4, *src], [4, *dst], [pick(1, 3), *kernel], [pick(0, 1), *pads]
    groups, op = pick(1, 1, 2, 3), pick("ConvTransposeBackwardWeights", "ConvolutionBackwardWeights")
    op, ones = named.get("op", op), (1,) * len(kernel)
    transposed = op.startswith("ConvT")
    chosen: dict[str, Any] = {
        "op": op, "dtype": pick("f32", "f32", "f16", "bf16"), "n": pick(1, 2, 5), "groups": groups,
        "src_channels": groups * pick(16, 17, 24, 40, 70), "dst_channels": groups * pick(16, 18, 33, 64, 100),
        "src_spatial": tuple(dst if transposed else src), "dst_spatial": tuple(src if transposed else dst),
        "kernel": tuple(kernel), "strides": ones, "dilations": ones, "pads_begin": tuple(pads),
        "data_format": pick("NXC", "NCX"), "weights_format": pick("XIO", "OIX", "IOX", "XOI"),
        "groups_axis": pick("I", "O"), "algorithm": "winograd",
    }  # fmt: skip
    return ConvProblem(**{**chosen, **named})


def as_stored(values: Any, dtype: str) -> Any:
    """Return values rounded to `dtype`, as the kernels store them."""
    return stored(round_to(dtype, values))


def as_floats(result: Any, dtype: str) -> Any:
    """Return what the kernels stored as NumPy's floats."""
    return (result.astype(np.uint32) << 16).view(np.float32) if dtype == "bf16" else result.view(f"f{result.itemsize}")


def bits(result: Any) -> Any:
    """Return the bits of a result."""
    return result.view(f"u{result.itemsize}")


def compute(problem: ConvProblem, *inputs: Any, workers: int = 1, reverse: bool = False) -> Any:
    """Compute between guards, the units of a stage in order or in `reverse`.

    Output, scratch and a worker's room begin as NaN.
    """
    chosen = plan(problem, workers=workers)
    guards = [Guarded(each.shape, each.dtype) for each in inputs]
    for guard, each in zip(guards, inputs, strict=True):
        guard.tensor[...] = each
    output = Guarded(problem.output_shape, storage_dtype(problem.dtype))
    scratch = Guarded((chosen.scratch_bytes,), np.uint8)
    for unit in sorted(chosen.units, key=lambda unit: (unit.stage, -unit.index if reverse else unit.index)):
        for name in ROOMS:
            arena(name, 1).fill(np.nan)
        assert run_unit(chosen, unit, [guard.tensor for guard in guards], output.tensor, scratch.tensor)
    assert all(guard.intact for guard in (*guards, output, scratch)), problem
    return output.tensor
