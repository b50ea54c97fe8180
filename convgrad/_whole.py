"""The reply of the binary API: a JSON head, then the elements of the output, straight into the result."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from convgrad._dtypes import dtype_of_oip
from convgrad._errors import BrokenStream, ProtocolError, Unsupported
from convgrad._events import Event, Result
from convgrad._frames import Bytes

__all__ = ["Whole"]

_LONGEST_HEAD = 1 << 20
_MAX_RANK = 64


class Whole:
    """Read one reply from its bytes, in pieces of any size; `head_length` bytes of it are its head.

    The result has an output and nothing else.
    """

    def __init__(self, head_length: int) -> None:
        if head_length > _LONGEST_HEAD:
            raise ProtocolError(f"the head of a reply has at most {_LONGEST_HEAD} bytes")
        self._head_left = head_length
        self._head = bytearray()
        self._result: Result | None = None
        self._room = memoryview(b"")

    def feed(self, data: Bytes) -> Iterator[Event]:
        """Take the next bytes; there is nothing to tell before the end."""
        data = memoryview(data)
        if self._result is None:
            self._head += data[: self._head_left]
            data, self._head_left = data[self._head_left :], self._head_left - len(data)
            if self._head_left > 0:
                return iter(())
            self._begin()
        if len(data) > len(self._room):
            raise ProtocolError("the reply goes on behind the last byte of its output")
        self._room[: len(data)] = data
        self._room = self._room[len(data) :]
        return iter(())

    def close(self) -> Result:
        """Say that no more bytes come, and return the result; raises `BrokenStream` when some are missing."""
        if self._result is None or self._room:
            raise BrokenStream("the reply stopped before the last byte of its output")
        return self._result

    def _begin(self) -> None:
        """Read the head and make room for the output."""
        try:
            head = json.loads(self._head)
            (output,) = head["outputs"]
            op, name, kind = head["model_name"], output["name"], dtype_of_oip(output["datatype"])
            shape, size = tuple(output["shape"]), output["parameters"]["binary_data_size"]
        except (ValueError, KeyError, TypeError, RecursionError, Unsupported) as error:
            raise ProtocolError("the head of the reply must describe one output with its bytes behind it") from error
        if not all(type(dim) is int and dim >= 0 for dim in shape) or len(shape) > _MAX_RANK:
            raise ProtocolError("the shape in the head of the reply must be integers from 0")
        if math.prod(shape) * kind.itemsize != size:
            raise ProtocolError(f"the output needs {math.prod(shape) * kind.itemsize} bytes, its head says {size}")
        try:
            array: np.ndarray[Any, Any] = np.empty(shape, kind.numpy)
        except (ValueError, MemoryError) as error:
            raise ProtocolError(f"there is no room for a tensor of shape {list(shape)}") from error
        self._room = array.reshape(-1).view(np.uint8).data
        self._result = Result(op, {name: array})
