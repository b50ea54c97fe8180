"""Protection against requests that web pages send from their visitors' browsers: by origin, and by host name.

A service without keys trusts everyone who can connect, and any page open in a browser on this machine can send requests
to a loopback address. Two headers that pages can't forge identify such requests: `Origin` and `Sec-Fetch-Site`. A page
whose own host name points at this address (DNS rebinding) passes both, but has that name in `Host`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from app.caching import cached_if_short
from app.http.exchange import Exchange
from app.intake.body import media_type
from app.settings import Settings, is_loopback
from app.telemetry.context import HEALTH_PAGES
from convgrad._errors import Forbidden, UnsupportedMediaType

__all__ = ["CrossOriginProtection", "is_allowed_host"]

_ANY = "*"
# A name has at most 253 characters, and a port six more with its colon.
_LONGEST_HOST = 260
_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^:\[\]\s]+))(?::\d*)?", re.ASCII)
_READS = ("GET", "HEAD")
_OWN = ("same-origin", "none")
# What a page can send without a preflight (a form's `enctype`, fetch with `no-cors`). So can multipart, which the APIs
# accept, but only from this service's own pages and allowed origins.
_FORM_TYPES = ("text/plain", "application/x-www-form-urlencoded")
_TAKEN = ("application/json", "application/octet-stream", "multipart/form-data")


class CrossOriginProtection:
    """Reject requests for hosts, and from pages of origins, that the settings do not allow."""

    def __init__(self, settings: Settings) -> None:
        self._hosts = settings.hosts
        self._origins = frozenset(settings.cors)

    def check(self, exchange: Exchange) -> None:
        """Raise `Forbidden`, or `UnsupportedMediaType` for a content type that only forms have."""
        headers, method = exchange.headers, exchange.scope["method"]
        # Orchestrators and load balancers may use any name; the answers are the same for everyone.
        if _ANY not in self._hosts and exchange.scope["path"] not in HEALTH_PAGES:
            host = headers.get("host")
            if host is not None and not is_allowed_host(host, self._hosts):  # no browser leaves it out
                raise Forbidden(
                    "the name in the Host header is not allowed: CONVGRAD_ALLOWED_HOSTS lists those of this service",
                    data={"reason": "host"},
                )
        if "origin" not in headers and "sec-fetch-site" not in headers:
            return
        may_call = _ANY in self._origins or headers.get("origin") in self._origins
        if not (_is_own(headers) or may_call or _is_visit(method, headers)):
            raise Forbidden(
                "pages of this origin may not call the service: CONVGRAD_CORS lists the origins that may",
                data={"reason": "origin"},
            )
        if method not in _READS and media_type(headers) in _FORM_TYPES:
            raise UnsupportedMediaType(
                f"a web page must send {', '.join(_TAKEN)}, not one that HTML forms send",
                data={"supported": list(_TAKEN)},
            )


def _is_own(headers: Mapping[str, str]) -> bool:
    """Whether the request comes from one of this service's pages or from the user, such as by a bookmark."""
    site = headers.get("sec-fetch-site")
    if site is not None:
        return site in _OWN
    # Browsers send Sec-Fetch-Site only over HTTPS and to loopback. Schemes may differ behind a TLS proxy.
    return headers["origin"].partition("://")[2].lower() == headers.get("host", "?").lower()


def _is_visit(method: str, headers: Mapping[str, str]) -> bool:
    """Whether the user follows a link to one of our pages; the page with the link can't read the answer."""
    where = headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest")
    return method in _READS and where == ("navigate", "document")


@cached_if_short
def is_allowed_host(host: str, allowed: frozenset[str]) -> bool:
    """Whether a Host header has one of the `allowed` names or addresses; `localhost` covers all loopback names."""
    match = _HOST.fullmatch(host.lower()) if len(host) <= _LONGEST_HOST else None
    if match is None:
        return False
    name = match[1] or match[2].removesuffix(".")
    return name in allowed or ("localhost" in allowed and is_loopback(name))
