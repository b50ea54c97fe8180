"""What this processor has, as far as the kernels care, and the setting that turns parts of it off."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from dataclasses import dataclass
from functools import cache
from typing import Literal

import llvmlite.binding as llvm

__all__ = ["IMITATE", "SETTING", "Target", "target"]

SETTING = "CONVGRAD_CPU_FEATURES"

IMITATE = "CONVGRAD_CPU_IMITATE"
"""Features (``avx512f``, ``avx512bf16``, ``amx-bf16``) whose path runs on plain instructions: slow, for tests only."""

AMX = {"amx-tile", "amx-bf16"}

# 64-bit Arm has 32 registers of four f32, so eight lanes are two of them. A tile of 6 rows and two vectors holds 24
# sums, 4 registers of the panel and one of scalars, which `fmla` takes by lane: 10 registers are loaded for 24 `fmla`,
# and none is spilled; with 7 rows some are. Four lanes and 12 rows would load 14 for as many. One vector of 9 rows, for
# the taps of a 3x3 kernel, has 18 sums, which hide the latency of four pipes; taller tiles load hardly less for each.
_ARM = ("aarch64", "arm64")
_ARM_ROWS = {1: 9, 2: 6}

_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XTILEDATA = 158, 0x1023, 18


@dataclass(frozen=True)
class Target:
    """Name of the processor, the vector width in f32 lanes, and the rows of a register tile by vectors a row.

    `rows[1]` and `rows[2]` keep accumulators, one row of vectors and one scalar within the register file. `dots` is
    the instruction for products of bf16 pairs, if there is one; `converts_f16` says that there is one from f16 to f32.
    """

    name: str
    features: frozenset[str]
    lanes: int
    rows: dict[int, int]
    dots: Literal["", "amx", "avx512bf16"] = ""
    imitated: frozenset[str] = frozenset()
    converts_f16: bool = False

    @property
    def tag(self) -> str:
        """Short name of the code path, part of the name of the compile cache."""
        return "-".join((self.name, f"w{self.lanes}r{self.rows[2]}", self.dots, *sorted(self.imitated))).rstrip("-")


@cache
def _amx_granted() -> bool:
    """Ask Linux for the tile registers: once for a process and those forked from it."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    answer: int = ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XTILEDATA)
    return answer == 0


def _words(text: str) -> frozenset[str]:
    return frozenset(word.strip() for word in text.split(",")) - {""}


def _dots(host: frozenset[str], imitated: frozenset[str]) -> Literal["", "amx", "avx512bf16"]:
    if "amx-bf16" in imitated or (host >= AMX and _amx_granted()):
        return "amx"
    return "avx512bf16" if "avx512bf16" in host | imitated else ""


@cache
def target() -> Target:
    """Read the processor once.

    `CONVGRAD_CPU_FEATURES` is a comma-separated list of the optional features to use (``avx512f``, ``fma``, ``f16c``,
    ``avx512bf16``, ``amx-tile``, ``amx-bf16``); unset means all that there are. An empty value leaves the portable
    path.
    """
    host = frozenset(name for name, present in llvm.get_host_cpu_features().items() if present)
    setting = os.environ.get(SETTING)
    if setting is not None:
        host &= _words(setting)
    imitated = _words(os.environ.get(IMITATE, ""))
    dots = _dots(host, imitated)
    name = llvm.get_host_cpu_name()
    arm = platform.machine() in _ARM
    converts_f16 = arm or "f16c" in host
    if "avx512f" in host | imitated:
        return Target(name, host, 16, {1: 9, 2: 9}, dots, imitated, converts_f16)
    if arm:
        return Target(name, host, 8, _ARM_ROWS, dots, imitated, converts_f16)
    rows = 6 if "fma" in host or setting is None else 4
    return Target(name, host, 8, {1: 8, 2: rows}, dots, imitated, converts_f16)
