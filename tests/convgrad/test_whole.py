"""The reply of the binary API: split anywhere, and no corruption goes undetected."""

from __future__ import annotations

import json
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from convgrad import BrokenStream, ProtocolError
from convgrad._events import Array
from convgrad._whole import Whole
from tests.convgrad.server import whole_of

ARRAY = np.arange(24, dtype=np.float32).reshape(2, 3, 4)


def read(head: bytes, *pieces: bytes) -> Array:
    """Return the array of a complete reply."""
    whole = Whole(len(head))
    for piece in (head, *pieces):
        assert list(whole.feed(piece)) == []
    return whole.close().array


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("shape", [(2, 3, 4), (24,), (0, 3), ()])
def test_any_pieces_make_the_array(dtype: Any, shape: tuple[int, ...]) -> None:
    """The array is the same and writeable, whether the reply arrives byte by byte, in two parts or all at once."""
    array = np.resize(ARRAY, shape).astype(dtype)
    head, tensor = whole_of(array)
    for pieces in ([head + tensor], [head, tensor], [bytes([byte]) for byte in head + tensor]):
        whole = Whole(len(head))
        for piece in pieces:
            assert list(whole.feed(piece)) == []
        result = whole.close()
        assert (result.op, list(result.outputs)) == ("Op", ["diff_weights"])
        assert result.array.dtype == array.dtype
        np.testing.assert_array_equal(result.array, array)
        assert result.array.flags.writeable


def test_several_outputs() -> None:
    """The elements of all outputs follow the head one after another, however they are cut; some may be empty."""
    arrays = {"a": ARRAY, "b": ARRAY[:0], "c": ARRAY[0].astype(np.float16), "d": ARRAY[:0]}
    parts = {name: whole_of(array, name=name) for name, array in arrays.items()}
    outputs = [json.loads(head)["outputs"][0] for head, _ in parts.values()]
    head, data = json.dumps({"model_name": "Op", "outputs": outputs}).encode(), b"".join(b for _, b in parts.values())
    for size in (1, 7, len(head), len(head + data)):
        whole, reply = Whole(len(head)), head + data
        for at in range(0, len(reply), size):
            assert list(whole.feed(reply[at : at + size])) == []
        for name, found in whole.close().outputs.items():
            assert found.dtype == arrays[name].dtype
            np.testing.assert_array_equal(found, arrays[name])


def test_a_truncated_reply_is_broken() -> None:
    """A reply that ends before its last byte is broken."""
    head, tensor = whole_of(ARRAY)
    for end in (0, 1, len(head) - 1, len(head), len(head + tensor) - 1):
        whole = Whole(len(head))
        list(whole.feed((head + tensor)[:end]))
        with pytest.raises(BrokenStream):
            whole.close()


CHANGES: list[dict[str, Any]] = [
    {"datatype": "FP64"}, {"datatype": ["FP32"]}, {"shape": None}, {"shape": [2, -3, -4]}, {"shape": [2, 3, 4.0]},
    {"shape": [True, 24]}, {"shape": [24] + [1] * 64}, {"shape": [2, 3, 5]}, {"parameters": {}},
    {"parameters": {"binary_data_size": "96"}}, {"shape": [2**60], "parameters": {"binary_data_size": 2**62}},
]  # fmt: skip
OUTPUTS: list[Any] = [[1], [{}, {}], 2 * json.loads(whole_of(ARRAY)[0])["outputs"]]


@pytest.mark.parametrize(
    "head",
    [
        *(b"{", b"[]", b"1", b"[" * 100_000, b"\xff", b'{"outputs": []}'),
        *(json.dumps({"model_name": "Op", "outputs": outputs}).encode() for outputs in OUTPUTS),
        *(whole_of(ARRAY, **changes)[0] for changes in CHANGES),
    ],
)
def test_malformed_heads_are_rejected(head: bytes) -> None:
    """A head that does not describe outputs with their bytes after it, each once, is rejected."""
    with pytest.raises(ProtocolError):
        read(head, ARRAY.tobytes())


def test_extra_bytes_are_rejected() -> None:
    """Bytes after the output, or an excessively long head, are rejected."""
    head, tensor = whole_of(ARRAY)
    with pytest.raises(ProtocolError, match="data after"):
        read(head, tensor, b"x")
    with pytest.raises(ProtocolError, match="at most"):
        Whole(2 << 20)
