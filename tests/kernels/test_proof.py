"""The proof of compiled code detects any single function that is wrong."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from kernels import compute, proof
from kernels.emit.brgemm import MICRO, micro_entries, micro_table
from kernels.emit.depthwise import depthwise_entries, depthwise_entry
from kernels.target import target

_NOTHING = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 8)(lambda *_: None)


def _nothing() -> int:
    address = ctypes.cast(_NOTHING, ctypes.c_void_p).value
    assert address
    return address


def test_right_code_is_proved() -> None:
    """On this processor all functions pass."""
    names = list(proof.prove())
    assert len(names) > 200
    assert len(names) == len(set(names))
    parts = [list(proof.prove(part, 2)) for part in range(2)]
    assert [parts[number % 2][number // 2] for number in range(len(names))] == names


def test_a_fault_of_the_reference_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What all compiled functions share, such as packing, is compared with NumPy."""
    monkeypatch.setattr(proof, "compute", lambda *given, **named: np.zeros_like(compute(*given, **named)))
    with pytest.raises(ArithmeticError, match=r"problem 0, .* is wrong"):
        list(proof.prove())


@pytest.mark.parametrize("entry", micro_entries(), ids=lambda entry: f"{entry[0]}-{entry[1]}")
def test_a_tile_that_does_nothing_is_found(monkeypatch: pytest.MonkeyPatch, entry: tuple[str, int]) -> None:
    """Each micro-kernel is tested by itself, and the error names it."""
    name, vectors = entry
    table = micro_table().copy()
    table[MICRO[name] + vectors - 1] = _nothing()
    monkeypatch.setattr(proof, "micro_table", lambda: table)
    with pytest.raises(ArithmeticError, match=rf"micro-kernel {name}, 1 x {vectors} is wrong"):
        list(proof.prove())


@pytest.mark.parametrize("entry", depthwise_entries(), ids=lambda entry: f"{entry[0]}-{entry[1]}")
def test_a_depthwise_tile_that_does_nothing_is_found(monkeypatch: pytest.MonkeyPatch, entry: tuple[str, str]) -> None:
    """Those of pixels, of groups and of taps are tested by themselves, in each dtype."""
    monkeypatch.setattr(
        proof, "depthwise_entry", lambda *given: _nothing() if given == entry else depthwise_entry(*given)
    )
    kind, dtype = entry
    named = f"gradient in {dtype}, tile 1" if kind == "taps" else f"line of 1 taps in {dtype}, stride 1, for 1 {kind}"
    with pytest.raises(ArithmeticError, match=f"{named} is wrong"):
        list(proof.prove())


@pytest.mark.heavy
@pytest.mark.skipif(not target().dots, reason="no instruction for pairs of bf16 here, nor imitated")
def test_products_that_do_nothing_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block of bf16 products is used by some problem of the proof."""
    from kernels.emit import dots

    silent = []
    for entry in {*range(len(dots.dot_table()))} - {dots.BEGIN, dots.END}:  # without AMX these do nothing
        table = dots.dot_table().copy()
        table[entry] = _nothing()
        with monkeypatch.context() as patch:
            for module in ("gradient.dots.unit", "forward.amx")[: 2 if target().dots == "amx" else 1]:
                patch.setattr(f"kernels.{module}.dot_table", lambda table=table: table)
            try:
                list(proof.prove())
            except ArithmeticError:
                continue
        silent.append(entry)
    assert not silent
