"""Content codings: data is decoded unchanged, in pieces, and never more than allowed."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.intake.coding import decompressor_of
from convgrad._errors import ParseError, TooLarge


def bare(data: bytes) -> bytes:
    """Return data compressed as raw deflate, without zlib's header and checksum."""
    deflate = zlib.compressobj(wbits=-15)
    return deflate.compress(data) + deflate.flush()


CODERS: list[tuple[str, Callable[[bytes], bytes]]] = [
    ("gzip", gzip.compress),
    ("deflate", zlib.compress),
    ("deflate", bare),
]


@pytest.mark.parametrize(("coding", "encode"), CODERS)
@given(data=st.binary(max_size=2000), step=st.integers(1, 300))
def test_any_body_in_any_chunks(coding: str, encode: Callable[[bytes], bytes], data: bytes, step: int) -> None:
    """A compressed body decodes to the original, however it is split."""
    decoder = decompressor_of(coding, 1 << 20)
    assert decoder is not None
    coded = encode(data)
    pieces = [piece for start in range(0, len(coded), step) for piece in decoder.pieces(coded[start : start + step])]
    decoder.close()
    assert b"".join(pieces) == data


@pytest.mark.parametrize(("coding", "encode"), CODERS)
def test_a_compression_bomb_costs_one_piece_more_than_the_limit(coding: str, encode: Callable[[bytes], bytes]) -> None:
    """Decoding stops at the limit, and the output comes in pieces of moderate size."""
    decoder = decompressor_of(coding, 1 << 20)
    assert decoder is not None
    pieces: list[int] = []
    with pytest.raises(TooLarge):
        pieces.extend(map(len, decoder.pieces(encode(bytes(64 << 20)))))
    assert max(pieces) <= 128 << 10
    assert sum(pieces) <= 1 << 20


@pytest.mark.parametrize("text", [b"", b"x"])
def test_many_members(text: bytes) -> None:
    """Of a body in thousands of members, few are decompressed at a time, without copying the rest for each."""
    member = gzip.compress(text)
    decoder = decompressor_of("gzip", 1 << 20)
    assert decoder is not None
    rests = [len(decoder._inflate.unused_data) for _ in decoder.pieces(member * 6400)]
    assert len(rests) == (6400 if text else 100)
    assert max(rests) < 4096
    with pytest.raises(ParseError, match="more than 32768 members"):
        list(decoder.pieces(member * 32768))
