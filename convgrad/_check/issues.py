"""Convolutions that were published as wrong, to be replayed: `--only issues`, or `--only pytorch#68868`.

The geometry is that of the issue. Where it gives no size, or one that takes long, a small one of the same kind stands
in. Data are drawn from the seed.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial

from convgrad._check.problems import Problem, Takes

__all__ = ["ISSUES", "ISSUE_KINDS", "Issue", "link", "replayed"]

_REPOSITORIES = {
    "pytorch": "pytorch/pytorch", "oneDNN": "uxlfoundation/oneDNN", "rocm-libraries": "ROCm/rocm-libraries",
    "MIOpen": "ROCm/MIOpen", "mlx": "ml-explore/mlx", "burn": "tracel-ai/burn", "candle": "huggingface/candle",
    "torch-mlir": "llvm/torch-mlir", "iree": "iree-org/iree", "modular": "modular/modular",
}  # fmt: skip


@dataclass(frozen=True)
class Issue:
    """What went wrong, in a sentence, and the calls that show it."""

    text: str
    problems: tuple[Problem, ...]


_weights = partial(Problem, op="ConvolutionBackwardWeights")
_data = partial(Problem, op="ConvolutionBackwardData")
_forward = partial(Problem, op="Convolution")
_DEPTHWISE_24 = _weights(groups=24, src_channels=24, dst_channels=24, wide=(6, 6), kernel=(3, 3), strides=(2, 2),
                         pads_begin=(1, 1), pads_end=(1, 1))  # fmt: skip

ISSUES: dict[str, Issue] = {
    "pytorch#50042": Issue(
        "the last row of taps of a depthwise gradient lacked a row of pixels",
        (_DEPTHWISE_24,)),
    "oneDNN#4124": Issue(
        "rows in the padding were cut by block, not by row, in depthwise gradients on SVE-256",
        (_DEPTHWISE_24, replace(_DEPTHWISE_24, n=2, wide=(12, 12)))),
    "oneDNN#4074": Issue(
        "depthwise gradients of a kernel as high as the image were wrong, strided and padded",
        (_weights(n=2, groups=8, src_channels=8, dst_channels=8, wide=(5, 1), kernel=(5, 1), strides=(2, 1),
                  pads_begin=(2, 0)),)),
    "oneDNN#6035": Issue(
        "rows of 8 channels were copied to a workspace of 4, over their neighbours",
        (_weights(n=32, src_channels=4, dst_channels=8, wide=(32, 32), kernel=(1, 1), strides=(2, 2),
                  data_format="NXC"),)),
    "fujitsu/oneDNN#43": Issue(
        "data gradients were wrong with a stride, more than 16 channels and less than 17 pixels in a row",
        (_data(n=2, src_channels=64, dst_channels=17, wide=(8,), kernel=(3,), strides=(2,), pads_begin=(1,)),)),
    "pytorch#68868": Issue(
        "weight gradients were wrong where the taps meet padding at both ends",
        (_weights(groups=3, src_channels=240, dst_channels=240, wide=(4, 4, 6), kernel=(2, 2, 2),
                  strides=(4, 4, 1), pads_begin=(1, 1, 1), pads_end=(1, 1, 1)),)),
    "pytorch#68048": Issue(
        "the gradient of a bias was summed in bf16, and stuck at 256 of 1,600",
        (Problem(op="BiasAddBackward", dtype="bf16", src_channels=2, dst_channels=2, wide=(40, 40)),)),
    "pytorch#51430": Issue(
        "in groups, channels of diff_dst were paired with those of another group",
        (_weights(n=2, groups=2, src_channels=4, dst_channels=6, wide=(7, 7), kernel=(3, 3), pads_begin=(1, 1),
                  pads_end=(1, 1)),)),
    "pytorch#63314": Issue(
        "the data gradient of a strided 1x1 transposed convolution read every pixel in a row",
        (Problem(op="ConvTransposeBackwardData", wide=(1, 3), kernel=(1, 1), strides=(2, 2)),)),
    "pytorch#96225": Issue(
        "images were counted in 16 bits: weight gradients were wrong from 65,536 on",
        (_weights(n=65_536, wide=(1,), kernel=(1,)), _weights(n=65_536, wide=(1, 1), kernel=(1, 1)))),
    "pytorch#193577": Issue(
        "the same with several channels",
        (_weights(n=70_000, src_channels=2, dst_channels=3, wide=(4,), kernel=(3,)),)),
    "pytorch#129207": Issue(
        "output channels were counted in 16 bits: the first and the last of 65,537 were wrong",
        (_forward(dst_channels=65_537, wide=(3,), kernel=(3,), pads_begin=(1,), pads_end=(1,), bias=True),)),
    "pytorch#188335": Issue(
        "kernels of 256 rows gave wrong values for more than one image",
        (_forward(n=2, groups=8, src_channels=8, dst_channels=16, wide=(256, 12), kernel=(256, 1)),)),
    "pytorch#163347": Issue(
        "2x2 ones in bf16, multiplied by 2x2 ones, gave 1",
        (_forward(dtype="bf16", wide=(2, 2), kernel=(2, 2)),)),
    "pytorch#19912": Issue(
        "the last input channel of each group was left out",
        (_forward(groups=2, src_channels=4, dst_channels=16, wide=(1, 1), kernel=(1, 1)),)),
    "pytorch#34344": Issue(
        "threads added to one gradient without a lock: images were lost, others in each run",
        (_weights(n=64, wide=(16, 16, 16), kernel=(1, 1, 1), strides=(2, 2, 2), pads_begin=(1, 1, 1),
                  pads_end=(1, 1, 1)),)),
    "rocm-libraries#8029": Issue(
        "64 partial sums of a bf16 gradient were added in bf16",
        (_weights(dtype="bf16", n=8, src_channels=16, dst_channels=16, wide=(16, 16, 16), kernel=(1, 1, 1),
                  data_format="NXC"),)),
    "rocm-libraries#7732": Issue(
        "strided data gradients had the pixels of one phase only, the others were zero",
        (_data(n=2, src_channels=16, dst_channels=16, wide=(14, 14), kernel=(3, 3), strides=(2, 2),
               pads_begin=(1, 1), pads_end=(1, 1)),)),
    "rocm-libraries#10627": Issue(
        "data gradients were wrong where the batch was split in two",
        (_data(dtype="f16", n=4, src_channels=8, dst_channels=8, wide=(10, 10), kernel=(3, 3), pads_begin=(1, 1),
               pads_end=(1, 1), data_format="NXC"),)),
    "MIOpen#575": Issue(
        "with strides of 3, a phase of the data gradient had one tap too few",
        tuple([_data(n=2, src_channels=16, dst_channels=16, wide=(14, 14), kernel=(size, 1), strides=(3, 1))
               for size in (4, 7)])),
    "mlx#3800": Issue(
        "data gradients in groups, strided, were computed as if there were no groups",
        tuple([_data(n=2, groups=64, src_channels=64, dst_channels=64, wide=(16, 16), kernel=(size, size),
                     strides=(2, 2), pads_begin=(size // 2,) * 2, pads_end=(size // 2,) * 2, data_format="NXC")
               for size in (3, 7)])),
    "burn#1891": Issue(
        "strided depthwise gradients were cut along the wrong axis",
        (_weights(groups=4, src_channels=4, dst_channels=4, wide=(4, 4), kernel=(3, 3), strides=(2, 2),
                  pads_begin=(1, 1), pads_end=(1, 1)),)),
    "burn#4727": Issue(
        "rows that meet padding read the channels of the first group",
        (_forward(groups=2, src_channels=2, dst_channels=16, wide=(8, 8), kernel=(3, 3), pads_begin=(1, 1),
                  pads_end=(1, 1)),
         _forward(groups=4, src_channels=16, dst_channels=16, wide=(50, 1), kernel=(128, 1), pads_begin=(64, 0),
                  pads_end=(64, 0)))),
    "candle#2337": Issue(
        "stride and dilation were exchanged in the data gradient of a transposed convolution",
        (Problem(op="ConvTransposeBackwardData", src_channels=4, dst_channels=2, wide=(11, 11), kernel=(3, 3),
                 strides=(2, 2)),)),
    "torch-mlir#4650": Issue(
        "with output_padding, a transposed convolution was cropped alike at both ends",
        (Problem(op="ConvTranspose", n=2, src_channels=3, dst_channels=4, wide=(8, 8), kernel=(3, 3), strides=(2, 2),
                 pads_begin=(1, 1), pads_end=(1, 1)),)),
    "iree#23786": Issue(
        "strided weight gradients in groups were wrong, those that were either were right",
        (_weights(dtype="bf16", n=2, groups=3, src_channels=288, dst_channels=288, wide=(12, 8), kernel=(3, 3),
                  strides=(2, 2), pads_begin=(1, 1), pads_end=(1, 1), data_format="NXC"),)),
    "modular#6712": Issue(
        "pixels just inside wide padding read beyond their row",
        (_forward(src_channels=8, dst_channels=8, wide=(1, 16), kernel=(1, 8), pads_begin=(0, 7), pads_end=(0, 7),
                  data_format="NXC"),)),
}  # fmt: skip
"""Published faults by their repository and number."""

ISSUE_KINDS = ("integers", "normal")
"""Kinds of data that each issue is replayed with."""


def link(name: str) -> str:
    """Return the address of an issue, by its name."""
    repository, _, number = name.partition("#")
    return f"https://github.com/{_REPOSITORIES.get(repository, repository)}/issues/{number}"


def replayed(takes: Takes, names: Collection[str]) -> list[tuple[str, Problem]]:
    """Return the problems of these issues that the kernel takes, in formats that it takes, and their names."""
    return [(name, problem) for name in ISSUES if name in names
            for each in ISSUES[name].problems if (problem := takes.reformatted(each)) is not None]  # fmt: skip
