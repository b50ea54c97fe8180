"""The operators `torch.ops.convgrad`: what `torch.compile` needs to know of the calls that the service computes.

Each has an implementation, the shapes, dtypes and strides of its results for tensors without data, and its gradients, in
terms of these operators, so that there are derivatives of any order. Operators take only tensors, numbers and strings:
a layer is a list of numbers, and a backend its `key`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from convgrad._layer import Layer, Layout
from convgrad.torch._backend import Backend, layout_of

__all__ = ["bias_add", "bias_grad", "convolve", "gradients", "numbers"]


def numbers(layer: Layer) -> list[int]:
    """Return a layer as an argument of operators."""
    extras = layer.output_padding or [0 for _ in layer.strides]
    return [
        int(layer.transposed), layer.groups, *layer.strides, *layer.dilations, *layer.pads_begin, *layer.pads_end, *extras
    ]  # fmt: skip


def _layer(values: Sequence[int]) -> Layer:
    transposed, groups, *rest = values
    rank = len(rest) // 5
    each = [tuple(rest[start : start + rank]) for start in range(0, len(rest), rank)]
    return Layer(bool(transposed), *each, groups=groups, weights_format="IOX" if transposed else "OIX")


@torch.library.custom_op("convgrad::conv", mutates_args=())
def convolve(src: Tensor, weights: Tensor, bias: Tensor | None, layer: Sequence[int], backend: str) -> Tensor:
    """Compute Convolution or ConvTranspose."""
    return Backend.of(backend).run(_layer(layer), src, weights, bias)


@torch.library.custom_op("convgrad::conv_gradients", mutates_args=())
def gradients(
    src: Tensor, weights: Tensor, diff_dst: Tensor, needs: Sequence[bool], layer: Sequence[int], backend: str
) -> list[Tensor]:
    """Compute the gradients of a convolution for those of input, weights and bias that are needed, in one call."""
    return Backend.of(backend).gradients(_layer(layer), needs, src, weights, diff_dst)


@torch.library.custom_op("convgrad::bias_add", mutates_args=())
def bias_add(src: Tensor, bias: Tensor, backend: str) -> Tensor:
    """Compute BiasAdd."""
    return Backend.of(backend).bias_add(src, bias)


@torch.library.custom_op("convgrad::bias_grad", mutates_args=())
def bias_grad(diff_dst: Tensor, backend: str) -> Tensor:
    """Compute BiasAddBackward."""
    return Backend.of(backend).bias_gradient(diff_dst)


@convolve.register_fake
def _(src: Tensor, weights: Tensor, bias: Tensor | None, layer: Sequence[int], backend: str) -> Tensor:  # noqa: ARG001
    return _empty(src, _dst_shape(_layer(layer), src.shape, weights.shape), layout_of(src))


@gradients.register_fake
def _(
    src: Tensor, weights: Tensor, diff_dst: Tensor, needs: Sequence[bool], layer: Sequence[int], backend: str  # noqa: ARG001
) -> list[Tensor]:
    made = (
        lambda: _empty(src, src.shape, layout_of(src, diff_dst)),
        lambda: weights.new_empty(weights.shape),
        lambda: diff_dst.new_empty(diff_dst.shape[1:2]),
    )
    return [make() for make, needed in zip(made, needs, strict=True) if needed]


@bias_add.register_fake
def _(src: Tensor, bias: Tensor, backend: str) -> Tensor:  # noqa: ARG001
    return _empty(src, src.shape, layout_of(src))


@bias_grad.register_fake
def _(diff_dst: Tensor, backend: str) -> Tensor:  # noqa: ARG001
    return diff_dst.new_empty(diff_dst.shape[1:2])


def _dst_shape(layer: Layer, src: Sequence[int], weights: Sequence[int]) -> list[int]:
    sizes = []
    for axis, stride in enumerate(layer.strides):
        extent = layer.dilations[axis] * (weights[2 + axis] - 1)
        pads = layer.pads_begin[axis] + layer.pads_end[axis]
        if layer.transposed:
            size = (src[2 + axis] - 1) * stride + extent + 1 + layer.output_padding[axis] - pads
        else:
            size = (src[2 + axis] + pads - extent - 1) // stride + 1
        sizes.append(max(size, 0))  # the service says what does not fit
    return [src[0], weights[1] * layer.groups if layer.transposed else weights[0], *sizes]


def _empty(like: Tensor, shape: Sequence[int], layout: Layout) -> Tensor:
    if layout == "NCX":
        return like.new_empty(shape)
    n, channels, *sizes = shape
    return like.new_empty((n, *sizes, channels)).movedim(-1, 1)


def _keep_convolution(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG001
    src, weights, _, ctx.layer, ctx.backend = inputs
    ctx.client = Backend.of(ctx.backend).client  # lives as long as the graph
    ctx.save_for_backward(src, weights)


def _convolution_backward(ctx: Any, diff_dst: Tensor) -> Any:
    needs = list(ctx.needs_input_grad[:3])
    found = iter(gradients(*ctx.saved_tensors, diff_dst, needs, ctx.layer, ctx.backend))
    return *(next(found) if needed else None for needed in needs), None, None


def _keep_gradients(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG001
    src, weights, diff_dst, ctx.needs, ctx.layer, ctx.backend = inputs
    ctx.client = Backend.of(ctx.backend).client
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(src, weights, diff_dst)


def _gradients_backward(ctx: Any, of_gradients: Sequence[Tensor | None]) -> Any:
    """Compute the gradients of gradients.

    A convolution is linear in its input, its weights and the gradient of its output. So each gradient of a gradient is
    one of the same operations, on other tensors.
    """
    src, weights, diff_dst = ctx.saved_tensors
    given = iter(of_gradients)
    of_src, of_weights, of_bias = (next(given) if needed else None for needed in ctx.needs)
    for_src, for_weights, for_diff_dst = ctx.needs_input_grad[:3]
    more = ctx.layer, ctx.backend
    found: list[Tensor | None] = [None, None, None]
    if of_weights is not None and for_src:
        (found[0],) = gradients(src, of_weights, diff_dst, [True, False, False], *more)
    if of_src is not None and for_weights:
        (found[1],) = gradients(of_src, weights, diff_dst, [False, True, False], *more)
    if for_diff_dst:
        terms = []
        if of_weights is not None:
            terms.append(convolve(src, of_weights, of_bias, *more))
        if of_src is not None:
            terms.append(convolve(of_src, weights, None if terms else of_bias, *more))
        if not terms and of_bias is not None:
            terms.append(_by_channel(of_bias, diff_dst.shape))
        found[2] = sum(terms) if terms else None
    return *found, None, None, None


def _keep_bias(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG001
    ctx.shape, ctx.backend = inputs[0].shape, inputs[-1]
    ctx.client = Backend.of(ctx.backend).client


def _bias_add_backward(ctx: Any, diff_dst: Tensor) -> Any:
    return diff_dst, bias_grad(diff_dst, ctx.backend) if ctx.needs_input_grad[1] else None, None


def _bias_grad_backward(ctx: Any, of_bias: Tensor) -> Any:
    return _by_channel(of_bias, ctx.shape), None


def _by_channel(values: Tensor, shape: Sequence[int]) -> Tensor:
    return values.reshape(-1, *(1,) * (len(shape) - 2)).expand(shape)


convolve.register_autograd(_convolution_backward, setup_context=_keep_convolution)
gradients.register_autograd(_gradients_backward, setup_context=_keep_gradients)
bias_add.register_autograd(_bias_add_backward, setup_context=_keep_bias)
bias_grad.register_autograd(_bias_grad_backward, setup_context=_keep_bias)
