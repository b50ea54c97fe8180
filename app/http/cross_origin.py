"""Requests that web pages make in the browsers of their visitors: which pages may call, and by which host names.

A service without keys trusts whoever reaches it, and every page that a browser on this machine opens can send requests
to a loopback address. Two headers that pages can't forge tell them apart, `Origin` and `Sec-Fetch-Site`. A page whose
own name its owner points at this address (DNS rebinding) has neither against it, but its name in `Host`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import lru_cache

from starlette.types import ASGIApp, Receive, Scope, Send

from app.http.context import headers_of
from app.intake.body import media_type
from app.settings import Settings, is_loopback
from convgrad._errors import Forbidden, UnsupportedMediaType

__all__ = ["CrossOriginProtection", "is_allowed_host"]

_ANY = "*"
_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^:\[\]\s]+))(?::\d*)?", re.ASCII)
# Orchestrators and load balancers ask by whatever address they know; the answers are the same for everybody.
_HEALTH = frozenset({"/healthz", "/readyz", "/v2/health/live", "/v2/health/ready"})
_READS = ("GET", "HEAD")
_OWN = ("same-origin", "none")
# What a page can send without asking for leave (`enctype` of a form, mode `no-cors` of fetch). Multipart is such a type
# too, and one of ours: from this service's own pages it is taken.
_FORM_TYPES = ("text/plain", "application/x-www-form-urlencoded")
_TAKEN = ("application/json", "application/octet-stream", "multipart/form-data")


class CrossOriginProtection:
    """Refuse requests for other hosts than the settings allow, and those of pages of other origins.

    Raises `Forbidden`, or `UnsupportedMediaType` for a content type that only forms have.
    """

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._hosts = settings.hosts
        self._origins = frozenset(settings.cors)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] == "http":
            headers = headers_of(scope)
            if _ANY not in self._hosts and scope["path"] not in _HEALTH:
                self._check_host(headers)
            if "origin" in headers or "sec-fetch-site" in headers:
                self._check_page(scope["method"], headers)
        await self._app(scope, receive, send)

    def _check_host(self, headers: Mapping[str, str]) -> None:
        host = headers.get("host")
        if host is not None and not is_allowed_host(host, self._hosts):  # no browser leaves it out
            raise Forbidden(
                "this service is not asked by the name in the Host header: CONVGRAD_ALLOWED_HOSTS lists its names",
                data={"reason": "host"},
            )

    def _check_page(self, method: str, headers: Mapping[str, str]) -> None:
        if not (self._is_own(headers) or self._may_call(headers) or _is_visit(method, headers)):
            raise Forbidden(
                "a page of another origin may not call this service: CONVGRAD_CORS lists the origins that may",
                data={"reason": "origin"},
            )
        if method not in _READS and media_type(headers) in _FORM_TYPES:
            raise UnsupportedMediaType(
                f"a page must send {', '.join(_TAKEN)}, and nothing that a plain form sends",
                data={"supported": list(_TAKEN)},
            )

    def _is_own(self, headers: Mapping[str, str]) -> bool:
        """Tell whether the page is this service's own, or the user's own doing such as a bookmark."""
        site = headers.get("sec-fetch-site")
        if site is not None:
            return site in _OWN
        # Browsers send it over HTTPS and to loopback addresses only. Schemes may differ: a proxy may have ended TLS.
        return headers["origin"].partition("://")[2].lower() == headers.get("host", "?").lower()

    def _may_call(self, headers: Mapping[str, str]) -> bool:
        return _ANY in self._origins or headers.get("origin") in self._origins


def _is_visit(method: str, headers: Mapping[str, str]) -> bool:
    """Tell whether somebody follows a link to a page of ours; what it says is not told to the page with the link."""
    where = headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest")
    return method in _READS and where == ("navigate", "document")


@lru_cache(maxsize=256)
def is_allowed_host(host: str, allowed: Collection[str]) -> bool:
    """Tell whether a Host header names one of `allowed`: names and addresses; `localhost` is every loopback name."""
    found = _HOST.fullmatch(host.lower())
    if found is None:
        return False
    name = found[1] or found[2].removesuffix(".")
    return name in allowed or ("localhost" in allowed and is_loopback(name))
