"""The frames of the tensor stream: split anywhere, and no corruption goes undetected."""

from __future__ import annotations

import json
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from convgrad._errors import BrokenStream, ProtocolError
from convgrad._frames import MAGIC, Frame, FrameDecoder, encode

FRAMES: list[tuple[dict[str, Any], bytes]] = [
    ({"type": "begin", "shape": [2, 3], "op": "Größe"}, b""),
    ({"type": "tile", "seq": 0, "offset": [0, 0]}, bytes(range(24))),
    ({"type": "end", "tiles": 1, "stats": {}}, b""),
]


def joined(frames: list[tuple[dict[str, Any], bytes]]) -> bytes:
    """Return the bytes of a complete stream."""
    return b"".join(piece for header, body in frames for piece in encode(header, body))


def plain(frames: list[Frame]) -> list[tuple[dict[str, Any], bytes]]:
    """Return decoded frames in the form in which they were encoded."""
    return [(frame.header, bytes(frame.body)) for frame in frames]


def decode(data: bytes | bytearray, frames: list[Frame]) -> None:
    """Decode a complete stream in small pieces; `frames` receives what is decoded before an error."""
    decoder = FrameDecoder()
    for at in range(0, len(data), 7):
        frames += decoder.feed(data[at : at + 7])
    decoder.close()


json_values = st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5), max_size=3)


@pytest.mark.heavy
@given(st.lists(st.tuples(json_values, st.binary(max_size=50)), max_size=4), st.data())
def test_round_trip_in_any_pieces(frames: list[tuple[dict[str, Any], bytes]], data: st.DataObject) -> None:
    """The frames are the same however the stream is split."""
    stream = joined(frames)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    decoder = FrameDecoder()
    decoded: list[Frame] = []
    for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        decoded += decoder.feed(stream[begin:end])
    decoder.close()
    assert plain(decoded) == frames


def test_every_flipped_bit_is_found() -> None:
    """A stream with one bit flipped never yields all its frames, nor any frame that it did not have."""
    stream = joined(FRAMES)
    for bit in range(len(stream) * 8):
        damaged = bytearray(stream)
        damaged[bit // 8] ^= 1 << bit % 8
        decoded: list[Frame] = []
        with pytest.raises((ProtocolError, BrokenStream)):
            decode(damaged, decoded)
        assert plain(decoded) == FRAMES[: len(decoded)]


def test_a_body_is_received_in_place() -> None:
    """A body, also in pieces, is written into the memory that `place` returns, and must have its length."""
    result = np.zeros(6, np.float32)
    tile = np.arange(3, dtype=np.float32)
    decoder = FrameDecoder(place=lambda *_: result[3:].data.cast("B"))
    for byte in b"".join(encode({"type": "tile"}, tile.data)):
        decoder.feed(bytes([byte]))
    np.testing.assert_array_equal(result, [0, 0, 0, 0, 1, 2])
    for length in (11, 13):
        decoder = FrameDecoder(place=lambda *_: result[3:].data.cast("B"))
        with pytest.raises(ProtocolError, match="must have 12 bytes"):
            decoder.feed(b"".join(encode({}, bytes(length))))


@pytest.mark.parametrize("text", [b"", b"[]", b"1", b"{", b"\xff", b"[" * 100_000, b"9" * 10_000])
def test_headers_must_be_objects(text: bytes) -> None:
    """A header that is invalid JSON, nested too deeply or not an object is a protocol error."""
    head = struct.pack("<IIQ", MAGIC, len(text), 0)
    with pytest.raises(ProtocolError):
        FrameDecoder().feed(head + text + struct.pack("<I", zlib.crc32(text)))


@pytest.mark.parametrize(("json_length", "body_length"), [(2**32 - 1, 0), (11, 0), (2, 2**64 - 1), (2, 21)])
def test_lengths_over_the_limits_are_refused_at_once(json_length: int, body_length: int) -> None:
    """Lengths over the limits are rejected when the frame's head arrives, before any memory is allocated."""
    with pytest.raises(ProtocolError, match="at most"):
        FrameDecoder(max_json=10, max_body=20).feed(struct.pack("<IIQ", MAGIC, json_length, body_length))


def test_numbers_that_json_lacks_are_not_sent() -> None:
    """NaN in a header is the caller's error, raised before anything is sent."""
    with pytest.raises(ValueError, match="JSON"):
        encode({"value": float("nan")})
    assert json.loads(bytes(encode({"value": 1})[0])[16:-4]) == {"value": 1}
