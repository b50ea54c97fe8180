"""Reassembly of a reply: split anywhere, tiles in any order, and no corruption goes undetected."""

from __future__ import annotations

import hashlib
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from convgrad import BrokenStream, Overloaded, Progress, ProtocolError, Result, Tile
from convgrad._assembly import Assembly
from tests.convgrad.server import frame, stream_of

ARRAY = np.arange(2 * 3 * 4, dtype=np.float32).reshape(2, 3, 4)
BEGIN: dict[str, Any] = {"type": "begin", "op": "Op", "output": "o", "dtype": "f32", "shape": [2, 3], "tiles": 1}
TILE: dict[str, Any] = {"type": "tile", "seq": 0, "offset": [0, 0], "shape": [2, 3]}
DATA = np.arange(6, dtype=np.float32).tobytes()
END: dict[str, Any] = {"type": "end", "tiles": 1, "sha256": hashlib.sha256(DATA).hexdigest(), "stats": {}}


def assemble(*pieces: bytes) -> Result:
    """Return the result of a complete reply."""
    assembly = Assembly()
    for piece in pieces:
        list(assembly.feed(piece))
    return assembly.close()


def reply(begin: Any = None, tile: Any = None, end: Any = None, *, body: bytes = DATA) -> bytes:
    """Return a reply of one tile, with some members of its frames replaced."""
    frames = [(BEGIN, begin, b""), (TILE, tile, body), (END, end, b"")]
    return b"".join(frame(header | (changes or {}), data) for header, changes, data in frames)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("tiles", [1, 2, 4])
def test_any_pieces_make_the_array(dtype: Any, tiles: int) -> None:
    """The array is the same whether the reply arrives byte by byte, frame by frame or all at once."""
    array = ARRAY.astype(dtype)
    frames = stream_of(array, tiles=tiles)
    whole = b"".join(frames)
    for pieces in ([whole], frames, [bytes([byte]) for byte in whole]):
        result = assemble(*pieces).array
        assert result.dtype == array.dtype
        np.testing.assert_array_equal(result, array)


@given(st.data())
def test_tiles_in_any_order(data: st.DataObject) -> None:
    """Tiles may come in any order, contiguous or not, and be split anywhere."""
    begin, *middle, end = stream_of(ARRAY, tiles=4)
    order = data.draw(st.permutations(middle))
    whole = b"".join([begin, *order, end])
    cut = data.draw(st.integers(0, len(whole)))
    np.testing.assert_array_equal(assemble(whole[:cut], whole[cut:]).array, ARRAY)


def test_events_come_before_the_error_that_ends_them() -> None:
    """Events before an error are delivered first, even if everything arrived in one piece."""
    fault = frame({"type": "error", "code": "overloaded", "message": "full", "data": {"retry_after": 2}})
    events = Assembly().feed(b"".join([*stream_of(ARRAY)[:3], fault]))
    assert isinstance(next(events), Progress)
    assert isinstance(next(events), Tile)
    with pytest.raises(Overloaded, match="full") as caught:
        next(events)
    assert caught.value.retry_after == 2
    with pytest.raises(Overloaded, match="full"):
        assemble(frame({"type": "error", "code": "overloaded", "message": "full", "data": [2]}))


@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (3, 0), (1,), ()])
def test_outputs_of_few_elements(shape: tuple[int, ...]) -> None:
    """An output may be empty, or have no axes; a frame of an unknown type between the known ones changes nothing."""
    array = np.ones(shape, np.float32)
    begin = frame(BEGIN | {"shape": list(shape)}) + frame({"type": "hint", "x": 1})
    tile = frame(TILE | {"offset": [0] * len(shape), "shape": list(shape)}, array.tobytes())
    end = frame(END | {"sha256": hashlib.sha256(array.tobytes()).hexdigest()})
    np.testing.assert_array_equal(assemble(begin + tile + end).array, array)


def test_contiguous_tiles_are_received_in_place() -> None:
    """A tile shares the output's memory, whether it is contiguous there or not."""
    for tiles in (1, 2):
        assembly = Assembly()
        events = list(assembly.feed(b"".join(stream_of(ARRAY, tiles=tiles))))
        result = assembly.close().array
        boxes = [event.data for event in events if isinstance(event, Tile)]
        assert len(boxes) == tiles
        assert all(np.shares_memory(box, result) for box in boxes)


BROKEN: dict[str, tuple[bytes, str]] = {
    "another element, under a matching crc": (reply(body=np.arange(1, 7, dtype=np.float32).tobytes()), "sha256"),
    "checksum of the tensor": (reply(end={"sha256": "0" * 64}), "sha256"),
    "no checksum": (reply(end={"sha256": None}), "sha256"),
    "fewer tiles than announced": (reply(end={"tiles": 2}), "`end` announces 2 tiles, but 1 arrived"),
    "tile outside": (reply(tile={"offset": [1, 0]}), "must lie within"),
    "tile far outside": (reply(tile={"offset": [10**15, 0]}), "must lie within"),
    "negative offset": (reply(tile={"offset": [-1, 0]}), "offset"),
    "offset of other rank": (reply(tile={"offset": [0]}), "must have 2 axes"),
    "no offset": (reply(tile={"offset": None}), "offset"),
    "booleans": (reply(tile={"offset": [False, False]}), "offset"),
    "body too long": (reply(body=DATA + b"\0"), "24 bytes"),
    "body too short": (reply(body=DATA[:-1]), "24 bytes"),
    "no body": (reply(body=b""), "24 bytes"),
    "no seq": (reply(tile={"seq": None}), "seq"),
    "unknown dtype": (reply(begin={"dtype": "f8"}), "dtype"),
    "no dtype": (reply(begin={"dtype": []}), "dtype"),
    "huge shape": (reply(begin={"shape": [2**31, 2**31]}), "shape"),
    "shape beyond memory": (reply(begin={"shape": [2**57]}), "memory"),
    "too many axes": (reply(begin={"shape": [1] * 65}), "shape"),
    "resolved is no object": (reply(begin={"resolved": []}), "resolved"),
    "two beginnings": (frame(BEGIN) + reply(), "one `begin`"),
    "two ends": (reply() + frame(END), "then one `end`"),
    "tile first": (frame(TILE, DATA), "before `begin`"),
    "end first": (frame(END), "one `begin`"),
    "no type": (frame({}), "one `begin`"),
    "body of another frame": (frame(BEGIN, b"x"), "only tiles"),
    "outputs no list": (reply(begin={"outputs": "dw"}), "outputs"),
    "outputs no names": (reply(begin={"outputs": [1]}), "outputs"),
    "outputs twice": (reply(begin={"outputs": ["diff_weights"] * 2}), "outputs"),
    "another output": (reply(begin={"outputs": ["diff_bias"]}), "in the order"),
    "the second output again": (reply(begin={"outputs": ["diff_weights", "diff_bias"]}) + reply(), "in the order"),
    "error without code": (frame({"type": "error"}), "code"),
    "error without message": (frame({"type": "error", "code": "overloaded"}), "message"),
}


@pytest.mark.parametrize("name", list(BROKEN))
def test_protocol_violations_are_detected(name: str) -> None:
    """A reply that contradicts itself or the contract is a protocol error that says where."""
    stream, message = BROKEN[name]
    with pytest.raises(ProtocolError, match=message):
        assemble(stream)


def test_several_outputs() -> None:
    """A stream for each output makes one result, with the statistics of the last end."""
    names: dict[str, Any] = {"outputs": ["diff_weights", "diff_bias"]}
    second = list(stream_of(ARRAY + 1, output="diff_bias", **names))
    result = assemble(*stream_of(ARRAY, **names), *second)
    assert list(result.outputs) == names["outputs"]
    assert (result.outputs["diff_bias"] == ARRAY + 1).all()
    assert (result.array == ARRAY).all()


def test_every_truncation_is_found() -> None:
    """A reply truncated anywhere is an error, also between its outputs."""
    names: dict[str, Any] = {"outputs": ["diff_weights", "diff_bias"]}
    stream = b"".join([*stream_of(ARRAY, **names), *stream_of(ARRAY, output="diff_bias", **names)])
    for end in range(len(stream)):
        with pytest.raises(BrokenStream):
            assemble(stream[:end])
