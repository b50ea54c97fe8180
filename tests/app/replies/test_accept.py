"""The choice of a media type."""

from __future__ import annotations

import pytest

from app.replies.accept import choose
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
