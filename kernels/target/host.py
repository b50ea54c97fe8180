"""Which target this process computes for: what the processor has, and the settings that narrow it."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Iterable
from dataclasses import replace
from functools import cache

import llvmlite.binding as llvm

from kernels.target.known import AMX, FEATURE_WORDS, KNOWN, REFERENCE, Target, best

__all__ = ["BUILD", "IMITATE", "NAME", "SETTING", "host_arch", "host_features", "host_target", "target"]

NAME = "CONVGRAD_TARGET"
"""Setting: the name of a known target that this processor can run, or ``reference``."""

SETTING = "CONVGRAD_CPU_FEATURES"
"""Setting: a comma-separated list of the optional features to use; unset or empty means all that there are."""

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


def _words(text: str) -> frozenset[str]:
    return frozenset(word.strip() for word in text.split(",")) - {""}


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"


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


def _named(setting: str, name: str, features: frozenset[str]) -> Target:
    """Find a known target of this architecture; raises ValueError for one that these `features` do not suffice for."""
    if name == REFERENCE.name:
        return REFERENCE
    mine = [target for target in KNOWN if target.arch == host_arch()]
    for target in mine:
        if target.name == name and target.features <= features:
            return target
    able = _listed(target.name for target in mine if target.features <= features)
    known = any(target.name == name for target in mine)
    what = "needs features that this processor does not have" if known else "is not a known target"
    raise ValueError(f"{setting}: {name} {what}; this processor can run {able}, reference")


def _allowed(features: frozenset[str], text: str) -> frozenset[str]:
    """Leave those of `features` that `text` lists, with what they need, and those that can't be turned off."""
    words = _words(text)
    if unknown := words - FEATURE_WORDS.keys():
        raise ValueError(f"{SETTING}: {_listed(unknown)} is unknown; known are {_listed(FEATURE_WORDS)}")
    able = {word for word, needs in FEATURE_WORDS.items() if needs <= features}
    if impossible := words - able:
        raise ValueError(
            f"{SETTING}: this processor can't run {_listed(impossible)}; of the known ones"
            f" ({_listed(FEATURE_WORDS)}) it can run {_listed(able)}"
        )
    optional = frozenset().union(*FEATURE_WORDS.values())
    return features - optional | frozenset().union(*(FEATURE_WORDS[word] for word in words))


@cache
def target() -> Target:
    """Choose the target once for this process: the processor's widest, unless a setting narrows it.

    Modules compile for it as they are imported, so another target needs another process. `CONVGRAD_TARGET` names one;
    `CONVGRAD_CPU_FEATURES` lists the optional features to use. Raises ValueError, which lists what there is, for a name
    or feature that is unknown or that this processor does not have.
    """
    settings = os.environ
    imitated = _words(settings.get(IMITATE, ""))
    if name := settings.get(BUILD):
        return next(known for known in KNOWN if known.name == name)
    features, _ = host_features()
    if name := settings.get(NAME):
        chosen = _named(NAME, name, features)
    elif text := settings.get(SETTING):
        # known targets are steps on which features can lie between: these are compiled for just what is listed
        base = host_target()
        allowed = _allowed(base.features | (features & {"avx512bf16"}), text)  # slow ones may be asked for
        widest = best(base.arch, base.name, allowed)
        chosen = (
            replace(widest, name=f"{widest.name}-custom", features=allowed) if allowed != widest.features else widest
        )
    else:
        chosen = host_target()
    return replace(chosen, imitated=imitated)
