"""Which replies are compressed: those of clients that ask for it, not of those whose library merely could read it."""

from __future__ import annotations

import pytest

from app.replies.accept import choose_coding


@pytest.mark.parametrize(
    ("header", "coding"),
    [
        ("", None),
        ("gzip", "gzip"),
        ("deflate", "deflate"),
        ("x-gzip", "gzip"),
        ("GZip ; q=0.5", "gzip"),
        ("gzip;q=0", None),
        ("br", None),
        ("identity", None),
        ("*", None),
        # The defaults of common libraries.
        ("gzip, deflate", None),
        ("gzip, deflate, br, zstd", None),
        ("deflate, gzip, br", None),
        # Explicit weights.
        ("gzip, identity;q=0.5", "gzip"),
        ("gzip;q=0.5, identity", None),
        ("gzip;q=0.2, deflate;q=0.8, identity;q=0.5", "deflate"),
        ("gzip, *;q=0", "gzip"),
        ("gzip, deflate, identity;q=0", "gzip"),
        ("gzip, identity", None),
        ("gzip;q=2", None),
        ("gzip;" * 1000, "gzip"),
    ],
)
def test_choice(header: str, coding: str | None) -> None:
    """A coding that is named alone, or rated above an uncompressed reply, is used."""
    assert choose_coding(header) == coding
