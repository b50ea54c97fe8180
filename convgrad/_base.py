"""What both clients share: address, API key, timeouts, retries, and building HTTP requests."""

from __future__ import annotations

import math
import os
import ssl
from collections.abc import AsyncIterable, Callable, Iterable, Sequence
from typing import Any

import httpx

from convgrad._core import Request
from convgrad._errors import InvalidParams
from convgrad._events import Health, Progress
from convgrad._inference import Sharing
from convgrad._keys import checked_key
from convgrad._retry import Budget, Retry
from convgrad._tensors import Bytes

__all__ = [
    "DEFAULT_TIMEOUT",
    "DEFAULT_URL",
    "ONCE",
    "READY_POLL",
    "Base",
    "Certificate",
    "OnPoll",
    "OnProgress",
    "Timeout",
    "Trust",
    "options",
    "tls_context",
]

DEFAULT_URL = "http://127.0.0.1:8000"
# A computation may be silent for as long as the service lets it run, by default five minutes.
DEFAULT_TIMEOUT = httpx.Timeout(60.0, connect=5.0, read=330.0)
ONCE = Retry(attempts=1)
READY_POLL = 0.1

Timeout = float | httpx.Timeout | None
File = str | os.PathLike[str]

Trust = ssl.SSLContext | File | bool
"""Whom a client trusts: a TLS context, a PEM file of authorities, or whether to check certificates at all."""

Certificate = File | tuple[File, File] | tuple[File, File, str]
"""A client's certificate: a PEM file with its private key, or two files, or two and the password of the second."""

OnProgress = Callable[[Progress], object]
"""Gets each `Progress` of a computation."""

OnPoll = Callable[[Health | None], None]
"""Gets each answer of a service that is waited for; None while there is no connection."""


class Base:
    """The configuration of a client."""

    _http: httpx.Client | httpx.AsyncClient
    _sharing: Sharing | None = None
    """Memory that the service shares."""

    def __init__(self, url: str | None, api_key: str | None, timeout: Timeout, retry: Retry | None) -> None:
        from convgrad import __version__

        if url is None:
            url = os.environ.get("CONVGRAD_URL") or DEFAULT_URL
        if api_key is None:
            api_key = os.environ.get("CONVGRAD_API_KEY") or None
        try:
            self._url = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise ValueError(f"url must be an address such as {DEFAULT_URL}: {error}") from error
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


def tls_context(verify: Trust | None, cert: Certificate | None) -> ssl.SSLContext:
    """Return the TLS context of a client; None stands for the variables CONVGRAD_CACERT, CONVGRAD_CERT and _CERT_KEY.

    Raises `ValueError` for a file that can't be read or is not what it should be.
    """
    if verify is None:
        verify = os.environ.get("CONVGRAD_CACERT") or True
    if cert is None and (path := os.environ.get("CONVGRAD_CERT")):
        key = os.environ.get("CONVGRAD_CERT_KEY")
        cert = (path, key) if key else path
    context = _trusting(verify)
    if cert is not None:
        files = cert if isinstance(cert, tuple) else (cert,)
        try:
            # An empty password, so that OpenSSL does not ask for one on the terminal.
            password = files[2] if len(files) == 3 else ""
            context.load_cert_chain(files[0], files[1] if len(files) > 1 else None, password)
        except OSError as error:
            names = " and ".join(os.fspath(file) for file in files[:2])
            rule = "must be PEM files of a certificate and its private key"
            raise ValueError(f"{names} {rule}: {_cause(error)}") from error
    return context


def _trusting(verify: Trust) -> ssl.SSLContext:
    if isinstance(verify, ssl.SSLContext | bool):
        return httpx.create_ssl_context(verify)
    try:
        return ssl.create_default_context(cafile=os.fspath(verify))
    except OSError as error:
        raise ValueError(f"{os.fspath(verify)} must be a PEM file of certificates: {_cause(error)}") from error


def _cause(error: OSError) -> str:
    return getattr(error, "reason", None) or error.strerror or str(error)


def options(
    reference: bool,
    deadline: float | None,
    outputs: Sequence[str] | None = None,
    *,
    explain: bool = False,
    fast: bool | None = None,
) -> dict[str, Any]:
    """Return the options of a call that differ from their defaults; an infinite deadline means none.

    Raises `InvalidParams` when `deadline` is not a positive number.
    """
    options: dict[str, Any] = {"reference": True} if reference else {}
    if explain:
        options["explain"] = True
    if fast is not None:
        options["fast"] = fast
    if outputs is not None:
        options["outputs"] = list(outputs)
    milliseconds = math.inf if deadline is None else deadline * 1000
    if math.isnan(milliseconds) or milliseconds <= 0:
        rule = f"deadline must be a number of seconds above 0, or infinity, but is {deadline}"
        raise InvalidParams(rule, errors=[{"loc": ["options", "deadline_ms"], "msg": rule, "type": "value"}])
    if milliseconds < math.inf:
        options["deadline_ms"] = math.ceil(max(1, milliseconds))
    return options
