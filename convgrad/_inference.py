"""The binary request body of a call: the JSON head of an Open Inference Protocol request, then the tensors' bytes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from convgrad._errors import InvalidParams
from convgrad._multipart import Body, checked, joined
from convgrad._tensors import Bytes, Part

__all__ = ["BINARY", "HEAD_LENGTH", "inference", "json_bytes"]


BINARY = "application/octet-stream"
HEAD_LENGTH = "Inference-Header-Content-Length"

_SHAPES = frozenset({"weights_shape", "filter_shape", "dst_shape", "output_shape"})
_MAX_AXES = 16
_INT64 = 2**63
# Parameters of the protocol, and the members of a dumped op that replace attributes.
_NOT_ATTRIBUTES = frozenset(
    {"algorithm", "binary_data_output", "headers", "priority", "reference", "reproducible", "timeout", "kind", "attrs"}
)
_PREFIXES = ("sequence_", "triton_")


def inference(
    tensors: Mapping[str, Part],
    lists: Mapping[str, Any],
    attributes: Mapping[str, Any],
    options: Mapping[str, Any],
    *,
    whole: bool,
) -> Body | None:
    """Build the body of a call; None when the protocol can't represent it.

    `whole` requests the outputs as bytes instead of frames. Shapes come first, so that the service can check the call
    before it receives a tensor.
    """
    if any(name in _NOT_ATTRIBUTES or name.startswith(_PREFIXES) for name in attributes):
        return None
    if not all(name in _SHAPES and _is_shape(value) for name, value in lists.items()):
        return None
    if any(part.elements is None for part in tensors.values()):
        return None
    described = [_input(name, "INT64", [len(value)], 8 * len(value)) for name, value in lists.items()]
    described += [_input(checked(name), part.dtype.oip, part.shape, part.size) for name, part in tensors.items()]
    parameters = dict(attributes)
    if "deadline_ms" in options:
        parameters["timeout"] = options["deadline_ms"] * 1000
    parameters |= {name: options[name] for name in ("reference", "reproducible", "algorithm") if name in options}
    if whole:
        parameters["binary_data_output"] = True
    asked: dict[str, Any] = {"outputs": [{"name": name} for name in options["outputs"]]} if "outputs" in options else {}
    head = json_bytes({"inputs": described, "parameters": parameters, **asked})
    shapes = b"".join(np.array(value, "<i8").tobytes() for value in lists.values())

    def pieces() -> Iterator[Bytes]:
        yield head + shapes
        for part in tensors.values():
            assert part.elements is not None
            yield from part.elements()

    length = len(head) + len(shapes) + sum(part.size for part in tensors.values())
    headers = {HEAD_LENGTH: str(len(head))}
    return Body(BINARY, length, lambda: joined(pieces()), headers)


def json_bytes(document: Mapping[str, Any]) -> bytes:
    """Encode a request as JSON, with NumPy integers as numbers; raises `InvalidParams` for other types."""
    try:
        return _JSON.encode(document).encode()
    except (TypeError, ValueError) as error:
        raise InvalidParams("attributes must be integers, strings and lists of integers") from error


def _plain(value: object) -> Any:
    if isinstance(value, np.integer | np.ndarray):
        return value.tolist()
    raise TypeError(type(value).__name__)


_JSON = json.JSONEncoder(default=_plain, separators=(",", ":"), allow_nan=False)


def _is_shape(value: Sequence[Any]) -> bool:
    return len(value) <= _MAX_AXES and all(
        isinstance(number, int | np.integer) and not isinstance(number, bool) and -_INT64 <= int(number) < _INT64
        for number in value
    )


def _input(name: str, datatype: str, shape: Sequence[int], nbytes: int) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": nbytes}}
