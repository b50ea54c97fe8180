"""Which replies are compressed: those of clients that ask for it, not of those whose library merely could read it."""

from __future__ import annotations

import pytest

from app.replies.accept import choose_coding

PLAIN = ["", "gzip;q=0", "br", "identity", "*", "gzip, identity", "gzip;q=0.5, identity", "gzip;q=2"]
# The defaults of common libraries.
PLAIN += ["gzip, deflate", "gzip, deflate, br, zstd", "deflate, gzip, br"]
GZIP = ["gzip", "x-gzip", "GZip ; q=0.5", "gzip, identity;q=0.5", "gzip, *;q=0", "gzip, deflate, identity;q=0"]
GZIP += ["gzip;" * 1000]
DEFLATE = ["deflate", "gzip;q=0.2, deflate;q=0.8, identity;q=0.5"]


@pytest.mark.parametrize(("coding", "headers"), [(None, PLAIN), ("gzip", GZIP), ("deflate", DEFLATE)])
def test_choice(coding: str | None, headers: list[str]) -> None:
    """A coding that is named alone, or rated above an uncompressed reply, is used."""
    assert [choose_coding(header) for header in headers] == [coding] * len(headers)
