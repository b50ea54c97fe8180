"""Which target this process computes for: what the processor has, and the settings that narrow it."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from dataclasses import replace
from functools import cache

import llvmlite.binding as llvm

from kernels.target.known import AMX, KNOWN, REFERENCE, Target, best

__all__ = ["BUILD", "IMITATE", "NAME", "host_arch", "host_features", "host_target", "target"]

NAME = "CONVGRAD_TARGET"
"""Setting: the name of a known target that this processor can run, or ``reference``."""

IMITATE = "CONVGRAD_CPU_IMITATE"
"""Features (``avx512f``, ``avx512bf16``, ``amx-bf16``) whose path runs on plain instructions: slow, for tests only."""

BUILD = "CONVGRAD_BUILD_FOR"
"""The name of a known target that is compiled for, but not run."""

_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XTILEDATA = 158, 0x1023, 18


@cache
def _amx_granted() -> bool:
    """Ask Linux for the tile registers: once for a process and those forked from it."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    answer: int = ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XTILEDATA)
    return answer == 0


def host_arch() -> str:
    """Name this machine's architecture as targets do."""
    machine = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(machine, machine)


@cache
def host_features() -> tuple[frozenset[str], frozenset[str]]:
    """Return the features that this processor has and the kernel grants, and all that LLVM knows of."""
    flags = llvm.get_host_cpu_features()
    present = frozenset(name for name, there in flags.items() if there)
    if host_arch() == "aarch64":
        present |= {"fp-armv8", "neon"}  # every 64-bit Arm that runs Linux has them
    elif AMX & present and not _amx_granted():
        present -= AMX
    return present, frozenset(flags)


def host_target() -> Target:
    """Return the widest target for this processor.

    Raises ValueError where there is none.
    """
    return best(host_arch(), llvm.get_host_cpu_name(), host_features()[0])


def _named(name: str, features: frozenset[str]) -> Target:
    """Find a known target of this architecture; raises ValueError for one that these `features` do not suffice for."""
    if name == REFERENCE.name:
        return REFERENCE
    mine = [target for target in KNOWN if target.arch == host_arch()]
    for target in mine:
        if target.name == name and target.features <= features:
            return target
    able = ", ".join(sorted(target.name for target in mine if target.features <= features))
    known = any(target.name == name for target in mine)
    what = "needs features that this processor does not have" if known else "is not a known target"
    raise ValueError(f"{NAME}: {name} {what}; this processor can run {able}, reference")


@cache
def target() -> Target:
    """Choose the target once for this process: the processor's widest, unless `CONVGRAD_TARGET` names another one.

    Modules compile for it as they are imported, so another target needs another process. Raises ValueError, which lists
    what there is, for a name that is unknown or that this processor can't run.
    """
    if name := os.environ.get(BUILD):
        return next(known for known in KNOWN if known.name == name)
    name = os.environ.get(NAME)
    chosen = _named(name, host_features()[0]) if name else host_target()
    imitated = (word.strip() for word in os.environ.get(IMITATE, "").split(","))
    return replace(chosen, imitated=frozenset(imitated) - {""})
