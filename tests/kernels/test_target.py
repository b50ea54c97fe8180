"""The target: which one a processor takes, how settings change it, and what its code may contain."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator

import llvmlite.binding as llvm
import pytest

from kernels.target import KNOWN, NAME, REFERENCE, Target, best, host_features, narrower, target
from kernels.target.host import BUILD, IMITATE, _amx_granted

SETTINGS = (NAME, IMITATE, BUILD)
BY_NAME = {known.name: known for known in KNOWN}
X86 = [known for known in KNOWN if known.arch == "x86_64"]


class _Library:
    """A C library whose kernel grants or refuses the tile registers."""

    answer = 0

    def __init__(self, _: object) -> None:
        self.syscall = lambda *_: self.answer


class Machine:
    """A machine with a chosen processor and environment."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        for name in SETTINGS:
            patch.delenv(name, raising=False)
        patch.setattr(ctypes, "CDLL", _Library)
        patch.setattr("sys.platform", "linux")
        self.has("x86_64", "sapphirerapids", BY_NAME["sapphirerapids"].features)

    def has(self, arch: str, name: str, features: frozenset[str]) -> None:
        """Set the machine's processor."""
        every = frozenset().union(*(known.features for known in KNOWN if known.arch == arch))
        self._patch.setattr("platform.machine", lambda: arch)
        self._patch.setattr(llvm, "get_host_cpu_name", lambda: name)
        self._patch.setattr(llvm, "get_host_cpu_features", lambda: {each: each in features for each in every})
        self.forget()

    def set(self, name: str, value: str) -> None:
        """Set an environment variable."""
        self._patch.setenv(name, value)

    def refuses_tiles(self) -> None:
        """Make the operating system refuse the registers of AMX."""
        self._patch.setattr(_Library, "answer", -1)
        self.forget()

    def target(self) -> Target:
        """Return the target, chosen anew."""
        return target.__wrapped__()

    def forget(self) -> None:
        """Clear what is cached about the processor."""
        _amx_granted.cache_clear()
        host_features.cache_clear()


@pytest.fixture
def machine() -> Iterator[Machine]:
    """A Sapphire Rapids without any settings."""
    with pytest.MonkeyPatch.context() as patch:
        machine = Machine(patch)
        yield machine
    machine.forget()


@pytest.mark.parametrize("known", KNOWN, ids=str)
def test_a_known_processor_takes_its_own_target(machine: Machine, known: Target) -> None:
    """Each known processor takes its own target."""
    machine.has(known.arch, known.cpu, known.features)
    assert machine.target() == known


@pytest.mark.parametrize(
    ("name", "like", "expected"),
    [
        ("znver6", "znver5", "znver5"), ("znver1", "haswell", "znver3"),
        ("icelake-server", "skylake-avx512", "skylake-avx512"), ("graniterapids", "sapphirerapids", "sapphirerapids"),
        ("skylake", "haswell", "haswell"), ("core2", "x86-64", "x86-64"),
    ],
)  # fmt: skip
def test_other_processors_take_the_widest_that_fits(machine: Machine, name: str, like: str, expected: str) -> None:
    """A processor without its own target takes its family's latest, or the widest whose features it has."""
    machine.has("x86_64", name, BY_NAME[like].features | {"avx512fp16"})
    assert machine.target().name == expected
    # Products of bf16 and 16 lanes need AVX512F and AVX512BW: a Knights Landing computes with eight lanes.
    machine.has("x86_64", "knl", BY_NAME["haswell"].features | {"avx512f", "avx512cd", "avx512bf16"})
    assert (machine.target().lanes, machine.target().dots) == (8, "")
    with pytest.raises(ValueError, match="no kernels for riscv64 processors like sifive"):
        best("riscv64", "sifive", frozenset())


def test_amx_is_taken_only_where_linux_grants_it(machine: Machine) -> None:
    """Without permission for the tile registers f32 is used: on these processors dot products are slower."""
    assert machine.target().dots == "amx"
    machine.refuses_tiles()
    assert machine.target().name == "skylake-avx512"
    machine.set(NAME, "cooperlake")
    assert machine.target().dots == "avx512bf16"


def test_a_target_can_be_named(machine: Machine) -> None:
    """A setting restricts a processor to a narrower target, and the compiler to its features; empty, to none."""
    every = frozenset().union(*(known.features for known in X86))
    for known in X86:
        machine.set(NAME, known.name)
        assert machine.target() == known
        flags = dict.fromkeys(known.llvm_features(every).split(","))
        assert {flag[1:] for flag in flags} == every
        assert {flag[1:] for flag in flags if flag[0] == "+"} == known.features
    machine.set(NAME, "")
    assert machine.target().dots == "amx"
    machine.set(NAME, "reference")
    assert not machine.target().compiles


@pytest.mark.parametrize(
    ("processor", "name", "message"),
    [
        ("", "znver9", "znver9 is not a known target; this processor can run cooperlake, haswell"),
        ("haswell", "znver4", "znver4 needs features that this processor does not have"),
    ],
)
def test_wrong_settings(machine: Machine, processor: str, name: str, message: str) -> None:
    """An unknown target, or one that the processor can't run, is an error that lists those it can."""
    if processor:
        machine.has("x86_64", processor, BY_NAME[processor].features)
    machine.set(NAME, name)
    with pytest.raises(ValueError, match=message):
        machine.target()


def test_every_target_has_narrower_ones_down_to_the_reference() -> None:
    """From every target, repeated narrowing ends at the reference, and the same processor can run each step."""
    for known in KNOWN:
        step = known
        while step.compiles:
            following = narrower(step)
            assert following == REFERENCE or (following.path < step.path and following.features <= step.features)
            step = following
    steps = [step := BY_NAME["sapphirerapids"]]
    while step.compiles:
        steps.append(step := narrower(step))
    assert [s.dots for s in steps[:3]] == ["amx", "", ""]
    assert [s.lanes for s in steps[1:3]] == [16, 8]
    assert narrower(BY_NAME["znver5"]).dots == ""
    assert narrower(BY_NAME["skylake-avx512"]).name == "haswell"


def test_another_target_needs_another_process() -> None:
    """What modules compiled for stays the target when a setting changes, until a process starts with it."""
    script = """if True:
        import os
        from kernels.emit.brgemm import WIDTH
        from kernels.target import NAME, target
        before = target()
        os.environ[NAME] = "reference"
        print(before.name, target() is before, target().lanes == WIDTH)
    """
    found = [
        subprocess.run(
            [sys.executable, "-c", script], env={**os.environ, **more}, capture_output=True, text=True
        ).stdout
        for more in ({}, {NAME: REFERENCE.name})
    ]
    assert [each.split() for each in found] == [[name, "True", "True"] for name in (target().name, REFERENCE.name)]


def test_the_digest_tells_targets_apart() -> None:
    """Everything that affects the code, including f16's conversion, gets its own folder for compiled code."""
    without = Target("haswell", "x86_64", "haswell", BY_NAME["haswell"].features - {"f16c"})
    imitated = Target("haswell", "x86_64", "haswell", BY_NAME["haswell"].features, frozenset({"avx512f"}))
    digests = {each.digest for each in (*KNOWN, without, imitated)}
    assert len(digests) == len(KNOWN) + 2


def test_llvm_knows_every_feature() -> None:
    """LLVM would ignore a misspelt feature, so all names must be among those that it lists for this processor."""
    mine = [known for known in KNOWN if known.arch == target().arch]
    assert mine
    if target().arch == "x86_64":
        assert not frozenset().union(*(known.features for known in mine)) - host_features()[1]
