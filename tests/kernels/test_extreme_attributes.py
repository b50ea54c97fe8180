"""Strides, dilations and pads up to the limit of s64, far beyond any tensor."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kernels.projections import meetings
from kernels.reference import taps
from tests.kernels.harness import check, problem_of
from tests.problems import Case

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


@pytest.mark.parametrize("name", _cases(HUGE))
@pytest.mark.parametrize("size", [10_000, 2**40, HUGE], ids=["1e4", "2^40", "2^61"])
def test_where_projected_planes_meet(name: str, size: int) -> None:
    """The pixels that meet in a tap are those of the reference; where none do, no position is far outside."""
    for case in (_cases(size)[name], _cases(size)[name].mirrored()):
        dims = problem_of(case).dims
        for (_, narrow, wide), meet in zip(taps(dims), meetings(dims), strict=True):
            counts = [part.stop - part.start for part in narrow]
            assert meet["counts"].tolist() == counts
            assert meet["narrow"].tolist() == [part.start for part in narrow]
            starts = [part.start if count else 0 for part, count in zip(wide, counts, strict=True)]
            assert meet["wide"].tolist() == starts
