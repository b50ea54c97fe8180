"""Convolutions for JAX that convgrad computes, with their gradients: needs the extra `[jax]`.

`conv_general_dilated`, `conv_transpose`, `conv` and `conv_with_general_padding` take the arguments of their namesakes
in `jax.lax`, `dimension_numbers` too. They work under `jit`, `grad` of any order and `vmap`, by `custom_vjp` and
`pure_callback`. Arrays are float32, float16, bfloat16, or float64, which is slow; sums are accumulated in float32 or
wider and rounded once. A gradient is one call, for exactly the arguments that are differentiated.

>>> dst = convgrad.jax.conv_general_dilated(  # doctest: +SKIP
...     src, weights, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

Shapes that do not fit raise JAX's own errors. What only `jax.lax` can compute raises `convgrad.Unsupported`. Errors of
the service itself are raised by JAX, as its runtime error with their message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from convgrad._client import Client
from convgrad._core import Algorithm
from convgrad._errors import Unsupported
from convgrad._layer import GRADIENTS, Layer, Layout, client_or_default, use

__all__ = ["conv", "conv_general_dilated", "conv_transpose", "conv_with_general_padding", "use"]

Pads = str | Sequence[tuple[int, int]]
Ints = Sequence[int]

_DTYPES = ("float32", "float16", "bfloat16", "float64")
_NEEDS = {(True, True): ("diff_src", "diff_weights"), (True, False): ("diff_src",), (False, True): ("diff_weights",)}


def conv_general_dilated(
    lhs: Any,
    rhs: Any,
    window_strides: Ints,
    padding: Pads,
    lhs_dilation: Ints | None = None,
    rhs_dilation: Ints | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: Any = None,  # noqa: ARG001 - sums are never less precise than float32
    preferred_element_type: Any = None,
    *,
    client: Client | None = None,
    reference: bool = False,
    algorithm: Algorithm | None = None,
) -> Any:
    """Compute Convolution, or ConvTranspose where `lhs_dilation` is above 1, like `jax.lax.conv_general_dilated`.

    One to three spatial axes. `client` and `algorithm` are by default those of `use`; `reference` selects the slow
    kernel that accumulates in float64. Raises `Unsupported` for other dtypes, `batch_group_count` above 1, negative
    padding, and `lhs_dilation` together with strides.
    """
    lhs, rhs = jnp.asarray(lhs), jnp.asarray(rhs)
    given = {
        "window_strides": window_strides,
        "padding": padding,
        "lhs_dilation": lhs_dilation,
        "rhs_dilation": rhs_dilation,
        "dimension_numbers": dimension_numbers,
        "feature_group_count": feature_group_count,
        "batch_group_count": batch_group_count,
        "preferred_element_type": preferred_element_type,
    }
    result = jax.eval_shape(lambda *arrays: jax.lax.conv_general_dilated(*arrays, **given), lhs, rhs)  # checks them
    _check_dtypes(lhs.dtype, result.dtype)
    if batch_group_count != 1:
        raise Unsupported(f"batch_group_count must be 1, but is {batch_group_count}: use jax.lax for this convolution")
    numbers = jax.lax.conv_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers)
    rank = lhs.ndim - 2
    kernel = [rhs.shape[axis] for axis in numbers.rhs_spec[2:]]
    src_spatial = [lhs.shape[axis] for axis in numbers.lhs_spec[2:]]
    strides, dilations = tuple(window_strides), tuple(rhs_dilation or (1,) * rank)
    extents = [step * (size - 1) + 1 for size, step in zip(kernel, dilations, strict=True)]
    pads = jax.lax.padtype_to_pads(src_spatial, extents, strides, padding) if isinstance(padding, str) else padding
    steps = tuple(lhs_dilation or (1,) * rank)

    weights, weights_format = _weights(rhs, numbers.rhs_spec)
    src, layout = _data(lhs, numbers.lhs_spec)
    if any(step != 1 for step in steps):
        layer, zeros = _transposed(steps, strides, dilations, extents, pads, feature_group_count, weights_format)
        first = weights_format.index("X")
        weights = jnp.flip(weights, tuple(range(first, first + rank)))
    else:
        _check_pads(pads)
        begin, end = (tuple(int(pair[side]) for pair in pads) for side in (0, 1))
        layer, zeros = Layer(False, strides, dilations, begin, end, (), feature_group_count, weights_format), []
    reference = reference or lhs.dtype == "float64"
    spatial = [result.shape[axis] - sum(zeros[at] if zeros else ()) for at, axis in enumerate(numbers.out_spec[2:])]
    n, channels = (result.shape[axis] for axis in numbers.out_spec[:2])
    shape = (n, channels, *spatial) if layout == "NCX" else (n, *spatial, channels)
    dst = _convolve(_Call(layer, layout, shape, reference, algorithm, client), src, weights)
    if any(map(any, zeros)):
        dst = jnp.pad(dst, [(0, 0), (0, 0), *zeros] if layout == "NCX" else [(0, 0), *zeros, (0, 0)])
    return _placed(dst, layout, numbers.out_spec)


def conv(
    lhs: Any, rhs: Any, window_strides: Ints, padding: str, precision: Any = None, preferred_element_type: Any = None,
    *, client: Client | None = None, reference: bool = False, algorithm: Algorithm | None = None,
) -> Any:  # fmt: skip
    """Compute Convolution of (N, C, X) and (O, I, kernel), like `jax.lax.conv`; see `conv_general_dilated`."""
    return conv_general_dilated(
        lhs, rhs, window_strides, padding, None, None, None, 1, 1, precision, preferred_element_type,
        client=client, reference=reference, algorithm=algorithm,
    )  # fmt: skip


def conv_with_general_padding(
    lhs: Any, rhs: Any, window_strides: Ints, padding: Pads, lhs_dilation: Ints | None, rhs_dilation: Ints | None,
    precision: Any = None, preferred_element_type: Any = None,
    *, client: Client | None = None, reference: bool = False, algorithm: Algorithm | None = None,
) -> Any:  # fmt: skip
    """Compute Convolution or ConvTranspose like `jax.lax.conv_with_general_padding`; see `conv_general_dilated`."""
    return conv_general_dilated(
        lhs, rhs, window_strides, padding, lhs_dilation, rhs_dilation, None, 1, 1, precision, preferred_element_type,
        client=client, reference=reference, algorithm=algorithm,
    )  # fmt: skip


def conv_transpose(
    lhs: Any,
    rhs: Any,
    strides: Ints,
    padding: Pads,
    rhs_dilation: Ints | None = None,
    dimension_numbers: Any = None,
    transpose_kernel: bool = False,
    precision: Any = None,
    preferred_element_type: Any = None,
    *,
    client: Client | None = None,
    reference: bool = False,
    algorithm: Algorithm | None = None,
) -> Any:
    """Compute ConvTranspose like `jax.lax.conv_transpose`, whose default layout is channels-last.

    With `transpose_kernel` it is the gradient of a convolution with these weights, as in other frameworks.
    """
    lhs, rhs = jnp.asarray(lhs), jnp.asarray(rhs)
    rank = lhs.ndim - 2
    if dimension_numbers is None:
        axes = "DHW"[3 - rank :]
        dimension_numbers = (f"N{axes}C", f"{axes}IO", f"N{axes}C")
    numbers = jax.lax.conv_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers)
    if isinstance(padding, str):
        dilations = rhs_dilation or (1,) * rank
        kernel = [rhs.shape[axis] for axis in numbers.rhs_spec[2:]]
        extents = [step * (size - 1) + 1 for size, step in zip(kernel, dilations, strict=True)]
        padding = [_transposed_pads(padding, extent, step) for extent, step in zip(extents, strides, strict=True)]
    if transpose_kernel:
        rhs = jnp.flip(jnp.swapaxes(rhs, *numbers.rhs_spec[:2]), numbers.rhs_spec[2:])
    return conv_general_dilated(
        lhs, rhs, (1,) * rank, padding, strides, rhs_dilation, numbers, 1, 1, precision, preferred_element_type,
        client=client, reference=reference, algorithm=algorithm,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Call:
    """The static arguments of a callback; `shape` is that of dst."""

    layer: Layer
    layout: Layout
    shape: tuple[int, ...]
    reference: bool
    algorithm: Algorithm | None
    client: Client | None

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments of the methods of `Layer`."""
        return {"layout": self.layout, "reference": self.reference, "algorithm": self.algorithm}


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _convolve(call: _Call, src: Any, weights: Any) -> Any:
    def compute(src: Any, weights: Any) -> Any:
        arrays = np.asarray(src), np.asarray(weights)  # DLPack has no bfloat16 for NumPy
        client = client_or_default(call.client)
        return call.layer.run(client, *arrays, **call.settings)

    return _called_back(compute, jax.ShapeDtypeStruct(call.shape, src.dtype), src, weights)


def _convolve_forward(call: _Call, src: Any, weights: Any) -> Any:
    # The key tells the backward pass which gradients are needed, and is no array.
    needed = dict.fromkeys(_NEEDS[src.perturbed, weights.perturbed], ())
    return _convolve(call, src.value, weights.value), (src.value, weights.value, needed)


def _convolve_backward(call: _Call, residuals: Any, diff_dst: Any) -> Any:
    src, weights, needed = residuals
    if isinstance(diff_dst, SymbolicZero):
        return None, None
    found = dict(zip(sorted(needed), _gradients(call, tuple(sorted(needed)), src, weights, diff_dst), strict=True))
    return found.get("diff_src"), found.get("diff_weights")


_convolve.defvjp(_convolve_forward, _convolve_backward, symbolic_zeros=True)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gradients(call: _Call, names: tuple[str, ...], src: Any, weights: Any, diff_dst: Any) -> Any:
    """Compute diff_src, diff_weights or both in one call."""

    def compute(src: Any, weights: Any, diff_dst: Any) -> Any:
        arrays = [np.asarray(array) for array in (src, weights, diff_dst)]
        client = client_or_default(call.client)
        found = call.layer.gradients(client, names, *arrays, **call.settings)
        return tuple(found[name] for name in names)

    like = dict(zip(GRADIENTS, (src, weights), strict=False))
    shapes = tuple(jax.ShapeDtypeStruct(like[name].shape, like[name].dtype) for name in names)
    return _called_back(compute, shapes, src, weights, diff_dst)


def _gradients_forward(call: _Call, names: tuple[str, ...], src: Any, weights: Any, diff_dst: Any) -> Any:
    return _gradients(call, names, src, weights, diff_dst), (src, weights, diff_dst)


def _gradients_backward(call: _Call, names: tuple[str, ...], residuals: Any, cotangents: Any) -> Any:
    """A convolution is linear in each of its tensors, so these are the same operations on other tensors."""
    src, weights, diff_dst = residuals
    of = dict(zip(names, cotangents, strict=True))
    for_src = for_weights = None
    terms = []
    if "diff_weights" in of:
        (for_src,) = _gradients(call, ("diff_src",), src, of["diff_weights"], diff_dst)
        terms.append(_convolve(call, src, of["diff_weights"]))
    if "diff_src" in of:
        (for_weights,) = _gradients(call, ("diff_weights",), of["diff_src"], weights, diff_dst)
        terms.append(_convolve(call, of["diff_src"], weights))
    return for_src, for_weights, sum(terms[1:], terms[0])


_gradients.defvjp(_gradients_forward, _gradients_backward)


def _called_back(compute: Callable[..., Any], shapes: Any, *arrays: Any) -> Any:
    return jax.pure_callback(compute, shapes, *arrays, vmap_method="sequential")


def _check_dtypes(dtype: Any, result: Any) -> None:
    if dtype.name not in _DTYPES:
        raise Unsupported(f"convgrad computes {', '.join(_DTYPES)}, but lhs is {dtype}: convert it with .astype()")
    if result != dtype:
        raise Unsupported(f"preferred_element_type must be that of lhs, {dtype}, but is {result}: convert the result")


def _check_pads(pads: Any) -> None:
    for axis, pair in enumerate(pads):
        if min(pair) < 0:
            raise Unsupported(f"padding must be at least 0, but is {tuple(pair)} on spatial axis {axis}: slice instead")


def _data(array: Any, spec: Ints) -> tuple[Any, Layout]:
    """Return a data array in one of the service's layouts: as it is, if it has one, or as (N, C, X)."""
    axes = tuple(range(array.ndim))
    if tuple(spec) == (0, axes[-1], *axes[1:-1]) and array.ndim > 2:
        return array, "NXC"
    return (array if tuple(spec) == axes else jnp.transpose(array, spec)), "NCX"


def _weights(array: Any, spec: Ints) -> tuple[Any, str]:
    """Return the weights in one of the service's formats, as they are if possible, and its name."""
    rank = array.ndim - 2
    placed = dict(zip(("O", "I", *"X" * rank), [[axis] for axis in spec], strict=False)) | {"X": [*spec[2:]]}
    for name in ("OIX", "XIO", "IOX", "XOI"):
        if [axis for letter in name for axis in placed[letter]] == [*range(array.ndim)]:
            return array, name
    return jnp.transpose(array, spec), "OIX"


def _placed(dst: Any, layout: Layout, spec: Ints) -> Any:
    """Return a result in the layout of the caller."""
    now = [*range(dst.ndim)] if layout == "NCX" else [0, dst.ndim - 1, *range(1, dst.ndim - 1)]
    order = [0] * dst.ndim
    for source, target in zip(now, spec, strict=True):
        order[target] = source
    return dst if order == [*range(dst.ndim)] else jnp.transpose(dst, order)


def _transposed(
    steps: tuple[int, ...], strides: Ints, dilations: tuple[int, ...], extents: Ints, pads: Any, groups: int,
    weights_format: str,
) -> tuple[Layer, list[tuple[int, int]]]:  # fmt: skip
    """Return the transposed convolution that equals a convolution of an input dilated by `steps`.

    Element x of the input meets tap k at x * step - k * dilation + pad; with the taps in reverse order that is a
    transposed convolution with ``pads_begin = extent - 1 - pad``. Where no tap meets the input the result is zero: so
    many zeros before and after each axis are returned too, as far as they are not the layer's own output padding.
    """
    if any(stride != 1 for stride in strides):
        raise Unsupported(
            f"lhs_dilation {steps} needs window_strides of 1, but they are {tuple(strides)}: use jax.lax, or slice"
        )
    begin, end, extra, zeros = [], [], [], []
    for step, extent, (low, high) in zip(steps, extents, pads, strict=True):
        begin.append(int(max(0, extent - 1 - low)))
        end.append(int(max(0, extent - 1 - high)))
        beyond = int(max(0, high - extent + 1))
        extra.append(min(beyond, step - 1))
        zeros.append((int(max(0, low - extent + 1)), beyond - extra[-1]))
    return Layer(True, steps, dilations, tuple(begin), tuple(end), tuple(extra), groups, weights_format), zeros


def _transposed_pads(padding: str, extent: int, step: int) -> tuple[int, int]:
    """Return the pads with which "SAME" gives outputs of `step` times the input, and "VALID" all that meet a tap."""
    if padding == "SAME":
        total = extent + step - 2
        begin = extent - 1 if step > extent - 1 else -(-total // 2)
    elif padding == "VALID":
        total = extent + step - 2 + max(extent - step, 0)
        begin = extent - 1
    else:
        raise ValueError(f'padding must be "SAME", "VALID" or pairs of integers, but is "{padding}"')
    return begin, total - begin
