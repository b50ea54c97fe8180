"""Small calls with their results, one of each operation and method: the documents of the APIs and `docs/` show them.

A call has its numbers in lists, so that a reader can follow it and send it as it stands. Its results are computed here,
one product after the other; tests compare them with the service and with the oracle.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count, product
from typing import Any, TypeVar

from convgrad._dtypes import dtype
from schemas.ops import resolve
from schemas.tables import CalledOperation

__all__ = ["call_example", "described", "infer_example", "infer_reply", "reply_example", "verified_example"]

K = TypeVar("K")
Tensor = dict[str, Any]
Index = tuple[int, ...]

# One image and one channel of `src`, two of `dst`; 2 x 2 taps at each of 2 x 2 positions of a 3 x 3 image.
_IN, _OUT, _TAPS = 1, 2, (2, 2)
_WIDE, _NARROW = (3, 3), (2, 2)


def call_example(called: CalledOperation) -> dict[str, Any]:
    """Return a call: attributes, inputs, and the options that make it reply with lists."""
    names, operation = called.wire_names, called.operation
    attributes: dict[str, Any] = {"data_format": "NCX"}
    if operation.convolves:
        attributes = {
            "strides": [1, 1],
            "pads_begin": [0, 0],
            "pads_end": [0, 0],
            "dilations": [1, 1],
            **attributes,
            names["weights_format"]: "IOX" if operation.transposed else "OIX",
        }
    shapes = _shapes(called)
    given: dict[str, Any] = {name: _tensor(shapes[name], values.values()) for name, values in _values(called).items()}
    given |= {"weights_shape": [*shapes["weights"]], "dst_shape": [*shapes["src"]]}
    rows = [row for row in operation.inputs if row.required or row.dtypes == "s32"]
    inputs = {names[row.name]: given[row.name] for row in rows}
    return {"attributes": attributes, "inputs": inputs, "options": {"encoding": "list"}}


def described(tensors: Mapping[K, Any]) -> dict[K, Any]:
    """Return tensors by name without their data."""
    return {
        name: {part: value[part] for part in ("dtype", "shape")} if isinstance(value, dict) else value
        for name, value in tensors.items()
    }


def verified_example(called: CalledOperation) -> dict[str, Any]:
    """Return a verification of the right result."""
    call = call_example(called)
    return {"attributes": call["attributes"], "inputs": call["inputs"] | _result(called)}


def reply_example(called: CalledOperation) -> dict[str, Any]:
    """Return the reply to the call."""
    call = call_example(called)
    op = resolve(called.called_as, call["attributes"], call["inputs"])
    stats = {"kernel": "reference", "algorithm": "direct", "gmac": op.macs / 1e9, "compute_ms": 0.1, "tiles": 1}
    return {"op": called.called_as, "outputs": _result(called), "resolved": op.reply_attributes(), "stats": stats}


def infer_example(called: CalledOperation) -> dict[str, Any]:
    """Return the call as an inference of the Open Inference Protocol, whose parameters are the attributes."""
    call = call_example(called)
    shapes = {name: value for name, value in call["inputs"].items() if isinstance(value, list)}
    tensors = {name: value for name, value in call["inputs"].items() if name not in shapes}
    return {"id": "example", "parameters": {**call["attributes"], **shapes}, "inputs": _inferred(tensors)}


def infer_reply(called: CalledOperation) -> dict[str, Any]:
    """Return the reply to the inference."""
    head = {"id": "example", "model_name": called.called_as, "model_version": "1"}
    return {**head, "outputs": _inferred(_result(called))}


def _inferred(tensors: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    return [
        {"name": name, "datatype": dtype(value["dtype"]).oip, "shape": value["shape"], "data": [*_flat(value["data"])]}
        for name, value in tensors.items()
    ]


def _flat(data: Any) -> Iterator[float]:
    for value in data:
        yield from _flat(value) if isinstance(value, list) else (value,)


def _result(called: CalledOperation) -> dict[str, Tensor]:
    """Return the output of the call by its name: the sum of the terms for each of its elements."""
    output = called.operation.output.name
    shape = _shapes(called)[output]
    sums = dict.fromkeys(_indices(shape), 0.0)
    for index, term in _terms(called):
        sums[index] += term
    return {called.wire_names[output]: _tensor(shape, sums.values())}


def _terms(called: CalledOperation) -> Iterator[tuple[Index, float]]:
    """Yield the terms of the formula, each with the element of the output that it is a part of."""
    operation, values = called.operation, _values(called)
    if operation.name == "BiasAddBackward":
        yield from (((index[1],), value) for index, value in values["diff_dst"].items())
    elif operation.name == "BiasAdd":
        yield from ((index, value + values["bias"][index[1:2]]) for index, value in values["src"].items())
    else:
        first, second = (row.name for row in operation.inputs if row.required)
        for o, i, k, x in product(range(_OUT), range(_IN), _indices(_TAPS), _indices(_NARROW)):
            y = tuple(map(sum, zip(x, k, strict=True)))
            at = {"src": (0, i, *y), "dst": (0, o, *x), "weights": (o, i, *k)}
            if operation.transposed:
                at = {"src": (0, i, *x), "dst": (0, o, *y), "weights": (i, o, *k)}
            at |= {f"diff_{name}": index for name, index in at.items()}
            yield at[operation.computes], values[first][at[first]] * values[second][at[second]]


def _shapes(called: CalledOperation) -> dict[str, Index]:
    """Return the shape of every tensor that an operation may have, by canonical name."""
    operation = called.operation
    src, dst = (_NARROW, _WIDE) if operation.transposed else (_WIDE, _NARROW)
    shapes: dict[str, Index] = {"src": (1, _IN, *src), "dst": (1, _OUT, *dst), "weights": (_OUT, _IN, *_TAPS)}
    if operation.transposed:
        shapes["weights"] = (_IN, _OUT, *_TAPS)
    if not operation.convolves:
        shapes["src"] = shapes["dst"]
    shapes["bias"] = (_OUT,)
    return shapes | {f"diff_{name}": shape for name, shape in shapes.items()}


def _values(called: CalledOperation) -> dict[str, dict[Index, int]]:
    """Return the elements of each tensor: 1, 2, 3 and so on."""
    return {name: dict(zip(_indices(shape), count(1), strict=False)) for name, shape in _shapes(called).items()}


def _indices(shape: Sequence[int]) -> Iterator[Index]:
    return product(*map(range, shape))


def _tensor(shape: Index, values: Iterable[float]) -> Tensor:
    """Return a tensor with its elements in nested lists."""
    nested: list[Any] = list(values)
    for size in reversed(shape[1:]):
        nested = [nested[start : start + size] for start in range(0, len(nested), size)]
    return {"dtype": "f32", "shape": list(shape), "data": nested}
