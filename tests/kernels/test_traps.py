"""The named traps, in every dtype and layout, for both gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.kernels.harness import check
from tests.problems import FORMATS, Case
from tests.traps import TRAPS

SMALL = 2_000_000  # larger ones are tested once, not in all their variants


def _variants(trap: Case) -> list[Case]:
    if trap.macs > SMALL:
        return [trap, replace(trap.mirrored(), dtype="bf16")]
    return [
        replace(each, dtype=dtype, data_format=data_format, weights_format=FORMATS[index % 4])
        for each in (trap, trap.mirrored())
        for index, (dtype, data_format) in enumerate(
            (dtype, data_format) for dtype in ("f32", "f16", "bf16") for data_format in ("NCX", "NXC")
        )
    ]


@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: trap.name)
def test_trap(trap: Case) -> None:
    """The gradient of a shape that broke others equals the oracle's, as do those of its mirror image and variants."""
    for case in _variants(trap):
        check(case, workers=2)


@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: trap.name)
def test_trap_forward(trap: Case) -> None:
    """ConvTranspose over the same geometry, which is the backward pass of the data, equals the oracle's; so does
    Convolution."""
    for geometry in (trap, trap.mirrored()):
        if geometry.transposed or trap.macs <= SMALL:
            for case in _variants_forward(geometry):
                check(case, workers=2)


def _variants_forward(geometry: Case) -> list[Case]:
    case = replace(geometry, op=geometry.op.removesuffix("BackwardWeights"))
    if case.macs > SMALL:
        return [case]
    return [
        replace(case, dtype=dtype, data_format=data_format, bias=bias)
        for dtype in ("f32", "bf16")
        for data_format, bias in (("NCX", True), ("NXC", False))
    ]
