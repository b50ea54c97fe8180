"""Base64 in pieces."""

from __future__ import annotations

import base64

import pytest

from app.replies.result import base64_pieces


@pytest.mark.parametrize("header", [0, 1, 2, 3, 128])
@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 100, 786_431, 786_432, 786_433, 2_000_000])
def test_the_pieces_are_one_base64_text(header: int, size: int) -> None:
    """Joined, the pieces are the base64 of header and data together, whatever their lengths."""
    head, data = b"\x07" * header, bytes(range(256)) * (size // 256) + bytes(size % 256)
    assert b"".join(base64_pieces([head, memoryview(data)])) == base64.b64encode(head + data)
