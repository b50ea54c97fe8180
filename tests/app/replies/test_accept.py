"""The choice of a media type."""

from __future__ import annotations

import pytest

from app.replies.accept import choose
from convgrad import NotAcceptable

OFFERS = ("application/json", "application/x-npy", "text/event-stream")


@pytest.mark.parametrize(
    ("accept", "chosen"),
    [
        ("", OFFERS[0]),
        ("*/*", OFFERS[0]),
        ("*", OFFERS[0]),
        ("text/*", OFFERS[2]),
        ("APPLICATION/X-NPY", OFFERS[1]),
        ("application/json;q=0.1, application/x-npy;q=0.2", OFFERS[1]),
        ("application/*, text/event-stream", OFFERS[0]),
        ("application/*;q=0.3, text/event-stream;q=0.4", OFFERS[2]),
        ("*/*, application/json;q=0", OFFERS[1]),
        ("text/event-stream; charset=utf-8 ; q=1.000", OFFERS[2]),
        ("application/x-npy;q=2, text/event-stream;q=0.1", OFFERS[2]),
        ("nonsense,,;q=1,text/event-stream", OFFERS[2]),
        ("*/*;q=0.1, application/x-npy", OFFERS[1]),
    ],
)
def test_the_best_offer_is_chosen(accept: str, chosen: str) -> None:
    """Quality decides, then the order of the offers; an offer's quality is that of its most specific range."""
    assert choose(accept, OFFERS) == chosen


@pytest.mark.parametrize("accept", ["image/png", "application/json;q=0", "*/*;q=0", "text", ";;;", "a/b," * 1000])
def test_nothing_acceptable(accept: str) -> None:
    """If no offer is acceptable, the error lists the offers."""
    with pytest.raises(NotAcceptable) as caught:
        choose(accept, OFFERS)
    assert caught.value.data["supported"] == list(OFFERS)
