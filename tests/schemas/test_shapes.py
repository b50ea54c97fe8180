"""Shape inference against definitions that count instead of dividing."""

from __future__ import annotations

import itertools

import pytest

from schemas import shapes
from tests.schemas.calls import windows

# Taps, stride, dilation.
KERNELS = list(itertools.product(range(1, 6), range(1, 5), range(1, 4)))


@pytest.mark.parametrize("size", range(1, 9))
def test_same_padding_of_a_convolution(size: int) -> None:
    """`same_*` is the smallest padding for ceil(size / stride); the odd zero is at the end, or at the beginning."""
    for kernel, stride, dilation in KERNELS:
        effective = shapes.effective_kernel(kernel, dilation)
        upper = shapes.auto_pad_convolution("same_upper", size, effective, stride)
        lower = shapes.auto_pad_convolution("same_lower", size, effective, stride)
        wanted = -(-size // stride)
        least = next(t for t in itertools.count() if windows(size, 0, t, kernel, stride, dilation) == wanted)
        assert upper == (least // 2, least - least // 2)
        assert lower == (upper[1], upper[0])
        assert windows(size, *upper, kernel, stride, dilation) == wanted


@pytest.mark.parametrize("size", range(1, 20))
def test_both_same_modes_give_the_same_output_size(size: int) -> None:
    """The convolution's rule, applied to the output of the transposed one, gives the transposed one's padding."""
    for stride, kernel, dilation in itertools.product(range(1, 5), range(1, 8), range(1, 3)):
        effective = shapes.effective_kernel(kernel, dilation)
        for mode in ("same_upper", "same_lower"):
            pads = shapes.auto_pad_transposed(mode, effective, stride)
            made = shapes.transposed_size(size, *pads, effective, stride, 0)
            assert shapes.auto_pad_convolution(mode, made, effective, stride) == pads


@pytest.mark.parametrize("transposed", [True, False])
def test_the_shape_determines_the_groups_axis(transposed: bool) -> None:
    """With more than one group the two layouts of transposed weights are always distinguishable."""
    for groups, i, o in itertools.product(range(1, 7), range(1, 4), range(1, 4)):
        layouts = shapes.weights_channels(transposed, i * groups, o * groups, groups)
        extents = {(a, b) for _, a, b in layouts}
        assert len(extents) == (2 if transposed and groups > 1 else 1)
        for axis, a, b in layouts:
            found = shapes.groups_axis_of(transposed, a, b, i * groups, o * groups, groups)
            assert found == axis or groups == 1
        assert shapes.groups_axis_of(transposed, i * groups + 1, o, i * groups, o * groups, groups) is None
