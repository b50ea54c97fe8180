"""Authentication by an API key in `Authorization: Bearer` or `X-API-Key`, where the service has keys."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from app.http.exchange import Exchange
from app.http.keys import KeyRing
from app.settings import Settings
from app.telemetry.context import MONITORED
from convgrad._errors import Unauthorised

__all__ = ["FREE_PAGES", "Authentication", "make_key_ring"]

# The descriptions of the APIs are the same in every installation.
FREE_PAGES = MONITORED | {"/openapi.json", "/openrpc.json"}
"""Pages that need no key; `/metrics` only without a separate ops port."""


def make_key_ring(settings: Settings) -> KeyRing | None:
    """Read the keys that the settings name; None when they name none, and no key is required.

    Raises `OSError` or `ValueError` when they can't be read, or are none.
    """
    if not settings.has_keys:
        return None
    return KeyRing(file=settings.keys_file, text="" if settings.keys is None else settings.keys.get_secret_value())


class Authentication:
    """Accept requests with a known key, and requests for `free` pages."""

    def __init__(self, keys: KeyRing, free: Collection[str] = FREE_PAGES) -> None:
        self._keys = keys
        self._free = free

    def check(self, exchange: Exchange) -> None:
        """Set the key of the request, or `Exchange.deny` it."""
        if exchange.scope["path"] in self._free:
            return
        context, secret = exchange.context, _secret(exchange.headers)
        if secret is None:
            message = "this service requires an API key, in Authorization: Bearer or X-API-Key"
            exchange.deny(Unauthorised(message, data={"reason": "no_key"}))
        elif (key := self._keys.find(secret)) is None:
            exchange.deny(Unauthorised("this API key is not valid", data={"reason": "unknown_key"}))
        else:
            context.key, context.calls_limit = key.name, key.calls


def _secret(headers: Mapping[str, str]) -> str | None:
    scheme, _, value = headers.get("authorization", "").partition(" ")
    return value.strip() if scheme.lower() == "bearer" else headers.get("x-api-key")
