"""Checksums of sums for random problems: `test_paths` compares real instructions with their imitations.

    python -m tests.kernels.bits COUNT

The values range from the smallest subnormal numbers to half the largest, so that each rounding and flush shows.
"""

from __future__ import annotations

import hashlib
import sys
from dataclasses import replace

import numpy as np

from kernels import plan
from kernels.target import target
from tests.kernels.harness import compute, problem_of
from tests.naive import round_to
from tests.problems import random_case

DTYPES = ("bf16",) if target().dots else ()
"""The dtypes that products of bf16 pairs compute, when products with zeros are allowed."""


def main(count: int) -> None:
    """Print one checksum per line, for sums that all ran on products of bf16 pairs where the target has these."""
    if target().dots:
        from kernels.gradient.dots import unit as bwd_dots

        bwd_dots.LEAST_USE = 0.0
    if target().dots == "amx":
        from kernels.forward import amx as fwd_dots

        fwd_dots.MOST_CYCLES = np.inf
    rng, dtypes = np.random.default_rng(61), DTYPES or ("f32", "bf16", "f16")
    while count > 0:
        case = replace(random_case(rng, longer=8), dtype=str(rng.choice(dtypes)))
        kernel = plan(problem_of(case)).kernel
        if not kernel.endswith(target().dots):
            continue
        scales = np.array([-24, 0, 0, 7]) if case.dtype == "f16" else np.array([-133, -100, -30, 0, 0, 0, 0, 30, 120])
        inputs = {
            name: round_to(case.dtype, rng.standard_normal(shape) * np.exp2(rng.choice(scales, shape)))
            for name, shape in case.input_shapes.items()
        }
        print(case.dtype, hashlib.sha256(compute(case, inputs).tobytes()).hexdigest()[:16], case)
        count -= 1


if __name__ == "__main__":
    main(int(sys.argv[1]))
