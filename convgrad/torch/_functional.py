"""Differentiable functions, each computed by one operation of the service; the arguments are those of PyTorch.

Input and output are (N, C, X) or, without a batch, (C, X), with one to three spatial axes in any memory format: if the
memory is channels-last, it is sent as it is, and so is the result. Weights are PyTorch's: (O, I / groups, kernel), for
transposed convolutions (I, O / groups, kernel). All tensors have the same dtype: float32, float16, bfloat16, or
float64, which is slow. Sums are accumulated in float32 or wider and rounded once.

Raise `convgrad.ConvgradError`: `InvalidParams` for shapes that do not fit, `Unsupported` for other dtypes.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from convgrad._errors import InvalidParams
from convgrad._layer import Layer
from convgrad.torch._backend import Backend
from convgrad.torch._operators import differentiable

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


class _Convolve(torch.autograd.Function):
    """Convolution or ConvTranspose; one call computes all gradients that are needed."""

    @staticmethod
    def forward(src: Tensor, weights: Tensor, bias: Tensor | None, layer: Layer, backend: Backend) -> Tensor:
        return backend.run(layer, src, weights, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG004
        src, weights, _, ctx.layer, ctx.backend = inputs
        ctx.save_for_backward(src, weights)

    @staticmethod
    def backward(ctx: Any, diff_dst: Tensor) -> Any:
        src, weights = ctx.saved_tensors
        needs = ctx.needs_input_grad[:3]
        found = iter(_Gradients.apply(src, weights, diff_dst, needs, ctx.layer, ctx.backend))
        return *(next(found) if needed else None for needed in needs), None, None


class _Gradients(torch.autograd.Function):
    """The gradients of a convolution that are needed.

    A convolution is linear in its input, its weights and the gradient of its output. So each gradient of a gradient is
    one of the same operations, on other tensors.
    """

    @staticmethod
    def forward(
        src: Tensor, weights: Tensor, diff_dst: Tensor, needs: Sequence[bool], layer: Layer, backend: Backend
    ) -> Any:
        return tuple(backend.gradients(layer, needs, src, weights, diff_dst))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG004
        src, weights, diff_dst, ctx.needs, ctx.layer, ctx.backend = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(src, weights, diff_dst)

    @staticmethod
    def backward(ctx: Any, *of_gradients: Tensor | None) -> Any:
        src, weights, diff_dst = ctx.saved_tensors
        given = iter(of_gradients)
        of_src, of_weights, of_bias = (next(given) if needed else None for needed in ctx.needs)
        for_src, for_weights, for_diff_dst = ctx.needs_input_grad[:3]
        more = ctx.layer, ctx.backend
        found: list[Tensor | None] = [None, None, None]
        if of_weights is not None and for_src:
            (found[0],) = _Gradients.apply(src, of_weights, diff_dst, (True, False, False), *more)
        if of_src is not None and for_weights:
            (found[1],) = _Gradients.apply(of_src, weights, diff_dst, (False, True, False), *more)
        if for_diff_dst:
            terms = []
            if of_weights is not None:
                terms.append(_Convolve.apply(src, of_weights, of_bias, *more))
            if of_src is not None:
                terms.append(_Convolve.apply(of_src, weights, None if terms else of_bias, *more))
            if not terms and of_bias is not None:
                terms.append(_by_channel(of_bias, diff_dst.shape))
            found[2] = sum(terms) if terms else None
        return *found, None, None, None


class _BiasAdd(torch.autograd.Function):
    """BiasAdd."""

    @staticmethod
    def forward(src: Tensor, bias: Tensor, backend: Backend) -> Tensor:
        return backend.bias_add(src, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG004
        ctx.backend = inputs[2]

    @staticmethod
    def backward(ctx: Any, diff_dst: Tensor) -> Any:
        for_bias = ctx.needs_input_grad[1]
        return diff_dst, _BiasGradient.apply(diff_dst, ctx.backend) if for_bias else None, None


class _BiasGradient(torch.autograd.Function):
    """BiasAddBackward."""

    @staticmethod
    def forward(diff_dst: Tensor, backend: Backend) -> Tensor:
        return backend.bias_gradient(diff_dst)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG004
        ctx.shape = inputs[0].shape

    @staticmethod
    def backward(ctx: Any, of_bias: Tensor) -> Any:
        return _by_channel(of_bias, ctx.shape), None


for _function in (_Convolve, _Gradients, _BiasAdd, _BiasGradient):
    # PyTorch asks for the signature in every call, and Python computes it anew unless it is stored
    vars(_function.forward)["__signature__"] = inspect.signature(_function.forward)

_convolve = differentiable("conv", _Convolve)
_gradients = differentiable("conv_gradients", _Gradients)
_bias_add = differentiable("bias_add", _BiasAdd)
_bias_gradient = differentiable("bias_grad", _BiasGradient)


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
    return _bias_add(input, bias, backend or _DEFAULT)


def bias_grad(grad_output: Tensor, *, backend: Backend | None = None) -> Tensor:
    """Compute BiasAddBackward: the sum of every channel of (N, C, X), of shape (C)."""
    return _bias_gradient(grad_output, backend or _DEFAULT)


def _batched(src: Tensor, weights: Tensor, bias: Tensor | None, layer: Layer, backend: Backend | None) -> Tensor:
    if torch.is_autocast_enabled(src.device.type):
        kind = torch.get_autocast_dtype(src.device.type)
        src, weights, bias = (None if each is None else each.to(kind) for each in (src, weights, bias))
    alone = src.dim() == weights.dim() - 1
    result: Tensor = _convolve(src[None] if alone else src, weights, bias, layer, backend or _DEFAULT)
    return result[0] if alone else result


def _gradient(
    which: int, src: Tensor, weights: Tensor, diff_dst: Tensor, layer: Layer, backend: Backend | None
) -> Tensor:
    needs = tuple(index == which for index in range(3))
    (result,) = _gradients(src, weights, diff_dst, needs, layer, backend or _DEFAULT)
    return result


def _shaped(like: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a tensor of which only dtype, device and shape count, without memory for its elements."""
    return like.new_zeros(()).expand(tuple(shape))


def _by_channel(values: Tensor, shape: Sequence[int]) -> Tensor:
    return values.reshape(-1, *(1,) * (len(shape) - 2)).expand(shape)


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
