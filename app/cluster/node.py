"""A worker on a machine of the cluster: load the kernels, then compute one unit at a time.

It runs in a process that Ray starts. It holds no state that a result depends on: a unit gives the same bytes on every
worker whose `identity` is the same.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from app.cluster.units import Portion, portions, scratch_share
from kernels import Plan, box, run_unit, warmup
from kernels.target import target

__all__ = ["NodeWorker", "identity"]

Array = npt.NDArray[Any]


@cache
def identity() -> str:
    """Name what decides the bits of a result: target, sources of the kernels and of this package, NumPy, compiler."""
    import kernels

    versions = [np.__version__, *map(_version, ("numba", "llvmlite", "convgrad"))]
    digest = sha256(" ".join(versions).encode())
    for folder in (Path(kernels.__file__).parent, Path(__file__).parent):
        for source in sorted(folder.rglob("*.py")):
            digest.update(source.read_bytes())
    return f"{target()} {target().digest} {digest.hexdigest()[:12]}"


def _version(package: str) -> str:
    from importlib.metadata import version

    return version(package)


def _prepared() -> str | None:
    """Compile and check the kernels once for this machine; return why they do not work on its processor, if so."""
    from kernels.prepare import read_verdict

    if (verdict := read_verdict()) is None:
        command = [sys.executable, "-P", "-m", "kernels.prepare", "--jobs", "1"]
        path = os.pathsep.join(path for path in sys.path if path)
        ended = subprocess.run(  # noqa: S603 - our own module in our own interpreter
            command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
        )
        verdict = read_verdict()
        if ended.returncode and not (verdict and verdict.unfit):
            raise RuntimeError((ended.stderr or ended.stdout).strip().rpartition("\n")[2] or "kernels.prepare failed")
    return verdict.unfit if verdict else None


class NodeWorker:
    """The actor: `warm` first, then `compute` for each unit."""

    def warm(self) -> tuple[str, str | None]:
        """Compile and check the kernels unless this machine's cache has them, and load them.

        Returns the `identity` of this process, and why the kernels do not work on this processor, if so. Raises
        `RuntimeError` where they can't be compiled.
        """
        unfit = _prepared() if target().compiles else None
        if unfit is None:
            for _ in warmup():
                pass
        return identity(), unfit

    def compute(self, plan: Plan, read: tuple[Portion, ...], share: slice | None, *parts: Array) -> tuple[Array, float]:
        """Compute the only unit of `plan` from the parts of its inputs that it reads (see `portions`).

        Returns the box of the output that it writes, or the bytes of its `share` of the scratch, and the seconds.
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


def cut(tensor: Array, portion: Portion) -> Array:
    """View the part of an input that a unit reads."""
    return tensor[portion.index]


def arguments(plan: Plan, index: int) -> tuple[Plan, tuple[Portion, ...], slice | None]:
    """Return what `NodeWorker.compute` takes before the parts of the inputs."""
    from app.cluster.units import single

    unit = plan.units[index]
    share = scratch_share(plan, unit) if unit.offset is None else None
    return single(plan, unit), portions(plan, unit), share
