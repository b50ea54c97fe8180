"""What compilers see of the calls of the service: operators of PyTorch, `torch.ops.convgrad`.

Their arguments are tensors, numbers and strings: a layer is a list of numbers, a backend its `key`. Those with an
underscore compute; with their results' shapes and strides alone, where a compiler asks for those. Those without are the
functions of `convgrad.torch` around them, which have gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from convgrad._client import Client
from convgrad._layer import Layer, Layout
from convgrad.torch._backend import Backend, as_ncx, in_layout, layout_of

__all__ = ["differentiable"]


def _numbers(layer: Layer) -> list[int]:
    extras = layer.output_padding or [0 for _ in layer.strides]
    axes = *layer.strides, *layer.dilations, *layer.pads_begin, *layer.pads_end, *extras
    return [int(layer.transposed), layer.groups, *axes]


def _layer(values: Sequence[int]) -> Layer:
    transposed, groups, *rest = values
    rank = len(rest) // 5
    strides, dilations, begin, end, extras = (tuple(rest[axis : axis + rank]) for axis in range(0, len(rest), rank))
    form = "IOX" if transposed else "OIX"
    return Layer(bool(transposed), strides, dilations, begin, end, extras, groups, form)


@torch.library.custom_op("convgrad::_conv", mutates_args=())
def _conv(src: Tensor, weights: Tensor, bias: Tensor | None, layer: Sequence[int], backend: str) -> Tensor:
    """Compute Convolution or ConvTranspose, in the layout of `src`, which PyTorch does not always choose."""
    dst = Backend.of(backend).run(_layer(layer), src, weights, bias)
    layout = layout_of(src)
    return as_ncx(in_layout(dst, layout).contiguous(), layout)


@torch.library.custom_op("convgrad::_conv_gradients", mutates_args=())
def _conv_gradients(
    src: Tensor, weights: Tensor, diff_dst: Tensor, needs: Sequence[bool], layer: Sequence[int], backend: str
) -> list[Tensor]:
    """Compute the gradients of a convolution for those of input, weights and bias that are needed, in one call."""
    return Backend.of(backend).gradients(_layer(layer), needs, src, weights, diff_dst)


@torch.library.custom_op("convgrad::_bias_add", mutates_args=())
def _bias_add(src: Tensor, bias: Tensor, backend: str) -> Tensor:
    """Compute BiasAdd."""
    return Backend.of(backend).bias_add(src, bias)


@torch.library.custom_op("convgrad::_bias_grad", mutates_args=())
def _bias_grad(diff_dst: Tensor, backend: str) -> Tensor:
    """Compute BiasAddBackward."""
    return Backend.of(backend).bias_gradient(diff_dst)


@_conv.register_fake
def _(src: Tensor, weights: Tensor, bias: Tensor | None, layer: Sequence[int], backend: str) -> Tensor:  # noqa: ARG001
    return _empty(src, _dst_shape(_layer(layer), src.shape, weights.shape), layout_of(src))


@_conv_gradients.register_fake
def _(src: Tensor, weights: Tensor, diff_dst: Tensor, needs: Sequence[bool], *how: Any) -> list[Tensor]:  # noqa: ARG001
    found = []
    if needs[0]:
        found.append(_empty(src, src.shape, layout_of(src, diff_dst)))
    if needs[1]:
        found.append(weights.new_empty(weights.shape))
    if needs[2]:
        found.append(diff_dst.new_empty(diff_dst.shape[1:2]))
    return found


@_bias_add.register_fake
def _(src: Tensor, bias: Tensor, backend: str) -> Tensor:  # noqa: ARG001
    return _empty(src, src.shape, layout_of(src))


@_bias_grad.register_fake
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
    n, channels, *sizes = shape
    return as_ncx(like.new_empty(shape if layout == "NCX" else (n, *sizes, channels)), layout)


class _Operators:
    """The `Backend` of a compiled call: each of its methods is an operator."""

    def __init__(self, key: str) -> None:
        self.key = key

    def run(self, layer: Layer, src: Tensor, weights: Tensor, bias: Tensor | None) -> Tensor:
        return _conv(src, weights, bias, _numbers(layer), self.key)

    def gradients(
        self, layer: Layer, needs: Sequence[bool], src: Tensor, weights: Tensor, diff_dst: Tensor
    ) -> list[Tensor]:
        return _conv_gradients(src, weights, diff_dst, needs, _numbers(layer), self.key)

    def bias_add(self, src: Tensor, bias: Tensor) -> Tensor:
        return _bias_add(src, bias, self.key)

    def bias_gradient(self, diff_dst: Tensor) -> Tensor:
        return _bias_grad(diff_dst, self.key)


_library = torch.library.Library("convgrad", "FRAGMENT")
_clients_of_compiled: set[Client | None] = set()


def differentiable(name: str, function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Define the operator of a function; return what applies the operator while compiling, and else the function.

    The last arguments are the layer, if it has one, and the backend. `torch.func` takes functions alone, and they are
    faster.
    """
    schema = str(getattr(torch.ops.convgrad, f"_{name}").default._schema)
    _library.define(schema.removeprefix("convgrad::_"))

    def compiled(*arguments: Any) -> Any:
        *values, key = arguments
        if not isinstance(values[-1], Tensor):
            values[-1] = _layer(values[-1])
        _clients_of_compiled.add(Backend.of(key).client)  # what is compiled has only its name
        return function.apply(*values, _Operators(key))

    _library.impl(name, compiled, "CompositeImplicitAutograd")
    operator = getattr(torch.ops.convgrad, name)

    def apply(*arguments: Any) -> Any:
        if not torch.compiler.is_compiling():
            return function.apply(*arguments)
        *values, backend = arguments
        return operator(*(_numbers(each) if isinstance(each, Layer) else each for each in values), backend.key)

    return apply
