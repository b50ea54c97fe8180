"""Content codings: data is decoded unchanged, in pieces, and never more than allowed."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.intake.body import decompressed
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


def decoded(coding: str, chunks: Iterable[bytes], pieces: list[bytes]) -> bytes:
    """Decompress a body of at most 1 MiB; the pieces are added to the list."""

    async def sent() -> AsyncIterator[bytes]:
        for chunk in chunks:
            yield chunk

    async def read() -> None:
        async for piece in decompressed(sent(), coding, 1 << 20):
            pieces.append(piece)  # noqa: PERF401 -- also those before an error

    asyncio.run(read())
    return b"".join(pieces)


@pytest.mark.parametrize(("coding", "encode"), CODERS)
@given(data=st.binary(max_size=2000), step=st.integers(1, 300))
def test_any_body_in_any_chunks(coding: str, encode: Callable[[bytes], bytes], data: bytes, step: int) -> None:
    """A compressed body decodes to the original, however it is split."""
    coded = encode(data)
    assert decoded(coding, [coded[start : start + step] for start in range(0, len(coded), step)], []) == data


@pytest.mark.parametrize(("coding", "encode"), CODERS)
def test_a_compression_bomb_costs_one_piece_more_than_the_limit(coding: str, encode: Callable[[bytes], bytes]) -> None:
    """Decoding stops at the limit, and the output comes in pieces of moderate size."""
    pieces: list[bytes] = []
    with pytest.raises(TooLarge):
        decoded(coding, [encode(bytes(64 << 20))], pieces)
    assert max(map(len, pieces)) <= 128 << 10
    assert sum(map(len, pieces)) <= 1 << 20


@pytest.mark.parametrize(("coding", "encode"), CODERS)
@pytest.mark.parametrize("size", [131_072, 131_073, 131_200, 262_300])
def test_a_body_ends_anywhere_in_a_piece(coding: str, encode: Callable[[bytes], bytes], size: int) -> None:
    """What zlib still holds when the compressed bytes are used up is decoded as well."""
    assert decoded(coding, [encode(bytes(size))], []) == bytes(size)


@pytest.mark.parametrize(("coding", "encode"), CODERS)
def test_a_body_may_have_as_many_bytes_as_the_limit(coding: str, encode: Callable[[bytes], bytes]) -> None:
    """A body of exactly the limit is decoded."""
    assert decoded(coding, [encode(bytes(1 << 20))], []) == bytes(1 << 20)


@pytest.mark.parametrize("text", [b"", b"x"])
def test_many_members(text: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a body in thousands of members, few are decompressed at a time, without copying the rest for each."""
    made: list[Any] = []
    make = zlib.decompressobj

    def kept(wbits: int) -> Any:
        made.append(make(wbits))
        return made[-1]

    monkeypatch.setattr(zlib, "decompressobj", kept)
    member = gzip.compress(text)
    assert decoded("gzip", [member * 6400], []) == text * 6400
    assert max(len(each.unused_data) for each in made) < 4096
    with pytest.raises(ParseError, match="more than 32768 members"):
        decoded("gzip", [member * 32769], [])
