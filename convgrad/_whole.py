"""The reply of the binary API: a JSON head, then the elements of the outputs, received straight into the result."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

import numpy as np

from convgrad._dtypes import MAX_RANK, dtype_of_oip
from convgrad._errors import BrokenStream, ProtocolError, Unsupported
from convgrad._events import Event, Result
from convgrad._frames import Bytes

__all__ = ["Whole"]

_MAX_HEAD = 1 << 20


class Whole:
    """Decode one reply from its bytes, in pieces of any size; the first `head_length` bytes are its head.

    The result has only the outputs, without resolved attributes and statistics.
    """

    def __init__(self, head_length: int) -> None:
        if head_length > _MAX_HEAD:
            raise ProtocolError(f"the head of a reply must have at most {_MAX_HEAD} bytes, but has {head_length}")
        self._head_left = head_length
        self._head = bytearray()
        self._result: Result | None = None
        self._rest: list[memoryview] = []

    def feed(self, data: Bytes) -> Iterator[Event]:
        """Decode the next bytes; there are no events."""
        data = memoryview(data)
        if self._result is None:
            self._head += data[: self._head_left]
            data, self._head_left = data[self._head_left :], self._head_left - len(data)
            if self._head_left > 0:
                return iter(())
            self._begin()
        while data and self._rest:
            room = self._rest[0]
            some = min(len(room), len(data))
            room[:some] = data[:some]
            data = data[some:]
            self._rest[:1] = [room[some:]] if some < len(room) else []
        if data:
            raise ProtocolError("the reply has data after its last output")
        return iter(())

    def close(self) -> Result:
        """End the reply and return the result; raises `BrokenStream` if it is incomplete."""
        if self._result is None or self._rest:
            raise BrokenStream("the reply stopped before the end of its outputs")
        return self._result

    def _begin(self) -> None:
        """Parse the head and allocate the outputs that follow it."""
        sizes, outputs = {}, {}
        try:
            head = json.loads(self._head)
            for output in head["outputs"]:
                name, kind, shape = output["name"], dtype_of_oip(output["datatype"]), tuple(output["shape"])
                sizes[name] = output["parameters"]["binary_data_size"]
                outputs[name] = kind, shape
            op = head["model_name"]
        except (ValueError, KeyError, TypeError, RecursionError, Unsupported) as error:
            raise ProtocolError("the head of the reply must describe binary outputs") from error
        if not outputs or len(outputs) < len(head["outputs"]):
            raise ProtocolError("the head of the reply must describe at least one output, and each once")
        for name, (kind, shape) in outputs.items():
            if not all(type(dim) is int and dim >= 0 for dim in shape) or len(shape) > MAX_RANK:
                raise ProtocolError(
                    f"the shape in the head of the reply must have up to {MAX_RANK} integers of at least 0"
                )
            if (needed := math.prod(shape) * kind.itemsize) != sizes[name]:
                raise ProtocolError(f"the output needs {needed} bytes, but its head says {sizes[name]}")
        arrays = {}
        for name, (kind, shape) in outputs.items():
            try:
                arrays[name] = np.empty(shape, kind.numpy)
            except (ValueError, MemoryError) as error:
                raise ProtocolError(f"no memory for a tensor of shape {list(shape)}") from error
            if sizes[name]:
                self._rest.append(arrays[name].reshape(-1).view(np.uint8).data)
        self._result = Result(op, arrays)
