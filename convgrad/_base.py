"""What both clients share: address, API key, timeouts, retries, and building HTTP requests."""

from __future__ import annotations

import math
import os
from collections.abc import AsyncIterable, Iterable, Sequence
from typing import Any

import httpx

from convgrad._core import Request
from convgrad._errors import InvalidParams
from convgrad._inference import Lend
from convgrad._keys import checked_key
from convgrad._retry import Budget, Retry
from convgrad._tensors import Bytes

__all__ = ["DEFAULT_TIMEOUT", "DEFAULT_URL", "ONCE", "READY_POLL", "Base", "Timeout", "options"]

DEFAULT_URL = "http://127.0.0.1:8000"
# A computation may be silent for as long as the service lets it run, by default five minutes.
DEFAULT_TIMEOUT = httpx.Timeout(60.0, connect=5.0, read=330.0)
ONCE = Retry(attempts=1)
READY_POLL = 0.1

Timeout = float | httpx.Timeout | None


class Base:
    """The configuration of a client."""

    _http: httpx.Client | httpx.AsyncClient
    _lend: Lend | None = None
    """Puts tensors in memory that the service shares."""

    def __init__(self, url: str | None, api_key: str | None, timeout: Timeout, retry: Retry | None) -> None:
        from convgrad import __version__

        if url is None:
            url = os.environ.get("CONVGRAD_URL") or DEFAULT_URL
        if api_key is None:
            api_key = os.environ.get("CONVGRAD_API_KEY") or None
        self._url = httpx.URL(url)
        if self._url.scheme not in ("http", "https"):
            raise ValueError("url must begin with http:// or https://")
        self._timeout = httpx.Timeout(timeout)
        self._urls: dict[str, httpx.URL] = {}
        self._retry = retry or ONCE
        # No compression: tensors don't shrink, and frames have to be read as they arrive.
        self._headers = {"User-Agent": f"convgrad/{__version__}", "Accept-Encoding": "identity"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {checked_key(api_key)}"

    def _settings(self) -> dict[str, Any]:
        return {"base_url": self._url, "headers": self._headers, "timeout": self._timeout}

    def _build(
        self, request: Request, budget: Budget, content: Iterable[Bytes] | AsyncIterable[Bytes] | None
    ) -> httpx.Request:
        """Build a request as httpx's `build_request` does, which takes longer than sending a small request."""
        if (url := self._urls.get(request.path)) is None:
            url = self._urls[request.path] = self._http.build_request("GET", request.path).url
        headers = {**self._http.headers, "accept": request.accept}
        if request.body is not None:
            headers["content-type"] = request.body.content_type
            headers["content-length"] = str(request.body.length)
            headers |= request.body.headers
        timeout = {**self._timeout.as_dict(), "read": budget.read_timeout(self._timeout.read)}
        return httpx.Request(
            request.method,
            url,
            headers=headers,
            cookies=self._http.cookies or None,
            content=content,  # type: ignore[arg-type] # sockets accept views too
            extensions={"timeout": timeout},
        )


def options(reference: bool, deadline: float | None, outputs: Sequence[str] | None = None) -> dict[str, Any]:
    """Return the options of a call that differ from their defaults; an infinite deadline means none.

    Raises `InvalidParams` when `deadline` is not a positive number.
    """
    options: dict[str, Any] = {"reference": True} if reference else {}
    if outputs is not None:
        options["outputs"] = list(outputs)
    milliseconds = math.inf if deadline is None else deadline * 1000
    if math.isnan(milliseconds) or milliseconds <= 0:
        rule = f"deadline must be a number of seconds above 0, or infinity, but is {deadline}"
        raise InvalidParams(rule, errors=[{"loc": ["options", "deadline_ms"], "msg": rule, "type": "value"}])
    if milliseconds < math.inf:
        options["deadline_ms"] = math.ceil(max(1, milliseconds))
    return options
