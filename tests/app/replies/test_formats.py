"""The media type of a reply, and whether it is compressed: only for clients that ask for it."""

from __future__ import annotations

import pytest

from app.replies.formats import choose, choose_coding
from convgrad import NotAcceptable

OFFERS = ("application/json", "application/x-npy", "text/event-stream")


FIRST = ["", "*/*", "*", "application/*, text/event-stream"]
SECOND = ["APPLICATION/X-NPY", "application/json;q=0.1, application/x-npy;q=0.2", "*/*, application/json;q=0"]
SECOND += ["*/*;q=0.1, application/x-npy"]
THIRD = ["text/*", "application/*;q=0.3, text/event-stream;q=0.4", "text/event-stream; charset=utf-8 ; q=1.000"]
THIRD += ["application/x-npy;q=2, text/event-stream;q=0.1", "nonsense,,;q=1,text/event-stream"]


@pytest.mark.parametrize(("number", "accepts"), [(0, FIRST), (1, SECOND), (2, THIRD)])
def test_the_best_offer_is_chosen(number: int, accepts: list[str]) -> None:
    """Quality decides, then the order of the offers; an offer's quality is that of its most specific range."""
    assert [choose(accept, OFFERS) for accept in accepts] == [OFFERS[number]] * len(accepts)


@pytest.mark.parametrize("accept", ["image/png", "application/json;q=0", "*/*;q=0", "text", ";;;", "a/b," * 1000])
def test_nothing_acceptable(accept: str) -> None:
    """If no offer is acceptable, the error lists the offers."""
    with pytest.raises(NotAcceptable) as caught:
        choose(accept, OFFERS)
    assert caught.value.data["supported"] == list(OFFERS)


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
