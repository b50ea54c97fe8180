"""Names of operations, attributes, tensors, layouts and dtypes in other frameworks, for errors that translate them.

docs/names.md has the same names; a test compares them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from convgrad._dtypes import DTYPES, DType

__all__ = ["NAMES", "OPERATIONS", "Here", "dtype_here", "format_here", "name_here", "operation_here"]


@dataclass(frozen=True, slots=True)
class Here:
    """What to use here for a name of another framework: `names` in order of preference, and a note.

    Each of the `names` may be several, as `a b`. `transposed` is a further note for operations of transposed
    convolutions.
    """

    names: tuple[str, ...] = ()
    note: str = ""
    transposed: str = ""


_KERNEL = Here(("weights_shape", "weights"), "the shape has the channels too")

NAMES: dict[str, Here] = {
    name: here
    for names, here in {
        "stride window_strides": Here(("strides",)),
        "dilation rhs_dilation dilation_rate": Here(("dilations",)),
        "dilates": Here(("dilations",), "dense is 1, not 0"),
        "lhs_dilation": Here((), "a spread input is that of ConvTranspose, whose strides are the distance"),
        "group feature_group_count": Here(("groups",)),
        "padding pads pad explicit_paddings": Here(
            ("pads_begin pads_end",), "or auto_pad", "a padding p of jax.lax is dilation * (kernel - 1) - p here"
        ),
        "padding_l": Here(("pads_begin",)),
        "padding_r": Here(("pads_end",)),
        "padding_mode": Here((), "the padding is always zeros"),
        "kernel_shape kernel_size weight_shape weight_size filter_sizes": _KERNEL,
        "output_shape output_size": Here(("dst_shape", "output_padding")),
        "input_shape input_size input_sizes": Here(("dst_shape",)),
        "in_channels out_channels": Here((), "the shapes of the tensors have the channels"),
        "dimension_numbers": Here(("data_format weights_format", "data_format")),
        "memory_format layout": Here(("data_format",), "the order of the shape"),
        "input inputs x lhs": Here(("src",)),
        "weight w kernel rhs filters": Here(("weights",)),
        "use_bias b": Here(("bias",)),
        "grad_output dy cotangent out_backprop": Here(("diff_dst",)),
        "grad_input dx": Here(("diff_src",)),
        "grad_weight weight.grad dw": Here(("diff_weights",)),
        "grad_bias bias.grad db": Here(("diff_bias",)),
    }.items()
    for name in names.split()
}
"""What attributes and tensors are here, by their name elsewhere in lower case."""

_WEIGHTS, _DATA = Here(("ConvolutionBackwardWeights",)), Here(("ConvolutionBackwardData",))
_GROUPED = "with groups, one for each channel"

OPERATIONS: dict[str, Here] = {
    name: here
    for names, here in {
        "convNd conv conv_general_dilated cudnnConvolutionForward": Here(("Convolution",)),
        "conv_transposeNd convNd_transpose deconvolution deconvNd": Here(("ConvTranspose",)),
        "conv_transpose": Here(("ConvTranspose",), "which is JAX's with transpose_kernel=True"),
        "convNd_weight convNd_backprop_filter cudnnConvolutionBackwardFilter": _WEIGHTS,
        "convNd_input convNd_backprop_input cudnnConvolutionBackwardData": _DATA,
        "deconvolution_backward_weights": Here(("ConvTransposeBackwardWeights",)),
        "deconvolution_backward_data": Here(("ConvTransposeBackwardData",)),
        "convolution_backward": Here(_WEIGHTS.names, "with options.outputs for the other gradients"),
        "depthwise_convNd depthwise_convNd_native": Here(("Convolution",), _GROUPED),
        "depthwise_convNd_backprop_filter depthwise_convNd_native_backprop_filter": Here(_WEIGHTS.names, _GROUPED),
        "depthwise_convNd_backprop_input depthwise_convNd_native_backprop_input": Here(_DATA.names, _GROUPED),
        "bias_add": Here(("BiasAdd",)),
        "bias_add_grad bias.grad cudnnConvolutionBackwardBias": Here(("BiasAddBackward",)),
    }.items()
    for name in names.lower().replace("_", "").split()
}
"""What operations are here, by their name elsewhere in lower case, without underscores, and with `nd` for 1d to 3d."""

_VALUES = {"channels_first": "NCX", "channels_last": "NXC", "same": "same_upper", "explicit": "none"}
# B, F and digits are XLA's axes, K, C, R, S and T those of cuDNN's weights. Groups have no axis here.
_DATA_AXES = str.maketrans("BFDHWL0123", "NCXXXXXXXX")
_WEIGHTS_AXES = str.maketrans("KCDHWLRST0123", "OIXXXXXXXXXXX", "G")
_DTYPES = {"float": DTYPES["f32"], "half": DTYPES["f16"], "double": DTYPES["f64"]}
_DTYPES |= {name.lower(): each for each in DTYPES.values() for name in (each.name, each.oip, str(each.numpy), each.npy)}
_LONGEST = 64


def format_here(text: object, choices: tuple[str, ...]) -> str | None:
    """Return the one of `choices` that a layout (NCHW, HWIO, channels_last) or a padding mode elsewhere stands for."""
    if not isinstance(text, str) or len(text) > _LONGEST:
        return None
    axes = (re.sub("X+", "X", text.upper().translate(letters)) for letters in (_DATA_AXES, _WEIGHTS_AXES))
    return next((found for found in (_VALUES.get(text.lower()), *axes) if found in choices), None)


def dtype_here(name: str) -> DType | None:
    """Return the element type that another framework calls `float32`, `torch.half` or `<f4`, with or without module."""
    return _DTYPES.get(name[:_LONGEST].lower().rpartition(".")[2])


def name_here(name: object) -> Here | None:
    """Return the name here of another framework's attribute or tensor."""
    return NAMES.get(name.lower()) if isinstance(name, str) and len(name) <= _LONGEST else None


def operation_here(name: object) -> Here | None:
    """Return the name here of another framework's operation, given with or without its module."""
    if not isinstance(name, str) or len(name) > _LONGEST:
        return None
    plain = re.sub(r"(?<=[a-z])[123]d", "nd", name.lower().replace("_", "").removesuffix("v2"))
    return OPERATIONS.get(plain) or OPERATIONS.get(re.split("[.:]", plain)[-1])
