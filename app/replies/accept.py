"""Choose a media type by the `Accept` header of RFC 9110, with quality values."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from convgrad._errors import NotAcceptable

__all__ = ["choose"]

_RANGE = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+/[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_QUALITY = re.compile(r"(?:0(?:\.\d{0,3})?|1(?:\.0{0,3})?)")
# No client needs more, and parsing thousands of ranges takes time.
_MOST_RANGES = 64
# Clients send few different values, and short ones.
_LONGEST_CACHED = 256


def choose(accept: str | None, offers: Sequence[str]) -> str:
    """Return the offer with the highest quality, the first of equals.

    Without a header every offer is acceptable. Malformed ranges are ignored. Raises `NotAcceptable` when no offer is
    left.
    """
    header = accept or ""
    return (_choose if len(header) <= _LONGEST_CACHED else _choose.__wrapped__)(header, tuple(offers))


@lru_cache(256)
def _choose(accept: str, offers: tuple[str, ...]) -> str:
    if not accept.strip():
        return offers[0]
    ranges = [parsed for part in accept.split(",")[:_MOST_RANGES] if (parsed := _parse(part)) is not None]
    best = max(offers, key=lambda offer: _quality(offer, ranges))  # max keeps the first of equals
    if _quality(best, ranges) <= 0:
        raise NotAcceptable(
            f"the Accept header allows none of {', '.join(offers)}",
            data={"supported": list(offers)},
        )
    return best


def _parse(part: str) -> tuple[str, float] | None:
    name, *parameters = (piece.strip() for piece in part.split(";"))
    name = "*/*" if name == "*" else name.lower()
    if not _RANGE.fullmatch(name):
        return None
    quality = 1.0
    for parameter in parameters:
        key, _, value = parameter.partition("=")
        if key.strip().lower() == "q":
            if not _QUALITY.fullmatch(value.strip()):
                return None
            quality = float(value)
    return name, quality


def _quality(offer: str, ranges: list[tuple[str, float]]) -> float:
    """Return the quality of the most specific range that matches `offer`."""
    highest = 0.0
    for pattern in (offer, offer.partition("/")[0] + "/*", "*/*"):
        matching = [quality for name, quality in ranges if name == pattern]
        if matching:
            highest = max(matching)
            break
    return highest
