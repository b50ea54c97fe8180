"""Arrays and files as parts: whatever their memory layout, the bytes sent are those of `numpy.save`."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from convgrad import InvalidParams, NpyFile, ParseError, TooLarge, Unsupported
from convgrad._events import Array
from convgrad._multipart import multipart
from convgrad._tensors import PIECE, Part, part

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def sent(part: Part) -> bytes:
    """Return all bytes of a part, checking the announced number of them."""
    data = b"".join(part.pieces())
    assert len(data) == part.nbytes
    assert b"".join(part.pieces()) == data
    return data


def saved(array: Array) -> bytes:
    """Return what NumPy writes for the array in C order and little-endian."""
    file = io.BytesIO()
    np.save(file, array.astype(array.dtype.newbyteorder("<"), order="C"))
    return file.getvalue()


def base(dtype: Any, size: int = 96) -> Array:
    """Return numbers that every dtype can represent exactly."""
    return (np.arange(size) % 128).astype(dtype)


VIEWS: dict[str, Callable[[Array], Array]] = {
    "contiguous": lambda a: a.reshape(4, 4, 6),
    "fortran": lambda a: np.asfortranarray(a.reshape(4, 4, 6)),
    "transposed": lambda a: a.reshape(4, 4, 6).transpose(2, 0, 1),
    "strided": lambda a: a.reshape(4, 4, 6)[::2, :, ::3],
    "reversed": lambda a: a.reshape(4, 4, 6)[::-1, :, ::-1],
    "broadcast": lambda a: np.broadcast_to(a[:6], (3, 4, 6)),
    "big-endian": lambda a: a.astype(a.dtype.newbyteorder(">")).reshape(4, 24),
    "scalar": lambda a: a[3].reshape(()),
    "empty": lambda a: a[:0].reshape(0, 3),
    "read-only": lambda a: np.frombuffer(a.tobytes(), a.dtype),
}


@pytest.mark.parametrize("view", list(VIEWS))
@pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT16])
def test_any_memory_is_sent_as_numpy_saves_it(view: str, dtype: Any) -> None:
    """Strides, order, byte order and flags of an array make no difference to the bytes sent."""
    array = VIEWS[view](base(dtype))
    assert sent(part(array)) == saved(array)
    if dtype == BFLOAT16:  # as `numpy.load` returns it
        void = part(array.view("V2")) if array.dtype.isnative else part(array)
        assert (void.dtype.name, sent(void)) == ("bf16", saved(array))


@pytest.mark.parametrize("view", ["fortran", "transposed", "big-endian"])
def test_large_arrays_are_converted_in_pieces(view: str) -> None:
    """An array that has to be converted is never copied as a whole."""
    large = np.arange(24 * PIECE // 16, dtype=np.float32).reshape(2, -1, 24)
    array = {"fortran": np.asfortranarray(large), "transposed": large.T, "big-endian": large.astype(">f4")}[view]
    made = part(array)
    assert max(len(piece) for piece in made.pieces()) <= PIECE
    assert sent(made) == saved(array)


def test_contiguous_arrays_are_not_copied() -> None:
    """A contiguous array is sent from its own memory; small ones are one write to the socket."""
    array = np.zeros(PIECE, np.float32)
    _, *pieces = part(array).pieces()
    assert all(np.shares_memory(np.frombuffer(piece, np.uint8), array) for piece in pieces)
    assert len(pieces) == 4
    small = part(base(np.float32))
    assert len(list(multipart(b"{}", {"src": small, "diff_dst": small}).pieces())) == 1


def test_masked_arrays() -> None:
    """One without masked elements is an array; a masked element has no value to send."""
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    made = part(np.ma.array(array))
    assert sent(made) == saved(array)
    assert all(isinstance(piece, bytes | memoryview) for piece in made.pieces())
    with pytest.raises(Unsupported, match="masked elements: fill them"):
        part(np.ma.array(array, mask=array == 5))


@pytest.mark.parametrize("dtype", [np.longdouble, np.complex64, np.uint16, np.bool_, object, "U3", "V4"])
def test_other_dtypes_are_refused(dtype: Any) -> None:
    """An array of an unsupported dtype is rejected before sending, and never cast silently."""
    with pytest.raises(Unsupported):
        part(np.zeros(3, dtype))


def test_sequences_become_arrays() -> None:
    """Objects with NumPy's array protocol are sent as arrays."""

    class Wrapped:
        def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
            return base(np.float32)

    assert sent(part(Wrapped())) == saved(base(np.float32))


@pytest.mark.parametrize("order", ["C", "F"])
def test_files_are_sent_as_they_are(tmp_path: Path, order: Any) -> None:
    """A `.npy` file is sent byte for byte, whether given as a path, a string or with a dtype."""
    path = tmp_path / "a.npy"
    array = np.asarray(np.arange(PIECE, dtype=">f4").reshape(4, -1), order=order)
    np.save(path, array)
    for tensor in (path, str(path), NpyFile(path), NpyFile(path, "f32")):
        made = part(tensor)
        assert sent(made) == path.read_bytes()
        assert made.describe() == {"dtype": "f32", "shape": [4, PIECE // 4]}
        assert max(map(len, made.pieces())) <= PIECE


def test_bfloat16_files(tmp_path: Path) -> None:
    """Void 16-bit values in a file are bfloat16, unsigned ones only if the caller says so."""
    void, unsigned = tmp_path / "v.npy", tmp_path / "u.npy"
    np.save(void, base(BFLOAT16))
    np.save(unsigned, base(BFLOAT16).view(np.uint16))
    assert part(void).dtype.name == "bf16"
    assert part(NpyFile(unsigned, dtype="bf16")).dtype.name == "bf16"
    with pytest.raises(InvalidParams, match='"bf16" with it'):
        part(unsigned)
    with pytest.raises(InvalidParams):
        part(NpyFile(void, dtype="f16"))


def test_truncated_files_are_rejected(tmp_path: Path) -> None:
    """A file that is truncated, too long, or not a `.npy` file is rejected before it is sent."""
    path = tmp_path / "a.npy"
    whole = saved(base(np.float32))
    for data in (b"", whole[:50], whole[:-1], whole + b"\0", b"PK\x03\x04" * 50):
        path.write_bytes(data)
        with pytest.raises(ParseError):
            part(path)
    with pytest.raises(FileNotFoundError):
        part(tmp_path / "missing.npy")


def test_a_file_that_shrinks_while_it_is_sent(tmp_path: Path) -> None:
    """If a file is truncated while it is sent, an error is raised and no short request is completed."""
    path = tmp_path / "a.npy"
    np.save(path, base(np.float32, PIECE))
    made = part(path)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ParseError, match="was truncated"):
        sent(made)


@given(st.lists(st.integers(0, 3 * PIECE // 4), max_size=4), st.binary(max_size=100))
def test_multipart_has_the_length_that_it_says(sizes: list[int], request: bytes) -> None:
    """However large the tensors, the pieces together have the announced length, and few of them are small."""
    parts = {f"t{number}": part(np.zeros(size, np.float32)) for number, size in enumerate(sizes)}
    body = multipart(request, parts)
    pieces = list(body.pieces())
    assert sum(map(len, pieces)) == body.length
    assert len(pieces) <= 2 * len(sizes) + sum(part.nbytes for part in parts.values()) // PIECE + 1


def test_a_header_may_not_exceed_the_file(tmp_path: Path) -> None:
    """A file whose header claims more than any memory is rejected on its header."""
    path = tmp_path / "a.npy"
    path.write_bytes(saved(base(np.float32)).replace(b"(96,), }" + b" " * 18, b"(999999999999999999,), }  "))
    with pytest.raises((TooLarge, ParseError)):
        part(path)
