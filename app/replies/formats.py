"""The formats of replies to `/v1`, one record each, and the format and content coding that a client prefers (RFC 9110).

`/rpc` and `/v2` have some of the formats besides their own.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from starlette.types import Send

from app.caching import cached_if_short
from app.calls.work import Work
from app.replies import frames, multipart, npy, sse
from app.replies.result import send_result
from convgrad._errors import NotAcceptable
from engine.options import Options

__all__ = ["EVENTS", "FORMATS", "FRAMES", "JSON", "MULTIPART", "NPY", "Format", "accepts", "choose", "choose_coding"]


@dataclass(frozen=True, slots=True)
class Format:
    """A media type, and what runs the work and sends its reply; `data` of `one` output, of `many`, or of `none`."""

    media_type: str
    send: Callable[[Work, Send], Awaitable[None]]
    data: str = "many"

    def check(self, options: Options) -> None:
        """Raise `NotAcceptable` for a call with several outputs if the format holds one."""
        if self.data == "one" and len(options.outputs) > 1:
            raise NotAcceptable(
                f"{self.media_type} can hold one output, but the call requests {len(options.outputs)}",
                data={"supported": [each.media_type for each in FORMATS if each.data == "many"]},
            )


JSON = Format("application/json", send_result)
NPY = Format(npy.MEDIA_TYPE, npy.send_npy, "one")
EVENTS = Format(sse.MEDIA_TYPE, sse.send_events, "none")
FRAMES = Format(frames.MEDIA_TYPE, frames.send_frames)
MULTIPART = Format(multipart.MEDIA_TYPE, multipart.send_multipart)

FORMATS = (JSON, NPY, EVENTS, FRAMES, MULTIPART)
"""Those of an operation; the first one is the default."""


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
