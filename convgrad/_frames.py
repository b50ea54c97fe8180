"""The frames of `application/x-tensor-stream`; both ends use this module.

    u32 magic "CGG1" | u32 json_len | u64 body_len | json (UTF-8) | body | u32 crc32(json + body)

All numbers are little-endian.

`encode` never copies the body. `FrameDecoder` accepts bytes in pieces of any size and can receive a body straight into
its destination, so that a tile is written once.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from convgrad._errors import BrokenStream, ProtocolError

__all__ = ["MAGIC", "MEDIA_TYPE", "Frame", "FrameDecoder", "encode", "encode_pieces"]

MAGIC = 0x31474743
MEDIA_TYPE = "application/x-tensor-stream"

_JSON = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False)
_HEAD = struct.Struct("<IIQ")
_CRC = struct.Struct("<I")

Bytes = bytes | bytearray | memoryview
Destination = Callable[[dict[str, Any], int], "memoryview | None"]


@dataclass(frozen=True, slots=True)
class Frame:
    """A decoded frame; `body` is the memory that `place` returned, if it returned any."""

    header: dict[str, Any]
    body: memoryview | bytes


def encode(header: dict[str, Any], body: Bytes = b"") -> list[Bytes]:
    """Return the pieces of one frame in sending order; one of them is a view of `body`.

    The body must be contiguous and must not change until it has been sent.
    """
    data = _flat(body)
    head, *rest = encode_pieces(header, len(data), [data] if len(data) else [])
    return [head, *rest] if len(data) else [b"".join((head, *rest))]


def encode_pieces(header: dict[str, Any], length: int, body: Iterable[Bytes]) -> Iterator[Bytes]:
    """Yield the pieces of one frame whose body of `length` bytes is made piece by piece."""
    text = _JSON.encode(header).encode()
    crc = zlib.crc32(text)
    yield _HEAD.pack(MAGIC, len(text), length) + text
    for piece in body:
        crc = zlib.crc32(piece, crc)
        yield piece
    yield _CRC.pack(crc)


class FrameDecoder:
    """Decode frames from bytes in pieces of any size.

    `place(header, length)` is called between a frame's JSON and its body: it returns writeable memory of `length` bytes
    for the body, or None to let the decoder allocate it. The memory may be used once the frame has been returned:
    before that its checksum is not verified.
    """

    def __init__(self, max_json: int = 1 << 20, max_body: int = 1 << 34, *, place: Destination | None = None) -> None:
        self._max_json = max_json
        self._max_body = max_body
        self._place = place
        self._frame: Frame | None = None
        self._header: dict[str, Any] = {}
        self._body: memoryview | bytes = b""
        self._lengths = (0, 0)
        self._crc = 0
        self._await(_HEAD.size, self._read_head)

    def feed(self, data: Bytes) -> list[Frame]:
        """Decode the next bytes and return the frames that they complete.

        Raises `ProtocolError` for a wrong magic number, checksum, length or JSON. The decoder can't be used after that.
        """
        return list(self.decode(data))

    def decode(self, data: Bytes) -> Iterator[Frame]:
        """Decode like `feed`, but yield each frame before decoding the next, so that `place` may depend on it.

        Exhaust the iterator.
        """
        rest = _flat(data)
        while len(rest):
            rest = rest[self._fill(rest) :]
            while self._filled == self._length:
                self._then()
            if self._frame is not None:
                frame, self._frame = self._frame, None
                yield frame

    def close(self) -> None:
        """End the stream; raises `BrokenStream` in the middle of a frame."""
        if self._filled or self._then != self._read_head:
            raise BrokenStream("the tensor stream stopped in the middle of a frame")

    def _await(self, length: int, then: Callable[[], None], target: memoryview | None = None) -> None:
        self._length = length
        self._filled = 0
        self._target = target
        # Our own memory grows with the bytes that arrive, not to the length that a frame claims.
        self._own = bytearray()
        self._then = then

    def _fill(self, data: memoryview) -> int:
        count = min(len(data), self._length - self._filled)
        piece = data[:count]
        if self._target is None:
            self._own += piece
        else:
            self._target[self._filled : self._filled + count] = piece
        self._filled += count
        # The checksum is computed while the bytes are in the cache, not in a second pass.
        if self._then == self._read_body:
            self._crc = zlib.crc32(piece, self._crc)
        return count

    def _read_head(self) -> None:
        magic, json_length, body_length = _HEAD.unpack(self._own)
        if magic != MAGIC:
            raise ProtocolError(f"a frame must begin with 0x{MAGIC:08x}, but begins with 0x{magic:08x}")
        _check_length("JSON", json_length, self._max_json)
        _check_length("body", body_length, self._max_body)
        self._lengths = (json_length, body_length)
        self._await(json_length, self._read_json)

    def _read_json(self) -> None:
        text = bytes(self._own)
        self._crc = zlib.crc32(text)
        self._header = _parse_object(text)
        length = self._lengths[1]
        target = self._place(self._header, length) if self._place and length else None
        if target is not None and len(target) != length:
            raise ProtocolError(f"a frame's body must have {len(target)} bytes, but has {length}")
        self._await(length, self._read_body, target)

    def _read_body(self) -> None:
        self._body = memoryview(self._own) if self._target is None else self._target
        self._await(_CRC.size, self._read_crc)

    def _read_crc(self) -> None:
        (expected,) = _CRC.unpack(self._own)
        if expected != self._crc:
            raise ProtocolError(f"a frame's checksum must be 0x{expected:08x}, but is 0x{self._crc:08x}")
        self._frame = Frame(self._header, self._body)
        self._body = b""
        self._await(_HEAD.size, self._read_head)


def _flat(data: Bytes) -> memoryview:
    view = memoryview(data)
    # A view with an empty axis can't be cast.
    return view.cast("B") if view.nbytes else memoryview(b"")


def _check_length(what: str, length: int, limit: int) -> None:
    if length > limit:
        raise ProtocolError(f"a frame's {what} must have at most {limit} bytes, but has {length}")


def _parse_object(text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProtocolError("a frame's header must be JSON") from error
    if not isinstance(value, dict):
        raise ProtocolError("a frame's header must be a JSON object")
    return value
