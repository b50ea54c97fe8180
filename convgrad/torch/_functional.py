"""Differentiable functions, each computed by one operation of the service; the arguments are those of PyTorch.

Input and output are (N, C, X) or, without a batch, (C, X), with one to three spatial axes in any memory format: if the
memory is channels-last, it is sent as it is, and so is the result. Weights are PyTorch's: (O, I / groups, kernel), for
transposed convolutions (I, O / groups, kernel). All tensors have the same dtype: float32, float16, bfloat16, or
float64, which is slow. Sums are accumulated in float32 or wider and rounded once.

Raise `convgrad.ConvgradError`: `InvalidParams` for shapes that do not fit, `Unsupported` for other dtypes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from convgrad._errors import InvalidParams
from convgrad._layer import Layer
from convgrad.torch import _operators
from convgrad.torch._backend import Backend

__all__ = [
    "bias_add",
    "bias_grad",
    "conv",
    "conv_input",
    "conv_transpose",
    "conv_transpose_input",
    "conv_transpose_weight",
    "conv_weight",
]

Ints = int | Sequence[int]
_DEFAULT = Backend()


def conv(
    input: Tensor,  # noqa: A002 - as PyTorch calls it
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Ints | str = 0,
    dilation: Ints = 1,
    groups: int = 1,
    *,
    backend: Backend | None = None,
) -> Tensor:
    """Compute Convolution, like `torch.nn.functional.conv1d` to `conv3d`; `padding` may be "same" or "valid"."""
    layer = _layer(weight, stride, padding, dilation, groups)
    return _batched(input, weight, bias, layer, backend)


def conv_transpose(
    input: Tensor,  # noqa: A002
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Ints = 0,
    output_padding: Ints = 0,
    groups: int = 1,
    dilation: Ints = 1,
    *,
    backend: Backend | None = None,
) -> Tensor:
    """Compute ConvTranspose, like `torch.nn.functional.conv_transpose1d` to `conv_transpose3d`."""
    layer = _transposed(weight, stride, padding, output_padding, groups, dilation)
    return _batched(input, weight, bias, layer, backend)


def conv_input(
    input_size: Sequence[int],
    weight: Tensor,
    grad_output: Tensor,
    stride: Ints = 1,
    padding: Ints | str = 0,
    dilation: Ints = 1,
    groups: int = 1,
    *,
    backend: Backend | None = None,
) -> Tensor:
    """Compute ConvolutionBackwardData, like `torch.nn.grad.conv1d_input`: the gradient for an input of `input_size`."""
    layer = _layer(weight, stride, padding, dilation, groups)
    src = _shaped(grad_output, input_size)
    return _gradient(0, src, weight, grad_output, layer, backend)


def conv_weight(
    input: Tensor,  # noqa: A002
    weight_size: Sequence[int],
    grad_output: Tensor,
    stride: Ints = 1,
    padding: Ints | str = 0,
    dilation: Ints = 1,
    groups: int = 1,
    *,
    backend: Backend | None = None,
) -> Tensor:
    """Compute ConvolutionBackwardWeights, like `torch.nn.grad.conv1d_weight`: the gradient for the weights."""
    weight = _shaped(input, weight_size)
    layer = _layer(weight, stride, padding, dilation, groups)
    return _gradient(1, input, weight, grad_output, layer, backend)


def conv_transpose_input(
    input_size: Sequence[int],
    weight: Tensor,
    grad_output: Tensor,
    stride: Ints = 1,
    padding: Ints = 0,
    output_padding: Ints = 0,
    groups: int = 1,
    dilation: Ints = 1,
    *,
    backend: Backend | None = None,
) -> Tensor:
    """Compute ConvTransposeBackwardData: the gradient of `conv_transpose` for an input of `input_size`."""
    layer = _transposed(weight, stride, padding, output_padding, groups, dilation)
    src = _shaped(grad_output, input_size)
    return _gradient(0, src, weight, grad_output, layer, backend)


def conv_transpose_weight(
    input: Tensor,  # noqa: A002
    weight_size: Sequence[int],
    grad_output: Tensor,
    stride: Ints = 1,
    padding: Ints = 0,
    output_padding: Ints = 0,
    groups: int = 1,
    dilation: Ints = 1,
    *,
    backend: Backend | None = None,
) -> Tensor:
    """Compute ConvTransposeBackwardWeights: the gradient of `conv_transpose` for the weights."""
    weight = _shaped(input, weight_size)
    layer = _transposed(weight, stride, padding, output_padding, groups, dilation)
    return _gradient(1, input, weight, grad_output, layer, backend)


def bias_add(input: Tensor, bias: Tensor, *, backend: Backend | None = None) -> Tensor:  # noqa: A002
    """Compute BiasAdd: `bias`, of shape (C), added to every channel of (N, C, X)."""
    return _operators.bias_add(input, bias, (backend or _DEFAULT).key)


def bias_grad(grad_output: Tensor, *, backend: Backend | None = None) -> Tensor:
    """Compute BiasAddBackward: the sum of every channel of (N, C, X), of shape (C)."""
    return _operators.bias_grad(grad_output, (backend or _DEFAULT).key)


def _batched(
    src: Tensor, weights: Tensor, bias: Tensor | None, layer: Layer, backend: Backend | None
) -> Tensor:
    if torch.is_autocast_enabled(src.device.type):
        kind = torch.get_autocast_dtype(src.device.type)
        src, weights, bias = (None if each is None else each.to(kind) for each in (src, weights, bias))
    alone = src.dim() == weights.dim() - 1
    dst = _operators.convolve(
        src[None] if alone else src, weights, bias, _operators.numbers(layer), (backend or _DEFAULT).key
    )
    return dst[0] if alone else dst


def _gradient(
    which: int, src: Tensor, weights: Tensor, diff_dst: Tensor, layer: Layer, backend: Backend | None
) -> Tensor:
    needs = [index == which for index in range(3)]
    (gradient,) = _operators.gradients(
        src, weights, diff_dst, needs, _operators.numbers(layer), (backend or _DEFAULT).key
    )
    return gradient


def _shaped(like: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a tensor of which only dtype, device and shape count, without memory for its elements."""
    return like.new_zeros(()).expand(tuple(shape))


def _layer(weight: Tensor, stride: Ints, padding: Ints | str, dilation: Ints, groups: int) -> Layer:
    rank = weight.dim() - 2
    strides, dilations = _each("stride", stride, rank), _each("dilation", dilation, rank)
    if isinstance(padding, str):
        begin, end = _named_padding(padding, weight.shape[2:], strides, dilations)
    else:
        begin = end = _each("padding", padding, rank)
    return Layer(False, strides, dilations, begin, end, groups=groups, weights_format="OIX")


def _transposed(
    weight: Tensor, stride: Ints, padding: Ints, output_padding: Ints, groups: int, dilation: Ints
) -> Layer:
    rank = weight.dim() - 2
    pads = _each("padding", padding, rank)
    extra = _each("output_padding", output_padding, rank)
    strides, dilations = _each("stride", stride, rank), _each("dilation", dilation, rank)
    return Layer(True, strides, dilations, pads, pads, extra, groups, weights_format="IOX").folded()


def _named_padding(
    padding: str, kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the zeros before and after each axis for PyTorch's "same" and "valid"."""
    if padding == "valid":
        return (0,) * len(kernel), (0,) * len(kernel)
    if padding != "same" or any(stride != 1 for stride in strides):
        rule = f'padding must be integers, "valid", or "same" with stride 1, but is "{padding}"'
        rule += f" with stride {tuple(strides)}" if padding == "same" else ""
        raise InvalidParams(rule, errors=[{"loc": ["padding"], "msg": rule, "type": "value"}])
    totals = [step * (size - 1) for size, step in zip(kernel, dilations, strict=True)]
    return tuple(total // 2 for total in totals), tuple(total - total // 2 for total in totals)


def _each(name: str, value: Ints, rank: int) -> tuple[int, ...]:
    """Return one integer for each axis; a single one, or a list of one, is for all."""
    values = (value,) if isinstance(value, int) else tuple(int(each) for each in value)
    if len(values) == 1:
        return values * rank
    if len(values) != rank:
        allowed = "1 integer" if rank == 1 else f"1 or {rank} integers"
        rule = f"{name} must have {allowed}, but has {len(values)}"
        raise InvalidParams(rule, errors=[{"loc": [name], "msg": rule, "type": "length"}])
    return values
