"""What this processor has, as far as the kernels care, and the setting that turns parts of it off."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache

import llvmlite.binding as llvm

__all__ = ["Cpu", "cpu"]

SETTING = "CONVGRAD_CPU_FEATURES"


@dataclass(frozen=True)
class Cpu:
    """Name of the processor, the vector width in f32 lanes, and the rows of a register tile by vectors a row.

    `rows[1]` and `rows[2]` keep accumulators, one row of vectors and one scalar within the register file.
    """

    name: str
    features: frozenset[str]
    width: int
    rows: dict[int, int]

    @property
    def tag(self) -> str:
        """Short name of the code path, part of the name of the compile cache."""
        return f"{self.name}-w{self.width}r{self.rows[2]}"


@cache
def cpu() -> Cpu:
    """Read the processor once.

    `CONVGRAD_CPU_FEATURES` is a comma-separated list of the optional features to use (``avx512f``, ``fma``); unset
    means all that there are. An empty value leaves the portable path.
    """
    host = {name for name, present in llvm.get_host_cpu_features().items() if present}
    setting = os.environ.get(SETTING)
    if setting is not None:
        host &= {word.strip() for word in setting.split(",")}
    if "avx512f" in host:
        return Cpu(llvm.get_host_cpu_name(), frozenset(host), 16, {1: 8, 2: 8})
    rows = 6 if "fma" in host or setting is None else 4
    return Cpu(llvm.get_host_cpu_name(), frozenset(host), 8, {1: 8, 2: rows})
