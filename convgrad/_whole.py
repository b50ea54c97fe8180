"""The reply of the binary API: a JSON head, then the elements of the output, received straight into the result."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from convgrad._dtypes import MAX_RANK, dtype_of_oip
from convgrad._errors import BrokenStream, ProtocolError, Unsupported
from convgrad._events import Event, Result
from convgrad._frames import Bytes
from convgrad._shared import SharedBuffer

__all__ = ["Whole"]

_MAX_HEAD = 1 << 20


class Whole:
    """Decode one reply from its bytes, in pieces of any size; the first `head_length` bytes are its head.

    The result has only the output, without resolved attributes and statistics. With `output` the service has
    written it there, and the reply is only its head. `on_output` is called with name and size of the output.
    """

    def __init__(
        self,
        head_length: int,
        *,
        output: SharedBuffer | None = None,
        on_output: Callable[[str, int], None] | None = None,
    ) -> None:
        if head_length > _MAX_HEAD:
            raise ProtocolError(f"the head of a reply must have at most {_MAX_HEAD} bytes, but has {head_length}")
        self._head_left = head_length
        self._shared = output
        self._on_output = on_output
        self._head = bytearray()
        self._result: Result | None = None
        self._rest = memoryview(b"")

    def feed(self, data: Bytes) -> Iterator[Event]:
        """Decode the next bytes; there are no events."""
        data = memoryview(data)
        if self._result is None:
            self._head += data[: self._head_left]
            data, self._head_left = data[self._head_left :], self._head_left - len(data)
            if self._head_left > 0:
                return iter(())
            self._begin()
        if len(data) > len(self._rest):
            raise ProtocolError("the reply has data after its output")
        if data:
            self._rest[: len(data)] = data
        self._rest = self._rest[len(data) :]
        return iter(())

    def close(self) -> Result:
        """End the reply and return the result; raises `BrokenStream` if it is incomplete."""
        if self._result is None or self._rest:
            raise BrokenStream("the reply stopped before the end of its output")
        return self._result

    def _begin(self) -> None:
        """Parse the head and allocate the output."""
        try:
            head = json.loads(self._head)
            (output,) = head["outputs"]
            op, name, kind = head["model_name"], output["name"], dtype_of_oip(output["datatype"])
            shape = tuple(output["shape"])
            size = output["parameters"]["binary_data_size"] if self._shared is None else self._shared.size
        except (ValueError, KeyError, TypeError, RecursionError, Unsupported) as error:
            raise ProtocolError("the head of the reply must describe one binary output") from error
        if not all(type(dim) is int and dim >= 0 for dim in shape) or len(shape) > MAX_RANK:
            raise ProtocolError(f"the shape in the head of the reply must have up to {MAX_RANK} integers of at least 0")
        if math.prod(shape) * kind.itemsize != size:
            raise ProtocolError(f"the output needs {math.prod(shape) * kind.itemsize} bytes, but its head says {size}")
        if self._on_output is not None:
            self._on_output(name, size)
        if self._shared is not None:
            self._result = Result(op, {name: self._shared.array(kind.numpy, shape)})
            return
        try:
            array: np.ndarray[Any, Any] = np.empty(shape, kind.numpy)
        except (ValueError, MemoryError) as error:
            raise ProtocolError(f"no memory for a tensor of shape {list(shape)}") from error
        self._rest = array.reshape(-1).view(np.uint8).data
        self._result = Result(op, {name: array})
