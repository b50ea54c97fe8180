"""The oracle against adjoint identities and numbers computed by hand."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests import naive

# (src spatial, kernel, strides, dilations, pads_begin, dst spatial of Convolution)
GEOMETRIES: list[tuple[tuple[int, ...], ...]] = [
    ((5,), (3,), (1,), (1,), (1,), (5,)),
    ((7,), (2,), (3,), (2,), (4,), (4,)),
    ((4, 5), (3, 2), (2, 1), (1, 2), (1, 3), (2, 6)),
    ((2, 3, 3), (3, 1, 2), (1, 2, 1), (1, 1, 2), (2, 0, 1), (3, 2, 2)),
]
CHANNELS_FIRST: dict[str, Any] = {"data_format": "NCX", "weights_format": "OIX"}


def _random(rng: np.random.Generator, n: int, channels: int, spatial: tuple[int, ...], data_format: str) -> Any:
    shape = (n, channels, *spatial) if data_format == "NCX" else (n, *spatial, channels)
    return rng.integers(-4, 5, shape).astype(np.float64)


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("groups", [1, 3])
def test_gradients_are_adjoint_to_the_forward_passes(geometry: tuple[tuple[int, ...], ...], groups: int) -> None:
    """<conv(x, w), y> = <w, dW(x, y)> = <x, convT(y, w)>, for both operations, exactly on integers."""
    wide, kernel, strides, dilations, pads, narrow = geometry
    rng = np.random.default_rng(8)
    attributes: dict[str, Any] = {"strides": strides, "dilations": dilations, "pads_begin": pads, "groups": groups}
    attributes["data_format"] = "NXC"
    x = _random(rng, 2, 2 * groups, wide, "NXC")
    y = _random(rng, 2, groups, narrow, "NXC")
    w = rng.integers(-4, 5, (groups, 2, *kernel)).astype(np.float64)  # OIX of Convolution, IOX of ConvTranspose

    forward = naive.convolution(x, w, dst_spatial=narrow, weights_format="OIX", **attributes)
    gradient = naive.bwd_weights("Convolution", x, y, kernel=kernel, weights_format="OIX", **attributes)
    attributes |= {"weights_format": "IOX", "groups_axis": "O"}
    backward = naive.conv_transpose(y, w, dst_spatial=wide, **attributes)
    transposed_gradient = naive.bwd_weights("ConvTranspose", y, x, kernel=kernel, **attributes)

    assert (forward * y).sum() == (w * gradient).sum() == (x * backward).sum()
    np.testing.assert_array_equal(gradient, transposed_gradient)


def test_known_numbers() -> None:
    """A gradient small enough for paper comes out as computed by hand; its last tap is all padding."""
    src = np.array([1.0, 2.0, 3.0]).reshape(1, 1, 3)
    diff_dst = np.array([10.0, 100.0]).reshape(1, 1, 2)
    got = naive.bwd_weights(
        "Convolution", src, diff_dst, kernel=[4], strides=[2], pads_begin=[1], dilations=[1], **CHANNELS_FIRST
    )
    # tap k reads src[2x + k - 1]: k=0 -> x=1: src[1]; k=1 -> src[0], src[2]; k=2 -> src[1]; k=3 -> src[2]
    np.testing.assert_array_equal(got, [[[200.0, 310.0, 20.0, 30.0]]])


def test_padding_is_not_multiplied() -> None:
    """Taps that would meet an Inf only in the padding stay finite; 0 * Inf inside is NaN."""
    src = np.array([np.inf, 0.0, 0.0]).reshape(1, 1, 3)
    diff_dst = np.array([0.0, 1.0, 1.0]).reshape(1, 1, 3)
    got = naive.bwd_weights(
        "Convolution", src, diff_dst, kernel=[3], strides=[1], pads_begin=[1], dilations=[1], **CHANNELS_FIRST
    )
    np.testing.assert_array_equal(got, [[[np.inf, np.nan, 0.0]]])


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1 + 2.0**-8, 1.0),  # a tie rounds to the even neighbour
        (1 + 3 * 2.0**-8, 1 + 2.0**-6),
        (1 + 2.0**-8 + 2.0**-40, 1 + 2.0**-7),  # in f32 this would become the tie above
        (1 + 3 * 2.0**-8 - 2.0**-40, 1 + 2.0**-7),
        (-(1 + 2.0**-8 + 2.0**-40), -(1 + 2.0**-7)),
        (3.4e38, np.inf),
        (np.inf, np.inf),
        (-np.inf, -np.inf),
        (1e300, np.inf),
        (0.0, 0.0),
        (2.0**-133, 2.0**-133),
        (2.0**-134, 0.0),
        (2.0**-134 + 2.0**-180, 2.0**-133),
    ],
)
def test_round_to_bf16_rounds_once(value: float, expected: float) -> None:
    """Rounding to bf16 is to nearest even of the float64 value, not of its float32 neighbour."""
    got = naive.round_to("bf16", np.array([value]))
    assert got.dtype == np.dtype(ml_dtypes.bfloat16)
    assert float(got[0]) == expected


@pytest.mark.parametrize("dtype", naive.DTYPES)
def test_round_to_keeps_special_values(dtype: str) -> None:
    """NaN stays NaN, and zero keeps its sign."""
    got = naive.round_to(dtype, np.array([np.nan, -0.0])).astype(np.float64)
    assert np.isnan(got[0])
    assert np.signbit(got[1])
