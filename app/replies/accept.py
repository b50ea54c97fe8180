"""Quality values as in RFC 9110: the media type and the content coding that a client prefers."""

from __future__ import annotations

import re

from app.caching import cached_if_short
from convgrad._errors import NotAcceptable

__all__ = ["accepts", "choose", "choose_coding"]

_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9a-z-]+(?:/[!#$%&'*+.^_`|~0-9a-z-]+)?")
_QUALITY = re.compile(r"(?:0(?:\.\d{0,3})?|1(?:\.0{0,3})?)")
# No client needs more, and parsing thousands of items takes time.
_MOST_ITEMS = 64


@cached_if_short
def choose(accept: str, offers: tuple[str, ...]) -> str:
    """Return the offer with the highest quality, the first of equals.

    Without a header, `accept` is empty and every offer acceptable. Malformed ranges are ignored. Raises `NotAcceptable`
    when no offer is left.
    """
    if not accept.strip():
        return offers[0]
    ranges = [("*/*" if name == "*" else name, quality) for name, quality in _weighted(accept)]
    best = max(offers, key=lambda offer: _quality(offer, ranges))  # max keeps the first of equals
    if _quality(best, ranges) <= 0:
        raise NotAcceptable(
            f"the Accept header allows none of {', '.join(offers)}",
            data={"supported": list(offers)},
        )
    return best


def _quality(offer: str, ranges: list[tuple[str, float]]) -> float:
    """Return the quality of the most specific range that matches `offer`."""
    for pattern in (offer, offer.partition("/")[0] + "/*", "*/*"):
        if matching := [quality for name, quality in ranges if name == pattern]:
            return max(matching)
    return 0.0


@cached_if_short
def choose_coding(accept_encoding: str) -> str | None:
    """Return the content coding that a client requests; None to send the reply as it is.

    HTTP libraries list every coding they can decode by default (`gzip, deflate, br`), and compressing a tensor takes
    longer than sending it. So a reply is compressed only for a client that names a single coding, or that rates one
    above `identity`.
    """
    qualities = dict(_weighted(accept_encoding))
    named = {name: quality for name, quality in qualities.items() if name in ("gzip", "deflate") and quality > 0}
    if not named:
        return None
    best = max(named, key=lambda name: named[name])
    plain = qualities.get("identity", qualities.get("*"))
    if plain is None:
        return best if len([name for name, quality in qualities.items() if quality > 0]) == 1 else None
    return best if named[best] > plain else None


def accepts(accept_encoding: str, coding: str) -> bool:
    """Return whether the client can decode a content coding, which it lists with a quality above 0."""
    return dict(_weighted(accept_encoding)).get(coding, 0) > 0


def _weighted(header: str) -> list[tuple[str, float]]:
    """Return the items of a header in lower case, each with its quality value; malformed ones are left out."""
    found = []
    for item in header.split(",")[:_MOST_ITEMS]:
        name, *parameters = (piece.strip().lower() for piece in item.split(";"))
        pairs = {key.strip(): value.strip() for key, _, value in (each.partition("=") for each in parameters)}
        if _NAME.fullmatch(name) and _QUALITY.fullmatch(quality := pairs.get("q", "1")):
            found.append(("gzip" if name == "x-gzip" else name, float(quality)))
    return found
