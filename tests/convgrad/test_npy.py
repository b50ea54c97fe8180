"""The `.npy` header parser and writer against NumPy's own, and against malicious input."""

from __future__ import annotations

import io
import itertools
import struct

import ml_dtypes
import numpy as np
import pytest
from numpy.lib import format as npy_format

from convgrad._dtypes import DTYPES
from convgrad._errors import ConvgradError, InvalidParams, ParseError, TooLarge, Unsupported
from convgrad._npy import HEADER_LIMIT, NpyHeader, parse_header, write_header

SHAPES: list[tuple[int, ...]] = [(), (0,), (1,), (7,), (2, 3), (2, 0, 5), (64, 32, 3, 3), (1, 2, 3, 4, 5)]
DESCRS = ["<f4", ">f4", "<f2", ">f2", "<i4", ">i4", "<i8", ">i8", "<u2", ">u2"]


def header_bytes(text: str | bytes, version: tuple[int, int] = (1, 0)) -> bytes:
    """Return the start of a `.npy` file with any header text in it, without NumPy's help."""
    raw = text if isinstance(text, bytes) else text.encode("utf-8")
    length = struct.pack("<H" if version[0] == 1 else "<I", len(raw))
    return b"\x93NUMPY" + bytes(version) + length + raw


def fields(descr: str = "'<f4'", order: str = "False", shape: str = "(2, 3)") -> str:
    """Return the text of a header with some of its values replaced."""
    return f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}\n"


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
@pytest.mark.parametrize("descr", DESCRS)
@pytest.mark.parametrize("order", ["C", "F"])
def test_reads_what_numpy_writes(version: tuple[int, int], descr: str, order: str) -> None:
    """Every version, dtype, byte order and memory order that NumPy writes is read as NumPy reads it."""
    array = np.arange(24).astype(descr).reshape(2, 3, 4)
    file = io.BytesIO()
    npy_format.write_array(file, np.asarray(array, order="F" if order == "F" else "C"), version=version)
    header = parse_header(file.getvalue())
    assert header is not None
    assert (header.descr, header.fortran_order, header.shape) == (descr, order == "F", (2, 3, 4))
    assert header.offset + header.nbytes == len(file.getvalue())
    assert header.big_endian == (descr[0] == ">")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", list(DTYPES))
def test_writes_what_numpy_writes(shape: tuple[int, ...], name: str) -> None:
    """The header written for a dtype and shape is the same, byte for byte, as that of `numpy.save`."""
    file = io.BytesIO()
    np.save(file, np.zeros(shape, DTYPES[name].numpy))
    written = write_header(DTYPES[name], shape)
    assert file.getvalue().startswith(written)
    header = parse_header(written)
    assert header == NpyHeader(DTYPES[name].npy, False, shape, len(written))
    assert header is not None
    assert header.nbytes == len(file.getvalue()) - len(written)


def test_dtypes_and_declarations() -> None:
    """A numeric type needs no declaration, which must match; two bytes are bf16 only if the request says so."""
    native = np.zeros((2, 3), ml_dtypes.bfloat16)
    for array, swapped in ((native, False), (native.astype(native.dtype.newbyteorder(">")), True)):
        file = io.BytesIO()
        np.save(file, array)
        header = parse_header(file.getvalue())
        assert header is not None
        assert header.dtype("bf16") is DTYPES["bf16"]
        assert header.big_endian == swapped
    for descr, name in (("<f4", "f32"), (">f2", "f16"), ("<i4", "s32"), ("<i8", "s64")):
        header = NpyHeader(descr, False, (1,), 128)
        assert header.dtype().name == header.dtype(name).name == name
        with pytest.raises(InvalidParams, match=f"dtype must be that of the .npy file, {name}"):
            header.dtype("bf16")
    for descr, declared in itertools.product(("<V2", "|V2", "<u2"), (None, "f16")):
        with pytest.raises(InvalidParams, match='needs dtype "bf16" with it') as caught:
            NpyHeader(descr, False, (1,), 128).dtype(declared)
        assert caught.value.errors[0]["loc"] == ["dtype"]


def test_asks_for_more_bytes_until_the_header_is_whole() -> None:
    """Every proper prefix of a header returns None; a complete header is returned with or without data after it."""
    for version in ((1, 0), (2, 0)):
        whole = header_bytes(fields(), version)
        assert [parse_header(whole[:end]) for end in range(len(whole))] == [None] * len(whole)
        assert parse_header(whole) == parse_header(bytearray(whole + b"\0" * 24)) != None  # noqa: E711


@pytest.mark.parametrize(
    "text",
    [
        "{'shape': (2, 3), 'fortran_order': True, 'descr': '<f4'}",
        '{"descr":"<f4","fortran_order":True,"shape":(2,3)}',
        "\n{ 'descr' : '<f4' , 'fortran_order' : True , 'shape' : ( 2L , 3L , ) , }   \n\n",
    ],
)
def test_reads_other_writers(text: str) -> None:
    """Order of keys, quotes, spaces and Python 2's long integers make no difference."""
    header = parse_header(header_bytes(text))
    assert header is not None
    assert (header.descr, header.fortran_order, header.shape) == ("<f4", True, (2, 3))


SHAPE_TEXTS = (
    "2", "(2)", "(2 3)", "(2,, 3)", "(,)", "(-1, 3)", "(2.0, 3)", "(2, 0x10)", "(010,)", "(1_0,)",
    "(99999999999999999999,)", "((2, 3), 4)", "(" * 20000 + ")" * 20000, "[2, 3]", "(True, 3)", "'(2, 3)'",
    str((1,) * 65), "(\u0662,)",
)  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        "", "{}", "[]", "{,}", "{'descr': '<f4'}", fields() + "1", fields()[:-3], fields() + "\u00a0",
        *(fields(shape=shape) for shape in SHAPE_TEXTS),
        *(fields(order=order) for order in ("0", "None", "'False'")),
        *(fields(descr=descr) for descr in (
            "[('a', '<f4')]", "'\\x3cf4'", "b'<f4'", "'<f4' '<f4'", "__import__('os').system('true')",
        )),
        "{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': (2,)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (2,), 'more': 'x'}",
        "{'descr': '<f4',, 'fortran_order': False, 'shape': (2,)}",
    ],
)  # fmt: skip
def test_refuses_other_text(text: str) -> None:
    """Anything but the three keys with plain values is a parse error, whatever it would evaluate to."""
    for version in ((2, 0), (3, 0)):
        with pytest.raises(ParseError):
            parse_header(header_bytes(text, version))


@pytest.mark.parametrize("descr", ["|O", "<f16", "<c8", "|S4", "<U3", "|b1", "<M8[ns]", "=f4", "<V4", "<V2x" * 99])
def test_refuses_other_dtypes(descr: str) -> None:
    """Pickled objects and all types that no operation has are rejected, and the allowed ones are named."""
    with pytest.raises(Unsupported, match=r"must be one of .*<f4") as caught:
        parse_header(header_bytes(fields(descr=repr(descr))))
    assert len(caught.value.message) < 200


@pytest.mark.parametrize(
    ("start", "error", "words"),
    [
        (b"\x93NUMPY\x02\x00" + struct.pack("<I", 2**32 - 1), TooLarge, str(HEADER_LIMIT)),
        *((start, ParseError, None) for start in (b"X", b"\x93NUMPX", b"PK\x03\x04")),
        *((b"\x93NUMPY" + version, ParseError, None) for version in (b"\x00\x00", b"\x01\x01", b"\x04\x00")),
        *((header_bytes(fields(shape=shape)), ParseError, r"2\*\*63") for shape in (
            "(4611686018427387904,)", "(4294967296, 4294967296)", "(0, 9999999999999, 9999999999)",
        )),
    ],
)  # fmt: skip
def test_refuses_other_files_at_once(start: bytes, error: type[ConvgradError], words: str | None) -> None:
    """Wrong magic bytes, unknown versions, huge headers and shapes beyond 63 bits are rejected before what follows."""
    with pytest.raises(error, match=words):
        parse_header(start)
