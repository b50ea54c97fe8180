"""The processors that kernels are compiled for, as data: names, LLVM's features, registers.

A machine takes the best of these whose features it has, so that code which was generated for one of them, on any
machine, is found on every machine that it is for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from typing import Literal

__all__ = ["AMX", "KNOWN", "REFERENCE", "Dots", "Target", "best", "narrower"]

Arch = Literal["x86_64", "aarch64"]
Dots = Literal["", "amx", "avx512bf16"]

AMX = frozenset({"amx-tile", "amx-bf16"})

_X86 = frozenset(["64bit", "cmov", "cx8", "fxsr", "mmx", "sse", "sse2"])
_SSE4 = _X86 | frozenset(["cx16", "sahf", "sse3", "ssse3", "sse4.1", "sse4.2", "popcnt", "crc32"])
_AVX = _SSE4 | frozenset(["avx", "f16c", "xsave"])
_AVX2 = _AVX | frozenset(["avx2", "fma", "bmi", "bmi2", "lzcnt", "movbe"])
_AVX512 = _AVX2 | frozenset(["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"])
_BF16 = _AVX512 | {"avx512bf16"}
_AMX = _BF16 | AMX
_NEON = frozenset({"fp-armv8", "neon"})


@dataclass(frozen=True)
class Target:
    """A processor as a value: kernels are laid out, compiled and cached for exactly what it says.

    `cpu` is LLVM's name, `features` are what the compiler may emit and `imitated` those whose paths run on plain
    instructions.
    """

    name: str
    arch: Arch
    cpu: str
    features: frozenset[str]
    imitated: frozenset[str] = frozenset()

    @cached_property
    def lanes(self) -> int:
        """Number of f32 in a vector; whatever is imitated has 16."""
        return 16 if self.imitated or self.features >= {"avx512f", "avx512bw"} else 8

    @cached_property
    def registers(self) -> int:
        """Number of vectors in registers: without AVX and on Arm, where a register has 4 lanes, two make a vector."""
        if self.lanes == 16:
            return 32
        return 16 if self.arch == "aarch64" or "avx" in self.features else 8

    @cached_property
    def dots(self) -> Dots:
        """The instruction for products of bf16 pairs, if there is one; it comes with AVX512F and AVX512BW."""
        if self.lanes < 16:
            return ""
        if "amx-bf16" in self.imitated or self.features >= AMX:
            return "amx"
        return "avx512bf16" if "avx512bf16" in self.features | self.imitated else ""

    @cached_property
    def batch_rows(self) -> dict[int, int]:
        """Rows of the tallest tile of `kernels.emit.brgemm`, by vectors a row.

        Sums, one row of vectors and one scalar stay within the registers; without AVX, products take one more.
        """
        if self.registers == 32:
            return {1: 12, 2: 12}
        if self.arch == "aarch64":
            # 6 rows of two vectors are 24 sums, 4 registers of a line of vectors and one of scalars, which `fmla` takes
            # by lane: 10 registers are loaded for 24 `fmla`, and none is spilled; with 7 rows some are. Four lanes and
            # 12 rows would load 14 for as many. 9 rows of one vector, the taps of a 3x3 kernel, hide the latency.
            return {1: 9, 2: 6}
        return {1: 12, 2: 6} if self.registers == 16 else {1: 5, 2: 3}

    @property
    def fused(self) -> bool:
        """Whether a multiply-add rounds once: there is an instruction for it."""
        return self.arch == "aarch64" or bool({"fma", "avx512f"} & self.features)

    @property
    def converts_f16(self) -> bool:
        """Whether there is an instruction that converts f16."""
        return self.arch == "aarch64" or "f16c" in self.features

    @property
    def path(self) -> tuple[int, ...]:
        """How wide the code path is, for comparing: products of bf16, lanes, registers, fused multiply-adds."""
        return ("", "avx512bf16", "amx").index(self.dots), self.lanes, self.registers, int(self.fused)

    @property
    def compiles(self) -> bool:
        """Whether there is anything to compile: without it the NumPy reference computes everything."""
        return self.name != "reference"

    def llvm_features(self, known: frozenset[str]) -> str:
        """Return the compiler's feature string, in which all of `known` but ours is off, whatever `cpu` implies."""
        return ",".join(("+" if name in self.features else "-") + name for name in sorted(known | self.features))

    @property
    def digest(self) -> str:
        """A short name for what decides the code: all of the above."""
        words = self.arch, self.cpu, *sorted(self.features), "/", *sorted(self.imitated)
        return sha256(" ".join(words).encode()).hexdigest()[:12]

    def __str__(self) -> str:
        """Return the name, and what is imitated."""
        return "+".join((self.name, *(f"imitated-{name}" for name in sorted(self.imitated))))


def _x86(name: str, features: frozenset[str]) -> Target:
    return Target(name, "x86_64", name, features)


KNOWN = (
    _x86("x86-64", _X86),
    _x86("nehalem", _SSE4),
    _x86("ivybridge", _AVX),
    _x86("haswell", _AVX2),
    _x86("znver2", _AVX2),
    _x86("znver3", _AVX2),
    _x86("skylake-avx512", _AVX512),
    _x86("cooperlake", _BF16),
    _x86("znver4", _BF16),
    _x86("znver5", _BF16),
    _x86("sapphirerapids", _AMX),
    Target("aarch64", "aarch64", "generic", _NEON),
    Target("neoverse-n1", "aarch64", "neoverse-n1", _NEON | {"lse"}),
    Target("neoverse-v1", "aarch64", "neoverse-v1", _NEON | {"lse", "sve"}),
)
"""From the plainest to the widest. Those with the same features differ in how LLVM schedules their instructions."""

_SLOW_DOTS = frozenset({"sapphirerapids", "emeraldrapids", "graniterapids", "graniterapids-d"})
"""Processors on which VDPBF16PS is no faster than multiply-adds: with it forward operations of bf16 take 1.6 to 1.9
times as long (Emerald Rapids). They have AMX, but not every virtual machine or container is granted it."""

REFERENCE = Target("reference", "x86_64", "", frozenset())
"""Nothing is compiled: what is left when not even the portable path works."""


def best(arch: str, name: str, features: frozenset[str]) -> Target:
    """Choose the widest known target that a processor can run: of equals its own, or its family's latest.

    Raises ValueError for an architecture without a target.
    """

    def rank(target: Target) -> tuple[object, ...]:
        place, family = KNOWN.index(target), _family(target.name) == _family(name)
        return target.path, len(target.features), target.name == name, family, place if family else -place

    fitting = [target for target in KNOWN if target.arch == arch and target.features <= features]
    if name in _SLOW_DOTS:
        fitting = [target for target in fitting if target.dots != "avx512bf16"]
    if not fitting:
        names = ", ".join(target.name for target in KNOWN)
        raise ValueError(f"there are no kernels for {arch} processors like {name}; there are for {names}")
    return max(fitting, key=rank)


def narrower(target: Target) -> Target:
    """Return the next narrower path that the same processor can run, at last the reference."""
    plain = replace(target, imitated=frozenset())
    fitting = [
        other
        for other in KNOWN
        if other.arch == target.arch and other.features <= plain.features and other.path < target.path
        if other.dots != "avx512bf16" or target.name not in _SLOW_DOTS
    ]
    if not fitting:
        return REFERENCE
    widest = max(other.path for other in fitting)
    return best(target.arch, target.name, max((o.features for o in fitting if o.path == widest), key=len))


def _family(name: str) -> str:
    return name.rstrip("0123456789")
