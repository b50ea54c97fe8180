"""Assemble the reply of a call: frames in, events out, and at the end the verified array."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from convgrad._dtypes import DTYPES, MAX_RANK
from convgrad._errors import BrokenStream, ProtocolError, error_from_code
from convgrad._events import Array, Event, Progress, Result, Tile
from convgrad._frames import Bytes, Frame, FrameDecoder

__all__ = ["Assembly"]


class Assembly:
    """Decode one reply from its bytes, in pieces of any size: a stream for each output, one after another.

    A tile that is contiguous in the output is received straight into it; any other is copied there once.
    """

    def __init__(self) -> None:
        self._decoder = FrameDecoder(place=self._place)
        self._array: Array | None = None
        self._begin: dict[str, Any] = {}
        self._output = ""
        self._tiles = 0
        self._expected: list[str] = []
        self._outputs: dict[str, Array] = {}
        self._result: Result | None = None

    def feed(self, data: Bytes) -> Iterator[Event]:
        """Decode the next bytes and yield the events that they complete; exhaust the iterator.

        Raises the error that the service sent in the stream, and `ProtocolError` when the stream is malformed.
        """
        for frame in self._decoder.decode(data):
            if (event := self._event(frame)) is not None:
                yield event

    def close(self) -> Result:
        """End the stream and return the result; raises `BrokenStream` if it is incomplete."""
        if self._result is None:
            raise BrokenStream("the tensor stream stopped before its end")
        self._decoder.close()
        return self._result

    def _event(self, frame: Frame) -> Event | None:
        header = frame.header
        kind = header.get("type")
        if kind == "error":
            raise _error_in(header)
        if self._result is not None or (kind == "begin") == (self._array is not None):
            raise ProtocolError("a tensor stream must be one `begin`, then tiles, then one `end`, for each output")
        match kind:
            case "begin":
                self._start(header)
            case "progress":
                return Progress(_integer(header, "done"), _integer(header, "total"))
            case "tile":
                return self._tile(frame)
            case "end":
                self._finish(header)
        # Frames of unknown types are for later versions.
        return None

    def _start(self, header: dict[str, Any]) -> None:
        shape, dtype = _integers(header, "shape"), DTYPES.get(_text(header, "dtype"))
        if dtype is None:
            raise ProtocolError("`dtype` in the tensor stream must be one that this version knows")
        try:
            self._array = np.empty(shape, dtype.numpy)
        except (ValueError, MemoryError) as error:
            raise ProtocolError(f"no memory for a tensor of shape {list(shape)}") from error
        self._output, self._tiles = _text(header, "output"), 0
        if not self._outputs:
            self._begin, self._expected = header, _names(header) or [self._output]
        if self._output != self._expected[len(self._outputs)]:
            raise ProtocolError("the outputs of a tensor stream must come in the order of its first `begin`")

    def _place(self, header: dict[str, Any], length: int) -> memoryview | None:
        if header.get("type") != "tile":
            raise ProtocolError("only tiles may have a body")
        box = self._box(header)
        if length != box.nbytes:
            raise ProtocolError(f"a tile of shape {list(box.shape)} must have {box.nbytes} bytes, but has {length}")
        return box.reshape(-1).view(np.uint8).data if box.flags.c_contiguous else None

    def _box(self, header: dict[str, Any]) -> Array:
        """Return the view of the output that a tile fills."""
        if self._array is None:
            raise ProtocolError("a tile came before `begin`")
        offset, shape = _integers(header, "offset"), _integers(header, "shape")
        whole = self._array.shape
        if not len(offset) == len(shape) == len(whole):
            raise ProtocolError(f"a tile's offset and shape must have {len(whole)} axes")
        if any(at + size > dim for at, size, dim in zip(offset, shape, whole, strict=True)):
            raise ProtocolError(f"a tile at {list(offset)} of shape {list(shape)} must lie within {list(whole)}")
        slices = (slice(at, at + size) for at, size in zip(offset, shape, strict=True))
        # With the ellipsis the index gives a view even if the output has no axes.
        index: tuple[Any, ...] = (*slices, ...)
        box: Array = self._array[index]
        return box

    def _tile(self, frame: Frame) -> Tile:
        box = self._box(frame.header)
        if len(frame.body) != box.nbytes:
            raise ProtocolError(f"a tile must have {box.nbytes} bytes, but has {len(frame.body)}")
        if not box.flags.c_contiguous:
            box[...] = np.frombuffer(frame.body, np.uint8).view(box.dtype).reshape(box.shape)
        box.flags.writeable = False
        self._tiles += 1
        seq, offset = _integer(frame.header, "seq"), _integers(frame.header, "offset")
        return Tile(self._output, seq, offset, box.shape, box)

    def _finish(self, header: dict[str, Any]) -> None:
        array, tiles = self._array, _integer(header, "tiles")
        assert array is not None
        if tiles != self._tiles:
            raise ProtocolError(f"`end` announces {tiles} tiles, but {self._tiles} arrived")
        # The checksum of the whole also proves that the tiles left no gap.
        if hashlib.sha256(array.reshape(-1).view(np.uint8).data).hexdigest() != _text(header, "sha256"):
            raise ProtocolError("the sha256 of the received tensor does not match the one in `end`")
        self._outputs[self._output], self._array = array, None
        if len(self._outputs) < len(self._expected):
            return
        resolved, stats = _object(self._begin, "resolved"), _object(header, "stats")
        warnings = tuple(map(str, self._begin.get("warnings") or ()))
        self._result = Result(_text(self._begin, "op"), self._outputs, resolved, stats, warnings)


def _error_in(header: dict[str, Any]) -> Exception:
    data = header.get("data")
    return error_from_code(
        _text(header, "code"), _text(header, "message"), data=data if isinstance(data, dict) else None
    )


def _names(header: dict[str, Any]) -> list[str]:
    """Return the names of all outputs, if the header has them."""
    value = header.get("outputs", [])
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise _wrong("outputs", "a list of strings")
    if len(set(value)) != len(value):
        raise _wrong("outputs", "names, each once")
    return value


def _text(header: dict[str, Any], key: str) -> str:
    value = header.get(key)
    if not isinstance(value, str):
        raise _wrong(key, "a string")
    return value


def _integer(header: dict[str, Any], key: str) -> int:
    value = header.get(key)
    if type(value) is not int or value < 0:
        raise _wrong(key, "an integer of at least 0")
    return value


def _integers(header: dict[str, Any], key: str) -> tuple[int, ...]:
    value = header.get(key)
    if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
        raise _wrong(key, "a list of integers of at least 0")
    if len(value) > MAX_RANK or math.prod(item for item in value if item) >= 2**60:
        raise _wrong(key, f"at most {MAX_RANK} axes of fewer than 2^60 elements")
    return tuple(value)


def _object(header: dict[str, Any], key: str) -> dict[str, Any]:
    value = header.get(key, {})
    if not isinstance(value, dict):
        raise _wrong(key, "an object")
    return value


def _wrong(key: str, rule: str) -> ProtocolError:
    return ProtocolError(f"`{key}` in the tensor stream must be {rule}")
