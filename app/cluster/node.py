"""What runs on the machines of the cluster: a check of the machine, then units, each a pure function of its inputs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from functools import cache
from hashlib import sha256
from pathlib import Path

import numpy as np

from app.cluster.units import Array, Portion
from kernels import Plan, box, run_unit, warmup
from kernels.target import target

__all__ = ["check", "compute", "identity", "load"]


@cache
def identity() -> str:
    """Return what decides the bits of a result: target, sources of the kernels and this package, NumPy, compiler."""
    from importlib.metadata import version

    import kernels

    versions = [np.__version__, *map(version, ("numba", "llvmlite", "convgrad"))]
    digest = sha256(" ".join(versions).encode())
    for folder in (Path(kernels.__file__).parent, Path(__file__).parent):
        for source in sorted(folder.rglob("*.py")):
            digest.update(source.read_bytes())
    return f"{target()} {target().digest} {digest.hexdigest()[:12]}"


def check(expected: str) -> tuple[str, str | None]:
    """Compile and check the kernels unless this machine's cache has them, or its `identity` is not the `expected` one.

    Returns the `identity`, and why the kernels do not work on this processor, if so. Raises `RuntimeError` where they
    can't be compiled.
    """
    from kernels import prepare
    from kernels.prepare import read_verdict

    if identity() != expected:
        return identity(), None
    if target().compiles and read_verdict() is None:
        command = [sys.executable, "-P", "-m", prepare.__name__, "--jobs", "1"]
        path = os.pathsep.join(path for path in sys.path if path)
        ended = subprocess.run(  # noqa: S603 - our own module in our own interpreter
            command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
        )
        if ended.returncode and read_verdict() is None:
            raise RuntimeError((ended.stderr or ended.stdout).strip().rpartition("\n")[2] or "kernels.prepare failed")
    verdict = read_verdict() if target().compiles else None
    return identity(), verdict.unfit if verdict else None


def load() -> None:
    """Load the kernels, so that the first unit of this process does not have to."""
    for _ in warmup():
        pass


def compute(plan: Plan, read: tuple[Portion, ...], share: slice | None, *parts: Array) -> tuple[Array, float]:
    """Compute the only unit of `plan` from the parts of its inputs that it reads (see `portions`).

    Returns the box of the output that it writes, or its `share` of the scratch, and the seconds.
    """
    start = time.perf_counter()
    (unit,) = plan.units
    problem = plan.problem
    shapes = zip(parts, problem.input_shapes, read, strict=True)
    inputs = [_whole(part, shape, portion) for part, shape, portion in shapes]
    output = np.empty(problem.output_shape, problem.output_dtype)
    scratch = np.empty(plan.scratch_bytes, np.uint8) if plan.scratch_bytes else None
    run_unit(plan, unit, inputs, output, scratch)
    if share is None:
        result = np.ascontiguousarray(box(output, unit))
    else:
        assert scratch is not None
        result = scratch[share].copy()
    return result, time.perf_counter() - start


def _whole(part: Array, shape: tuple[int, ...], portion: Portion) -> Array:
    """Put a part at its place in a tensor whose other pages are never touched, and so take no memory."""
    if portion.high is None:
        return part.reshape(shape)
    whole = np.empty(shape, part.dtype)
    whole[portion.index] = part
    return whole
