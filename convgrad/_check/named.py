"""Problems with a name: shapes that implementations get wrong, and layers of published networks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from convgrad._check.problems import Problem, Takes, fitted

__all__ = ["LAYERS", "TRAPS", "layer", "problem_of", "trap"]

_Geometry = dict[str, Any]


def problem_of(op: str, dtype: str, geometry: Mapping[str, Any]) -> Problem | None:
    """Return a call of `op` with a geometry that is written for Convolution; None if there is no such call."""
    given = dict(geometry)
    if op.startswith("BiasAdd"):
        given = {name: given[name] for name in ("n", "wide", "data_format", "dst_channels") if name in given}
        given["src_channels"] = given.setdefault("dst_channels", 1)
        if op == "BiasAddBackward" and len(given["wide"]) == 1:
            given["wide"] = (1, *given["wide"])
    elif op.startswith("ConvTranspose"):
        src, dst = given.get("src_channels", 1), given.get("dst_channels", 1)
        given |= {"src_channels": dst, "dst_channels": src}
    if given.get("n") == 0 and op not in ("ConvolutionBackwardWeights", "ConvTransposeBackwardWeights"):
        return None
    return Problem(op=op, dtype=dtype, **given)


def trap(name: str, op: str, dtype: str, takes: Takes) -> Problem | None:
    """Return the trap of this name for an operation; None if the kernel doesn't take it."""
    found = problem_of(op, dtype, TRAPS[name])
    return None if found is None else takes.limited(found)


def layer(name: str, op: str, dtype: str, takes: Takes, macs: int) -> Problem | None:
    """Return a real layer with its own taps and as many images, channels and pixels as `macs` allows."""
    whole = problem_of(op, dtype, LAYERS[name])
    found = None if whole is None else takes.limited(whole)
    return None if found is None else fitted(found, macs)


TRAPS: dict[str, _Geometry] = {
    "kernel longer than the input": {"n": 2, "src_channels": 16, "dst_channels": 16, "wide": (7, 1),
        "kernel": (11, 1), "pads_begin": (5, 0), "pads_end": (5, 0)},
    "more padding than kernel": {"src_channels": 4, "dst_channels": 4, "wide": (5,), "kernel": (3,),
        "pads_begin": (3,), "pads_end": (3,)},
    "padding at one end only": {"n": 2, "src_channels": 4, "dst_channels": 4, "wide": (8, 8), "kernel": (3, 3),
        "pads_begin": (0, 2), "pads_end": (2, 0)},
    "stride larger than the kernel": {"n": 2, "src_channels": 3, "dst_channels": 5, "wide": (10, 10),
        "kernel": (1, 1), "strides": (3, 3)},
    "pixels at the end that no tap reads": {"src_channels": 3, "dst_channels": 5, "wide": (10,), "kernel": (3,),
        "strides": (2,)},
    "whole taps in the padding": {"src_channels": 4, "dst_channels": 4, "wide": (4,), "kernel": (5,),
        "dilations": (2,), "pads_begin": (4,), "pads_end": (2,)},
    "every tap in the padding": {"src_channels": 5, "dst_channels": 6, "wide": (2, 2), "kernel": (3, 3),
        "strides": (9, 9), "dilations": (4, 4), "pads_begin": (3, 3), "pads_end": (4, 4)},
    "pixels that read padding alone": {"n": 2, "src_channels": 4, "dst_channels": 5, "wide": (3, 3),
        "kernel": (3, 3), "pads_begin": (6, 6), "pads_end": (6, 6)},
    "dilation longer than the image": {"n": 3, "src_channels": 9, "dst_channels": 7, "wide": (5, 6),
        "kernel": (3, 3), "dilations": (50, 60), "pads_begin": (50, 60), "pads_end": (50, 60)},
    "dilation and stride": {"n": 2, "src_channels": 4, "dst_channels": 6, "wide": (15, 9), "kernel": (3, 2),
        "strides": (2, 1), "dilations": (2, 4)},
    "another stride for each axis": {"n": 2, "src_channels": 5, "dst_channels": 3, "wide": (11, 13),
        "kernel": (4, 3), "strides": (3, 2), "pads_begin": (1, 1), "pads_end": (1, 1)},
    "channels that fill no vector": {"n": 3, "src_channels": 7, "dst_channels": 13, "wide": (6, 5),
        "kernel": (3, 2)},
    "one more channel than a vector": {"n": 2, "src_channels": 17, "dst_channels": 33, "wide": (5, 4),
        "kernel": (1, 3), "pads_begin": (0, 1), "pads_end": (0, 1), "data_format": "NXC"},
    "one pixel": {"n": 5, "src_channels": 3, "dst_channels": 4, "wide": (1, 1), "kernel": (1, 1)},
    "one multiplication": {"wide": (1,), "kernel": (1,)},
    "images of one pixel, in the padding of 3x3": {"n": 40, "src_channels": 5, "dst_channels": 7, "wide": (1, 1),
        "kernel": (3, 3), "pads_begin": (1, 1), "pads_end": (1, 1)},
    "a long sum": {"n": 2, "wide": (40000,), "kernel": (2,)},
    "a long row": {"src_channels": 2, "dst_channels": 3, "wide": (1, 7001), "kernel": (1, 5),
        "pads_begin": (0, 2), "pads_end": (0, 2)},
    "kernel as large as the image": {"n": 4, "src_channels": 3, "dst_channels": 9, "wide": (12, 13),
        "kernel": (12, 13)},
    "patches: stride equals kernel": {"n": 2, "src_channels": 3, "dst_channels": 10, "wide": (32, 32),
        "kernel": (8, 8), "strides": (8, 8)},
    "depthwise": {"n": 2, "groups": 24, "src_channels": 24, "dst_channels": 24, "wide": (6, 6), "kernel": (3, 3),
        "strides": (2, 2), "pads_begin": (1, 1), "pads_end": (1, 1)},
    "depthwise with a multiplier and a tail": {"n": 2, "groups": 17, "src_channels": 17, "dst_channels": 51,
        "wide": (9, 10), "kernel": (3, 3), "strides": (2, 1), "pads_begin": (1, 1), "pads_end": (1, 1),
        "data_format": "NXC"},
    "groups of different widths in and out": {"n": 2, "groups": 3, "src_channels": 6, "dst_channels": 15,
        "wide": (7, 7), "kernel": (3, 3), "pads_begin": (1, 1), "pads_end": (1, 1)},
    "3D, more padding than half the kernel": {"wide": (2, 1, 1), "kernel": (3, 1, 1), "pads_begin": (2, 0, 0),
        "pads_end": (0, 0, 0)},
    "3D, grouped, strides beyond the kernel": {"groups": 3, "src_channels": 6, "dst_channels": 6,
        "wide": (5, 5, 3), "kernel": (2, 2, 2), "strides": (4, 4, 1), "pads_begin": (1, 1, 1),
        "pads_end": (1, 1, 1)},
    "three axes": {"src_channels": 2, "dst_channels": 3, "wide": (4, 5, 6), "kernel": (3, 3, 3),
        "pads_begin": (1, 1, 1), "pads_end": (1, 1, 1)},
    "a batch of no images": {"n": 0, "src_channels": 5, "dst_channels": 3, "wide": (5, 5), "kernel": (3, 3)},
}  # fmt: skip
"""Shapes that implementations get wrong, by name, written for Convolution."""

LAYERS: dict[str, _Geometry] = {
    "ResNet-50, first layer": {"src_channels": 3, "dst_channels": 64, "wide": (224, 224), "kernel": (7, 7),
        "strides": (2, 2), "pads_begin": (3, 3), "pads_end": (3, 3)},
    "ResNet-50, 3x3": {"src_channels": 64, "dst_channels": 64, "wide": (56, 56), "kernel": (3, 3),
        "pads_begin": (1, 1), "pads_end": (1, 1)},
    "ResNet-50, strided 1x1": {"src_channels": 256, "dst_channels": 512, "wide": (56, 56), "kernel": (1, 1),
        "strides": (2, 2)},
    "ResNeXt, 32 groups": {"groups": 32, "src_channels": 128, "dst_channels": 128, "wide": (28, 28),
        "kernel": (3, 3), "pads_begin": (1, 1), "pads_end": (1, 1)},
    "MobileNet v2, depthwise": {"groups": 96, "src_channels": 96, "dst_channels": 96, "wide": (56, 56),
        "kernel": (3, 3), "strides": (2, 2), "pads_begin": (0, 0), "pads_end": (1, 1), "data_format": "NXC"},
    "ViT, patches": {"src_channels": 3, "dst_channels": 768, "wide": (224, 224), "kernel": (16, 16),
        "strides": (16, 16)},
    "DCGAN, 4x4 upsampling": {"n": 4, "src_channels": 64, "dst_channels": 128, "wide": (32, 32), "kernel": (4, 4),
        "strides": (2, 2), "pads_begin": (1, 1), "pads_end": (1, 1)},
    "U-Net, 2x2 upsampling": {"src_channels": 64, "dst_channels": 128, "wide": (56, 56), "kernel": (2, 2),
        "strides": (2, 2)},
    "DeepLab, dilated 3x3": {"src_channels": 256, "dst_channels": 256, "wide": (33, 33), "kernel": (3, 3),
        "dilations": (12, 12), "pads_begin": (12, 12), "pads_end": (12, 12)},
    "WaveNet, causal": {"src_channels": 32, "dst_channels": 64, "wide": (4000,), "kernel": (2,),
        "dilations": (64,), "pads_begin": (64,), "pads_end": (0,)},
    "C3D, 3x3x3": {"src_channels": 64, "dst_channels": 128, "wide": (8, 28, 28), "kernel": (3, 3, 3),
        "pads_begin": (1, 1, 1), "pads_end": (1, 1, 1)},
}  # fmt: skip
"""Layers of published networks, for one image unless stated, written for Convolution."""
