"""Named problems: what broke others, real layers, and attributes up to the limit of s64, far beyond any tensor."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kernels import plan
from tests.kernels.harness import check, problem_of
from tests.kernels.special import assert_propagates
from tests.problems import FORMATS, Case, fit, real_layers
from tests.traps import TRAPS

SMALL = 2_000_000  # larger ones are tested once, not in all their variants
MACS = 2_000_000
LAYERS = {case.name: case for case in real_layers()}


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
    """The gradient of a shape that broke others equals the oracle's, as do its mirror image's and variants', and of
    half of these the reference's, of half that of Inf and NaN."""
    rng = np.random.default_rng(7)
    for number, case in enumerate(_variants(trap)):
        check(case, workers=2)
        if trap.macs < 5_000_000 and (number + number // 2) % 2:  # with every dtype and layout, and either operation
            assert_propagates(rng, case)
        elif trap.macs < 5_000_000:
            check(case, reference=True)


@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: trap.name)
def test_trap_forward(trap: Case) -> None:
    """ConvTranspose over the same geometry, which is the backward pass of the data, equals the oracle's; so does
    Convolution."""
    for geometry in (trap, trap.mirrored()):
        case = replace(geometry, op=geometry.op.removesuffix("BackwardWeights"))
        if geometry.transposed and trap.macs > SMALL:
            check(case, workers=2)
        for dtype, bias in (("f32", True), ("f32", False), ("bf16", True), ("bf16", False)):
            if trap.macs <= SMALL:
                check(replace(case, dtype=dtype, data_format="NCX" if bias else "NXC", bias=bias), workers=2)


@pytest.mark.parametrize("name", LAYERS)
def test_layer(name: str) -> None:
    """Every real layer, at its published size, has a compiled kernel; with one image and fewer channels, the oracle's
    bits."""
    for dtype in ("f32", "f16", "bf16"):
        chosen = plan(problem_of(replace(LAYERS[name], dtype=dtype)), workers=2)
        assert chosen.kernel != "reference_f64"
        assert sum(unit.macs for unit in chosen.units) <= chosen.macs
    case: Case = fit(replace(LAYERS[name], n=1), MACS)
    check(replace(case, data_format="NXC", weights_format="XIO"), workers=2)
    check(replace(case, dtype="bf16"), workers=1)


HUGE = 2**61


def _cases(size: int) -> dict[str, Case]:
    return {
        "stride between pads": Case(
            src_channels=3, dst_channels=3, src_spatial=(1,), dst_spatial=(3,), kernel=(1,), strides=(size,),
            pads_begin=(size,), pads_end=(size,),
        ),
        "stride alone": Case(
            src_channels=3, dst_channels=9, src_spatial=(9,), dst_spatial=(1,), kernel=(2,), strides=(size,),
        ),
        "stride beside a pad": Case(
            src_channels=3, dst_channels=9, src_spatial=(2,), dst_spatial=(1,), kernel=(1,), strides=(2 * size,),
            pads_begin=(size,),
        ),
        "dilation": Case(
            src_channels=3, dst_channels=9, src_spatial=(2,), dst_spatial=(2,), kernel=(3,), dilations=(size,),
            pads_begin=(size,), pads_end=(size,),
        ),
        "stride and dilation": Case(
            src_channels=16, dst_channels=16, src_spatial=(2, 3), dst_spatial=(2, 2), kernel=(2, 2),
            strides=(size, size), dilations=(size, size), pads_begin=(size, size), pads_end=(size, size),
        ),
        "dilation up to the end": Case(
            src_channels=3, dst_channels=9, src_spatial=(3,), dst_spatial=(2,), kernel=(3,),
            dilations=(2 * size,), pads_begin=(2 * size,), pads_end=(2 * size - 1,),
        ),
        "dilation, depthwise": Case(
            groups=16, src_channels=16, dst_channels=16, src_spatial=(5, 6), dst_spatial=(5, 6), kernel=(3, 3),
            dilations=(size, size), pads_begin=(size, size), pads_end=(size, size),
        ),
        "stride, depthwise": Case(
            groups=16, src_channels=16, dst_channels=16, src_spatial=(1,), dst_spatial=(3,), kernel=(2,),
            strides=(size,), pads_begin=(size,), pads_end=(size + 1,),
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", _cases(HUGE))
@pytest.mark.parametrize("data_format", ["NCX", "NXC"])
@pytest.mark.parametrize("size", [10_000, 2**31, 2**40, HUGE], ids=["1e4", "2^31", "2^40", "2^61"])
def test_extreme_attributes(name: str, data_format: str, size: int) -> None:
    """Attributes that overflow in every product with a byte step give the oracle's bits, and allocate no memory."""
    case = replace(_cases(size)[name], data_format=data_format)
    for each in (case, case.mirrored(), replace(case.mirrored(), op="ConvTranspose")):
        check(each)
