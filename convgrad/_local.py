"""`convgrad.local()`: a client of the user's local service, which is started if it is not running."""

from __future__ import annotations

import asyncio
import html
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, NoReturn

from convgrad._async_client import AsyncClient
from convgrad._base import DEFAULT_TIMEOUT, ONCE, Timeout
from convgrad._client import Client
from convgrad._errors import ConnectFailed, ConvgradError, TimedOut
from convgrad._events import Health
from convgrad._local_service import LocalService, open_service
from convgrad._progress import ProgressBar
from convgrad._retry import Retry
from convgrad._shared import ServiceEnded, SharedMemory

__all__ = ["AsyncLocalClient", "Local", "LocalClient", "local"]

_URL = "http://localhost"  # over the Unix socket
_POLL_S = 0.1
# A service that restarts itself, because some compiled code fails on this processor, closes the connection once.
_STARTS = 2


def local(
    *,
    workers: int = 0,
    share: bool = True,
    settings: Mapping[str, object] = MappingProxyType({}),
    start_timeout: float = 300.0,
    progress: bool | None = None,
    timeout: Timeout = DEFAULT_TIMEOUT,
    retry: Retry | None = Retry(),  # noqa: B008 - frozen
) -> Local:
    """Start a service on this machine, for ``with`` and ``async with``, which give a `Client` and an `AsyncClient`.

    >>> with convgrad.local() as client:  # doctest: +SKIP
    ...     dw = client.convolution_backward_weights(src, diff_dst, **attributes)

    The service listens on Unix sockets in a folder that only this user can enter, and reads large tensors in memory
    that it shares with the client. It has `workers` processes, 0 for one per processor; `settings` are other settings
    by name, such as ``{"memory_limit": "2GB"}``. All blocks and processes of the user with the same settings share one
    service, except those with `share` false. It ends with its last user, even one that is killed.

    The block is entered when the service is ready: usually after a few seconds, or about a minute if the kernels have
    to be compiled. Until then `progress` shows a bar, by default in terminals and notebooks. `timeout` and `retry` are
    those of `Client`.

    Entering raises `ConnectFailed` if the service is not installed (``pip install ".[server]"`` in a clone) or does not
    start, `TimedOut` if it is not ready after `start_timeout` seconds, and `OSError` if there is no folder for it. A
    call raises `TransportError` if the service has ended.
    """
    chosen = {"workers": workers, **settings}
    return Local(chosen, share=share, start_timeout=start_timeout, progress=progress, timeout=timeout, retry=retry)


class Local:
    """A local service, started or shared when a block is entered; returned by `local`.

    `open` returns a client without a block, for notebooks; close it to leave the service.
    """

    def __init__(
        self,
        settings: Mapping[str, object],
        *,
        share: bool,
        start_timeout: float,
        progress: bool | None,
        timeout: Timeout,
        retry: Retry | None,
    ) -> None:
        self._settings = settings
        self._share = share
        self._start_timeout = start_timeout
        self._progress = progress
        self._timeout = timeout
        self._retry = retry
        self._open: list[LocalClient | AsyncLocalClient] = []

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self._settings.items())
        return f"<convgrad.local, {given}, {len(self._open)} open>"

    if not TYPE_CHECKING:  # type checkers know what is missing

        def __getattr__(self, name: str) -> NoReturn:
            how = ": write `with convgrad.local() as client`, or `client = convgrad.local().open()`"
            raise AttributeError(f"convgrad.local has no attribute {name}{how if hasattr(Client, name) else ''}")

    def open(self) -> LocalClient:
        """Start the service, or share the running one; wait until it is ready and return a client of it."""
        service, health = self._enter(threading.Event())
        return LocalClient(service, health, self._timeout, self._retry)

    def __enter__(self) -> LocalClient:
        client = self.open()
        self._open.append(client)
        return client

    def __exit__(self, *_: object) -> None:
        client = self._open.pop()
        assert isinstance(client, LocalClient)
        client.close()

    async def __aenter__(self) -> AsyncLocalClient:
        abandoned = threading.Event()
        try:
            service, health = await asyncio.to_thread(self._enter, abandoned)
        except asyncio.CancelledError:
            abandoned.set()
            raise
        client = AsyncLocalClient(service, health, self._timeout, self._retry)
        self._open.append(client)
        return client

    async def __aexit__(self, *_: object) -> None:
        client = self._open.pop()
        assert isinstance(client, AsyncLocalClient)
        await client.aclose()

    def _enter(self, abandoned: threading.Event) -> tuple[LocalService, Health]:
        """Connect to the service, starting it if necessary, and wait until it is ready or the caller has left."""
        end = time.monotonic() + self._start_timeout
        with self._bar() as bar:
            for start in range(_STARTS):
                service = open_service(self._settings, share=self._share, timeout=max(0.0, end - time.monotonic()))
                try:
                    return service, _wait(service, bar, end, abandoned)
                except ServiceEnded:
                    service.close()
                    if start + 1 == _STARTS or not service.is_locked():
                        raise ConnectFailed(service.ended_message()) from None
                except BaseException:
                    service.close()
                    raise
        raise AssertionError

    @contextmanager
    def _bar(self) -> Iterator[ProgressBar | None]:
        shown = self._progress
        if shown is None:
            shown = sys.stderr is not None and (sys.stderr.isatty() or "ipykernel" in sys.modules)
        if not shown:
            yield None
            return
        with ProgressBar(sys.stderr, "local service") as bar:
            yield bar


def _wait(service: LocalService, bar: ProgressBar | None, end: float, abandoned: threading.Event) -> Health:
    """Wait until the service is ready. Raises `ServiceEnded` when it ends, and `TimedOut`."""
    with Client(_URL, uds=service.http, retry=ONCE, timeout=5.0) as client:
        while True:
            try:
                health = client.health() if service.http.exists() else None
            except ConvgradError:  # it is overloaded, or has just ended
                health = None
            if abandoned.is_set():
                raise ServiceEnded
            if health is not None and health.ready:
                return health
            if service.connection.ended:
                raise ServiceEnded
            if time.monotonic() > end:
                cause = health.detail.get("cause") if health is not None else None
                raise TimedOut(f"the local service was not ready in time{f': {cause}' if cause else ''}")
            if health is not None and bar is not None:
                bar.waiting(health)
            time.sleep(_POLL_S)


class _LocalBase:
    """What both clients of a local service show of it, also in notebooks."""

    _service: LocalService
    _health: Health

    @property
    def service_pid(self) -> int:
        """The service's process id."""
        return self._service.pid

    def __repr__(self) -> str:
        facts = ", ".join(f"{key} {value}" for key, value in self._facts().items())
        return f"<convgrad.{type(self).__name__}: {facts}>"

    def _repr_html_(self) -> str:
        left = "style='text-align:left'"
        rows = "".join(
            f"<tr><th {left}>{html.escape(key)}</th><td {left}>{html.escape(value)}</td></tr>"
            for key, value in self._facts().items()
        )
        return f"<table><caption>convgrad.{type(self).__name__}</caption>{rows}</table>"

    def _facts(self) -> dict[str, str]:
        service, detail = self._service, self._health.detail
        workers = detail.get("workers")
        return {
            "service": f"process {service.pid}, {'ended' if service.connection.ended else 'running'}",
            "workers": str(workers.get("wanted") if isinstance(workers, dict) else "?"),
            "target": str(detail.get("target", "?")),
            "socket": str(service.http),
        }


class LocalClient(_LocalBase, Client):
    """A `Client` of a local service, which ends when its last client is closed."""

    def __init__(self, service: LocalService, health: Health, timeout: Timeout, retry: Retry | None) -> None:
        super().__init__(_URL, uds=service.http, timeout=timeout, retry=retry)
        self._service, self._health = service, health
        self._async._memory = SharedMemory(service.connection, service.ended_message)


class AsyncLocalClient(_LocalBase, AsyncClient):
    """An `AsyncClient` of a local service, which ends when its last client is closed."""

    def __init__(self, service: LocalService, health: Health, timeout: Timeout, retry: Retry | None) -> None:
        super().__init__(_URL, uds=service.http, timeout=timeout, retry=retry)
        self._service, self._health = service, health
        self._memory = SharedMemory(service.connection, service.ended_message)
