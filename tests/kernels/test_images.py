"""Units that name the images they read, and where they leave partial sums: no other ones have an effect."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kernels import ConvProblem
from tests.app.pool.fleet import random_inputs
from tests.kernels.poison import check_that_other_images_are_not_read

SQUARE = ConvProblem(
    op="ConvolutionBackwardWeights", dtype="f32", n=8, src_channels=32, dst_channels=48, groups=1,
    src_spatial=(40, 40), dst_spatial=(40, 40), kernel=(3, 3), strides=(1, 1), dilations=(1, 1), pads_begin=(1, 1),
    data_format="NCX", weights_format="OIX",
)  # fmt: skip
FEW = replace(SQUARE, n=32, src_channels=3, dst_channels=16, kernel=(7, 7), dst_spatial=(34, 34), pads_begin=(0, 0))
DEPTHWISE = replace(SQUARE, n=128, src_channels=64, dst_channels=64, groups=64, groups_axis="O")
LINE = replace(
    SQUARE, n=9, src_channels=80, dst_channels=70, src_spatial=(1500,), dst_spatial=(1500,), kernel=(5,), strides=(1,),
    dilations=(2,), pads_begin=(4,),
)  # fmt: skip
VOLUME = replace(
    SQUARE, n=8, src_channels=20, dst_channels=24, src_spatial=(12, 14, 16), dst_spatial=(12, 14, 16), kernel=(3, 3, 3),
    strides=(1, 1, 1), dilations=(1, 1, 1), pads_begin=(1, 1, 1),
)  # fmt: skip
STRIDED = replace(SQUARE, n=16, src_channels=64, dst_spatial=(20, 20), strides=(2, 2))
PROBLEMS = {
    "square": SQUARE, "square last": replace(SQUARE, data_format="NXC", weights_format="XIO"),
    "square f16": replace(SQUARE, dtype="f16"), "square bf16 last": replace(SQUARE, dtype="bf16", data_format="NXC"),
    "few": FEW, "few last": replace(FEW, data_format="NXC"), "depthwise": DEPTHWISE,
    "depthwise last": replace(DEPTHWISE, data_format="NXC"), "line": LINE, "volume": VOLUME, "strided": STRIDED,
    "wide": replace(SQUARE, src_channels=64, dst_channels=128, src_spatial=(28, 28), dst_spatial=(28, 28)),
    "winograd": replace(SQUARE, n=32, algorithm="winograd"),
    "winograd volume": replace(VOLUME, n=64, dst_channels=96, algorithm="winograd"),
    "transposed": replace(SQUARE, op="ConvTransposeBackwardWeights", weights_format="IOX"),
}  # fmt: skip


@pytest.mark.parametrize("workers", [2, 16])
@pytest.mark.parametrize("name", PROBLEMS)
def test_other_images_are_not_read(name: str, workers: int) -> None:
    """A unit gives the same bits whatever is in other images, and writes nothing but its sums."""
    check_that_other_images_are_not_read(PROBLEMS[name], random_inputs(PROBLEMS[name]), workers)
