"""Conv and ConvTranspose nodes of ONNX as calls of the service; the `onnx` package itself is not needed.

A node is a `NodeProto`, or a mapping such as ``{"op_type": "Conv", "attributes": {"strides": [2, 2]}}``. The data of
both operators are (N, C, X); weights are (M, C / group, kernel) for Conv and (C, M / group, kernel) for ConvTranspose.

>>> convgrad.onnx.run(node, x, w, b)  # doctest: +SKIP
>>> convgrad.onnx.gradients(node, x, w, dy)  # doctest: +SKIP

Raise `InvalidParams` for attributes that contradict each other or the shapes, and `Unsupported` for other operators,
unknown attributes, and outputs larger than what the kernel covers; besides, what a call of the service raises.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from convgrad._client import Client
from convgrad._core import Algorithm
from convgrad._errors import InvalidParams, Unsupported
from convgrad._events import Array
from convgrad._layer import GRADIENTS, Layer, client_or_default, use

__all__ = ["call_of", "gradients", "run", "use"]

Node = Any
Ints = Sequence[int]

_OWN = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")
_ATTRIBUTES = {"Conv": _OWN, "ConvTranspose": (*_OWN, "output_padding", "output_shape")}
_AUTO_PADS = ("NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID")
# Kinds of attributes, as numbered by AttributeProto.
_INT, _STRING, _INTS = 2, 3, 7


def call_of(node: Node, x_shape: Ints, w_shape: Ints) -> tuple[str, dict[str, Any]]:
    """Return the service's operation for a node with inputs of these shapes, and its attributes.

    `auto_pad` and `output_shape` have become explicit padding.
    """
    layer = _layer(node, tuple(x_shape), tuple(w_shape))
    return layer.family, layer.attributes("NCX")


def run(
    node: Node, x: Any, w: Any, b: Any = None, *,
    client: Client | None = None, reference: bool = False, algorithm: Algorithm | None = None,
) -> Array:  # fmt: skip
    """Compute the output Y of a node, in the dtype of `x`: float32, float16, bfloat16, or float64, which is slow.

    `client` and `algorithm` are by default those of `use`.
    """
    x, w = _array(x), _array(w)
    layer = _layer(node, x.shape, w.shape)
    reference = reference or x.dtype == np.float64
    client = client_or_default(client)
    return layer.run(client, x, w, b, layout="NCX", reference=reference, algorithm=algorithm)


def gradients(
    node: Node,
    x: Any,
    w: Any,
    dy: Any,
    names: Sequence[str] = GRADIENTS,
    *,
    client: Client | None = None,
    reference: bool = False,
    algorithm: Algorithm | None = None,
) -> Mapping[str, Array]:
    """Compute gradients of a node for `dy`, that of its output, in one call.

    `names` are some of diff_src, diff_weights and diff_bias, the gradients for X, W and B. `client` and `algorithm` are
    by default those of `use`.
    """
    x, w = _array(x), _array(w)
    layer = _layer(node, x.shape, w.shape)
    reference = reference or x.dtype == np.float64
    client = client_or_default(client)
    return layer.gradients(client, list(names), x, w, dy, layout="NCX", reference=reference, algorithm=algorithm)


def _array(value: Any) -> Array:
    return value if isinstance(value, np.ndarray) else np.asarray(value)


def _layer(node: Node, x: tuple[int, ...], w: tuple[int, ...]) -> Layer:
    kind, given = _read(node)
    rank = len(w) - 2
    if rank < 1 or len(x) != len(w):
        raise _invalid("shape", f"X and W must both have at least 3 dimensions, but have {len(x)} and {len(w)}")
    kernel = _ints(given, "kernel_shape", rank, 1) or w[2:]
    if tuple(kernel) != w[2:]:
        raise _invalid("kernel_shape", f"kernel_shape must be that of W, {list(w[2:])}, but is {list(kernel)}")
    strides = _ints(given, "strides", rank, 1) or (1,) * rank
    dilations = _ints(given, "dilations", rank, 1) or (1,) * rank
    extents = [step * (size - 1) + 1 for size, step in zip(kernel, dilations, strict=True)]
    auto_pad = given.get("auto_pad", "NOTSET")
    if auto_pad not in _AUTO_PADS:
        raise _invalid("auto_pad", f"auto_pad must be one of {', '.join(_AUTO_PADS)}")
    pads = _ints(given, "pads", 2 * rank, 0)
    if auto_pad != "NOTSET" and pads is not None and any(pads):
        raise _invalid("pads", f"pads and auto_pad {auto_pad} must not be given together")
    begin, end = (pads or (0,) * 2 * rank)[:rank], (pads or (0,) * 2 * rank)[rank:]
    groups = int(given.get("group", 1))
    if kind == "Conv":
        if auto_pad.startswith("SAME"):
            totals = [
                max(0, (-(-size // stride) - 1) * stride + extent - size)
                for size, stride, extent in zip(x[2:], strides, extents, strict=True)
            ]
            begin, end = _split(totals, upper=auto_pad == "SAME_UPPER")
        return Layer(False, strides, dilations, begin, end, (), groups, "OIX")
    extra = _ints(given, "output_padding", rank, 0) or (0,) * rank
    wanted = _ints(given, "output_shape", rank, 1)
    if wanted is None and auto_pad.startswith("SAME"):
        wanted = tuple(size * stride for size, stride in zip(x[2:], strides, strict=True))
    if wanted is not None:
        axes = zip(x[2:], strides, extents, extra, wanted, strict=True)
        totals = [stride * (size - 1) + more + extent - out for size, stride, extent, more, out in axes]
        if min(totals) < 0:
            raise Unsupported(
                f"an output of {list(wanted)} is larger than what the kernel covers: it needs padding of {min(totals)}"
            )
        begin, end = _split(totals, upper=auto_pad == "SAME_UPPER")
    return Layer(True, strides, dilations, begin, end, extra, groups, "IOX").folded()


def _split(totals: Sequence[int], *, upper: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Split padding between both sides; the odd one goes to the end if `upper`."""
    less, more = tuple(total // 2 for total in totals), tuple(total - total // 2 for total in totals)
    return (less, more) if upper else (more, less)


def _read(node: Node) -> tuple[str, dict[str, Any]]:
    """Return the operator and the attributes of a node."""
    if isinstance(node, Mapping):
        kind, domain, given = node.get("op_type"), node.get("domain", ""), dict(node.get("attributes") or {})
    else:
        kind, domain = node.op_type, node.domain
        given = {each.name: _value(each) for each in node.attribute}
    if kind not in _ATTRIBUTES or domain not in ("", "ai.onnx"):
        raise Unsupported(f"the operator must be Conv or ConvTranspose of ai.onnx, but is {domain or 'ai.onnx'}.{kind}")
    if unknown := sorted(given.keys() - {*_ATTRIBUTES[kind]}):
        raise Unsupported(f"{kind} has no attribute {unknown[0]}: it has {', '.join(sorted(_ATTRIBUTES[kind]))}")
    return kind, given


def _value(attribute: Any) -> Any:
    """Return the value of an AttributeProto."""
    if attribute.type == _INT:
        return int(attribute.i)
    if attribute.type == _STRING:
        return attribute.s.decode()
    if attribute.type == _INTS:
        return [int(each) for each in attribute.ints]
    raise Unsupported(f"attribute {attribute.name} must be an integer, integers or text")


def _ints(given: Mapping[str, Any], name: str, count: int, least: int) -> tuple[int, ...] | None:
    """Return an attribute of `count` integers, or None if it is absent or empty."""
    values = tuple(int(value) for value in given.get(name) or ())
    if not values:
        return None
    if len(values) != count:
        raise _invalid(name, f"{name} must have {count} integers, but has {len(values)}")
    if min(values) < least:
        raise _invalid(name, f"{name} must be at least {least}, but has {min(values)}")
    return values


def _invalid(name: str, rule: str) -> InvalidParams:
    return InvalidParams(rule, errors=[{"loc": ["attributes", name], "msg": rule, "type": "value"}])
