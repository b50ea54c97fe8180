"""Named traps: the shapes that other implementations got wrong, and our own edge cases.

The first ones come from benchdnn's regression lists and from public bug reports; `name` says which.
"""

from __future__ import annotations

from tests.problems import Case

__all__ = ["TRAPS"]

TRAPS: tuple[Case, ...] = (
    Case(
        name="MFDNN-2027: kernel longer than the input",
        n=2, src_channels=16, dst_channels=16, src_spatial=(7, 1), dst_spatial=(1, 1), kernel=(11, 1),
        strides=(2, 1), pads_begin=(5, 0),
    ),
    Case(
        name="3D corner: pad more than half the kernel",
        src_spatial=(2, 1, 1), dst_spatial=(2, 1, 1), kernel=(3, 1, 1), pads_begin=(2, 0, 0),
    ),
    Case(
        name="dilated_kernel_size_lt_padding: whole taps in the padding",
        dst_channels=16, src_spatial=(1,), dst_spatial=(29,), kernel=(14,), dilations=(2,), pads_begin=(28,),
        pads_end=(26,),
    ),
    Case(
        name="bwd-w_check_dilation_padding_1",
        src_channels=16, src_spatial=(2, 30), dst_spatial=(1, 30), kernel=(2, 3), dilations=(1, 17),
        pads_begin=(0, 17), pads_end=(0, 17),
    ),
    Case(
        name="bwd_w_check_large-dilation",
        src_channels=16, src_spatial=(2, 70), dst_spatial=(1, 10), kernel=(2, 3), dilations=(1, 30),
    ),
    Case(
        name="ds2: two different strides",
        n=2, src_channels=32, dst_channels=32, src_spatial=(41, 79), dst_spatial=(16, 75), kernel=(10, 5),
        strides=(2, 1),
    ),
    Case(
        name="long 1D with a channel tail",
        n=2, src_channels=33, dst_channels=33, src_spatial=(84350,), dst_spatial=(84349,), kernel=(2,),
        data_format="NXC",
    ),
    Case(
        name="github/rfcn: large 1x1",
        src_channels=256, dst_channels=64, src_spatial=(150, 200), dst_spatial=(150, 200), kernel=(1, 1),
    ),
    Case(
        name="gemm_shape: grouped ConvTranspose with pads at the end only",
        op="ConvTransposeBackwardWeights", n=2, groups=16, src_channels=32, dst_channels=64,
        src_spatial=(4, 8),
        dst_spatial=(3, 8), kernel=(3, 3), pads_end=(3, 2), groups_axis="O",
    ),
    Case(
        name="oneDNN#6035: strided 1x1",
        n=32, src_channels=4, dst_channels=8, src_spatial=(32, 32), dst_spatial=(16, 16), kernel=(1, 1),
        strides=(2, 2), data_format="NXC",
    ),
    Case(
        name="pytorch#50042: depthwise of 24 channels",
        groups=24, src_channels=24, dst_channels=24, src_spatial=(6, 6), dst_spatial=(3, 3), kernel=(3, 3),
        strides=(2, 2), pads_begin=(1, 1), pads_end=(1, 1),
    ),
    Case(
        name="pytorch#68868: grouped 3D with strides beyond the kernel",
        groups=3, src_channels=720, dst_channels=720, src_spatial=(5, 5, 3), dst_spatial=(2, 2, 4),
        kernel=(2, 2, 2), strides=(4, 4, 1), pads_begin=(1, 1, 1), pads_end=(1, 1, 1),
    ),
    Case(
        name="pytorch#25101: columns beyond the last window",
        src_channels=9, dst_channels=3, src_spatial=(32, 32), dst_spatial=(10, 10), kernel=(5, 5),
        strides=(3, 3),
        pads_begin=(1, 1), pads_end=(1, 1),
    ),
    Case(
        name="oneDNN#4074: depthwise strided column",
        groups=8, src_channels=8, dst_channels=8, src_spatial=(5, 1), dst_spatial=(2, 1), kernel=(5, 1),
        strides=(2, 1), pads_begin=(2, 0),
    ),
    Case(
        name="same_upper of an odd input: padding at the end only",
        op="ConvTransposeBackwardWeights", src_channels=5, dst_channels=6, src_spatial=(7, 7),
        dst_spatial=(14, 14), kernel=(3, 3), strides=(2, 2), pads_end=(1, 1), groups_axis="O",
    ),
    Case(name="one multiplication", src_spatial=(1,), dst_spatial=(1,), kernel=(1,)),
    Case(
        name="batch of zero",
        n=0, src_channels=17, dst_channels=33, src_spatial=(9, 9), dst_spatial=(9, 9), kernel=(3, 3),
        pads_begin=(1, 1), pads_end=(1, 1),
    ),
    Case(
        name="every tap in the padding",
        src_channels=20, dst_channels=24, src_spatial=(2, 2), dst_spatial=(1, 1), kernel=(3, 3),
        strides=(9, 9),
        dilations=(4, 4), pads_begin=(3, 3), pads_end=(4, 4),
    ),
    Case(
        name="dst that reads padding alone, before and after the data",
        n=2, src_channels=8, dst_channels=16, src_spatial=(3, 3), dst_spatial=(21, 21), kernel=(3, 3),
        pads_begin=(10, 10), pads_end=(10, 10),
    ),
    Case(
        name="dilation longer than the image",
        n=3, src_channels=9, dst_channels=7, src_spatial=(5, 6), dst_spatial=(5, 6), kernel=(3, 3),
        dilations=(50, 60), pads_begin=(50, 60), pads_end=(50, 60),
    ),
    Case(
        name="depthwise with a multiplier and a tail",
        n=2, groups=17, src_channels=17, dst_channels=51, src_spatial=(9, 10), dst_spatial=(5, 10),
        kernel=(3, 3), strides=(2, 1), pads_begin=(1, 1), pads_end=(1, 1), data_format="NXC",
    ),
    Case(
        name="groups of four channels",
        n=2, groups=8, src_channels=32, dst_channels=32, src_spatial=(14, 14), dst_spatial=(14, 14),
        kernel=(3, 3), pads_begin=(1, 1), pads_end=(1, 1),
    ),
    Case(
        name="stem: three channels, a large kernel",
        n=2, src_channels=3, dst_channels=64, src_spatial=(33, 35), dst_spatial=(17, 18), kernel=(7, 7),
        strides=(2, 2), pads_begin=(3, 3), pads_end=(3, 3), data_format="NXC",
    ),
    Case(
        name="kernel as large as the image",
        n=4, src_channels=6, dst_channels=130, src_spatial=(12, 13), dst_spatial=(1, 1), kernel=(12, 13),
    ),
    Case(
        name="patches: stride equals kernel",
        n=2, src_channels=3, dst_channels=70, src_spatial=(64, 64), dst_spatial=(4, 4), kernel=(16, 16),
        strides=(16, 16),
    ),
    Case(
        name="patches without overlap in the width, padding in the height, where the kernel has one tap",
        n=2, src_channels=1, dst_channels=5, src_spatial=(7, 14), dst_spatial=(9, 7), kernel=(1, 2),
        strides=(1, 2), pads_begin=(1, 0), pads_end=(1, 0),
    ),
    Case(
        name="patches with gaps, strided padding in the depth",
        n=3, src_channels=3, dst_channels=17, src_spatial=(4, 3, 11), dst_spatial=(4, 3, 3), kernel=(1, 1, 3),
        strides=(2, 1, 4), pads_begin=(3, 0, 0),
    ),
    Case(
        name="depthwise on maps of one pixel",
        n=2, groups=64, src_channels=64, dst_channels=64, src_spatial=(1, 1), dst_spatial=(1, 1), kernel=(1, 1),
    ),
    Case(
        name="depthwise on maps of one pixel, with zeros around it",
        groups=32, src_channels=32, dst_channels=32, src_spatial=(1,), dst_spatial=(2,), kernel=(2,),
        pads_begin=(1,), pads_end=(1,),
    ),
    Case(
        name="many images of one pixel",
        n=300, src_channels=19, dst_channels=37, src_spatial=(1, 1), dst_spatial=(1, 1), kernel=(3, 3),
        pads_begin=(1, 1), pads_end=(1, 1),
    ),
    Case(
        name="one row, very long, channels first",
        src_channels=2, dst_channels=3, src_spatial=(1, 70001), dst_spatial=(1, 70001), kernel=(1, 5),
        pads_begin=(0, 2), pads_end=(0, 2),
    ),
    Case(
        name="more channels than pixels",
        src_channels=513, dst_channels=257, src_spatial=(2, 3), dst_spatial=(2, 3), kernel=(3, 3),
        pads_begin=(1, 1), pads_end=(1, 1), data_format="NXC",
    ),
)  # fmt: skip
