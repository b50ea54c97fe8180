"""The `.npy` format without pickle: a header parser that is safe for untrusted input, and a header writer.

The format is NumPy's (numpy.org/doc/stable/reference/generated/numpy.lib.format.html), versions 1.0 to 3.0. A header is
the text of a Python dictionary with exactly three keys. Our own tokenizer knows strings, booleans, decimal integers and
flat tuples; nothing is evaluated, and nothing is allocated by the header's sizes.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NoReturn

from convgrad._dtypes import DTYPES, MAX_RANK, DType
from convgrad._errors import InvalidParams, ParseError, TooLarge, Unsupported

__all__ = ["HEADER_LIMIT", "NpyHeader", "parse_header", "write_header"]

HEADER_LIMIT = 64 * 1024

# `numpy.save` writes headers of at most this size, padding included, for the tensors of operations.
_USUAL = 256

_MAGIC = b"\x93NUMPY"
_ALIGNMENT = 64
_MAX_BYTES = 2**63 - 1
# NumPy leaves room for the first axis to grow in place; the same room gives the same bytes as `numpy.save`.
_GROWTH_DIGITS = 21

_ITEMSIZES = {"f4": 4, "f2": 2, "f8": 8, "i4": 4, "i8": 8, "u2": 2, "V2": 2}
_ALLOWED = {order + kind: size for kind, size in _ITEMSIZES.items() for order in "<>"} | {"|V2": 2}
_PLAIN = {"f4": "f32", "f2": "f16", "f8": "f64", "i4": "s32", "i8": "s64"}
_BF16 = ("V2", "u2")
_PRINTABLE_DESCR = re.compile(r"[<>|=]?[A-Za-z][0-9]{0,4}")

_TOKEN = re.compile(
    r"""[ \t\r\n]*(?:
        (?P<string>'[^'"\\]*'|"[^'"\\]*")
      | (?P<integer>0|[1-9][0-9]{0,18})L?      # Python 2 wrote long integers with an L
      | (?P<flag>True|False)
      | (?P<mark>[{}(),:])
    )""",
    re.VERBOSE,
)

_Token = tuple[str, str]


@dataclass(frozen=True, slots=True)
class NpyHeader:
    """The header of a `.npy` file; the data begin at byte `offset` of the file."""

    descr: str
    fortran_order: bool
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Number of bytes of data that must follow the header."""
        return math.prod(self.shape) * _ALLOWED[self.descr]

    @property
    def big_endian(self) -> bool:
        """Whether the bytes of each element have to be swapped."""
        return self.descr.startswith(">")

    def dtype(self, declared: str | None = None) -> DType:
        """Return the element type, given the one that the request `declared` for the file, if any.

        NumPy has no bfloat16: `V2` and `u2` mean bf16 if that was declared. Raises `InvalidParams` when file and
        declaration do not match.
        """
        kind = self.descr[1:]
        name = _PLAIN.get(kind)
        if declared == "bf16" and kind in _BF16:
            return DTYPES["bf16"]
        if name is None:
            _mismatch(f"a .npy file of '{self.descr}' needs dtype \"bf16\" with it")
        if declared is not None and declared != name:
            _mismatch(f"dtype must be that of the .npy file, {name}")
        return DTYPES[name]


def parse_header(buffer: bytes | bytearray | memoryview) -> NpyHeader | None:
    """Parse the header at the start of `buffer`; None if it needs more bytes.

    Raises, as early as possible, `ParseError` when it is not a `.npy` file, `TooLarge` when the header exceeds
    `HEADER_LIMIT` bytes, and `Unsupported` for an element type that no operation has.
    """
    view = memoryview(buffer).cast("B")
    start = bytes(view[:8])
    if not start.startswith(_MAGIC[: len(start)]):
        raise ParseError("a .npy file must begin with the bytes 93 4E 55 4D 50 59")
    if len(start) < 8:
        return None
    size = _length_field(start[6], start[7])
    if len(view) < 8 + size:
        return None
    begin = 8 + size
    length = int.from_bytes(view[8:begin], "little")
    if length > HEADER_LIMIT:
        raise TooLarge(f"a .npy header must have at most {HEADER_LIMIT} bytes, but has {length}")
    if len(view) < begin + length:
        return None
    text = bytes(view[begin : begin + length])
    return (_usual_header if length <= _USUAL else _header)(text, begin + length)


def write_header(dtype: DType, shape: Sequence[int]) -> bytes:
    """Return what `numpy.save` writes before the data of a C-ordered little-endian array."""
    dims = tuple(int(dim) for dim in shape)
    room = " " * (_GROWTH_DIGITS - len(str(dims[0]))) if dims else ""
    text = f"{{'descr': '{dtype.npy}', 'fortran_order': False, 'shape': {dims!r}, }}{room}".encode("ascii")
    padding = -(len(_MAGIC) + 4 + len(text) + 1) % _ALIGNMENT
    return _MAGIC + struct.pack("<BBH", 1, 0, len(text) + padding + 1) + text + b" " * padding + b"\n"


def _length_field(major: int, minor: int) -> int:
    if minor != 0 or major not in (1, 2, 3):
        raise ParseError(f"the .npy format version must be 1.0, 2.0 or 3.0, but is {major}.{minor}")
    return 2 if major == 1 else 4


# Tensors of the same shape have the same header.
@lru_cache(256)
def _usual_header(text: bytes, offset: int) -> NpyHeader:
    return _header(text, offset)


def _header(text: bytes, offset: int) -> NpyHeader:
    fields = _fields(_tokens(text))
    descr, order, shape = (fields.get(key) for key in ("descr", "fortran_order", "shape"))
    if len(fields) != 3 or not isinstance(descr, str) or not isinstance(order, bool) or not isinstance(shape, tuple):
        raise ParseError("a .npy header must have a string 'descr', a bool 'fortran_order' and a tuple 'shape' only")
    _check_descr(descr)
    _check_shape(shape, _ALLOWED[descr])
    return NpyHeader(descr, order, shape, offset)


def _check_descr(descr: str) -> None:
    if descr not in _ALLOWED:
        shown = f"'{descr}'" if _PRINTABLE_DESCR.fullmatch(descr) else "something else"
        known = sorted(_ALLOWED)
        raise Unsupported(f"the descr of a .npy file must be one of {', '.join(known)}, but is {shown}")


def _check_shape(shape: tuple[int, ...], itemsize: int) -> None:
    if len(shape) > MAX_RANK:
        raise ParseError(f"a .npy shape must have at most {MAX_RANK} axes, but has {len(shape)}")
    # Empty axes are left out: with them the product would hide sizes that overflow elsewhere.
    if math.prod(dim for dim in shape if dim) * itemsize > _MAX_BYTES:
        raise ParseError("the axes of a .npy shape must multiply to at most 2**63 - 1 bytes")


def _tokens(text: bytes) -> Iterator[_Token]:
    try:
        rest = text.decode("ascii").rstrip(" \t\r\n")
    except UnicodeDecodeError:
        _malformed()
    at = 0
    while at < len(rest):
        found = _TOKEN.match(rest, at)
        if found is None or found.lastgroup is None:
            _malformed()
        yield found.lastgroup, found[found.lastgroup]
        at = found.end()


def _fields(tokens: Iterator[_Token]) -> dict[str, str | bool | tuple[int, ...]]:
    """Parse `{'key': value, ..}` with an optional last comma, to the end of the tokens."""
    fields: dict[str, str | bool | tuple[int, ...]] = {}
    _expect(tokens, "{")
    token = _next(tokens)
    while token != ("mark", "}"):
        key = token[1][1:-1]
        if token[0] != "string" or key in fields:
            _malformed()
        _expect(tokens, ":")
        fields[key] = _value(tokens)
        token = _after_comma(tokens, "}")
    if next(tokens, None) is not None:
        _malformed()
    return fields


def _value(tokens: Iterator[_Token]) -> str | bool | tuple[int, ...]:
    kind, text = _next(tokens)
    if kind == "string":
        return text[1:-1]
    if kind == "flag":
        return text == "True"
    if (kind, text) != ("mark", "("):
        _malformed()
    return _dims(tokens)


def _dims(tokens: Iterator[_Token]) -> tuple[int, ...]:
    dims: list[int] = []
    token, comma = _next(tokens), True
    while token != ("mark", ")"):
        if token[0] != "integer" or not comma:
            _malformed()
        dims.append(int(token[1]))
        token = _next(tokens)
        comma = token == ("mark", ",")
        token = _next(tokens) if comma else token
    # `(3)` is a number in parentheses, not a tuple.
    if len(dims) == 1 and not comma:
        _malformed()
    return tuple(dims)


def _after_comma(tokens: Iterator[_Token], end: str) -> _Token:
    """Return the token after a comma, or the closing mark, which needs none before it."""
    token = _next(tokens)
    if token == ("mark", ","):
        return _next(tokens)
    if token != ("mark", end):
        _malformed()
    return token


def _expect(tokens: Iterator[_Token], mark: str) -> None:
    if _next(tokens) != ("mark", mark):
        _malformed()


def _next(tokens: Iterator[_Token]) -> _Token:
    token = next(tokens, None)
    if token is None:
        _malformed()
    return token


def _malformed() -> NoReturn:
    raise ParseError("the .npy header must be a dictionary of 'descr', 'fortran_order' and 'shape' with plain values")


def _mismatch(message: str) -> NoReturn:
    raise InvalidParams(message, errors=[{"loc": ["dtype"], "msg": message, "type": "dtype_mismatch"}])
