"""Requests over HTTP: encoded, sent as often as the budget allows, and their replies decoded."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from typing import Any, Protocol

import httpx

from convgrad import _core as core
from convgrad import _frames
from convgrad import _jobs as jobs
from convgrad import _sealed as sealed
from convgrad._core import Decoder, HttpRequest
from convgrad._errors import PROBLEM_JSON, BrokenStream, ConvgradError, Overloaded, ShuttingDown, TimedOut
from convgrad._events import Event, Progress
from convgrad._graphs import outputs_of
from convgrad._keys import checked_key
from convgrad._requests import (
    CheckHealth,
    CheckMethod,
    Compute,
    Describe,
    GetJob,
    GetJobResult,
    GetTolerance,
    ListOperations,
    NextCase,
    Request,
    RunGraph,
    SubmitJob,
    SubmitResult,
    Validate,
    ValidateGraph,
    Verify,
)
from convgrad._retry import DEFAULT_URL, Budget, Retry, Timeout
from convgrad._stream import AsyncStream, OnProgress
from convgrad._tensors import Bytes
from convgrad._transport import translated

__all__ = ["ONCE", "AsyncNetwork", "BlockingNetwork", "Http", "Network"]

ONCE = Retry(attempts=1)

_FRAMES, _FORM = (f"{kind}, {PROBLEM_JSON}" for kind in (_frames.MEDIA_TYPE, "multipart/form-data"))


class Network(Protocol):
    """How a client sends, receives and waits; a blocking one never suspends."""

    @property
    def http(self) -> httpx.Client | httpx.AsyncClient:
        """The client of httpx."""

    async def send(self, request: httpx.Request) -> httpx.Response:
        """Send a request and return the response before its body is read."""

    def chunks(self, response: httpx.Response) -> AsyncIterator[bytes]:
        """Iterate over the body of a response while it arrives."""

    async def read(self, response: httpx.Response) -> bytes:
        """Return the body of a response."""

    async def close(self, response: httpx.Response) -> None:
        """Close a response."""

    async def sleep(self, seconds: float) -> None:
        """Wait."""

    async def aclose(self) -> None:
        """Close the connections."""


class BlockingNetwork:
    """A `Network` whose coroutines block the thread until they are done."""

    def __init__(self, http: httpx.Client) -> None:
        self.http = http

    async def send(self, request: httpx.Request) -> httpx.Response:
        return self.http.send(request, stream=True)

    async def chunks(self, response: httpx.Response) -> AsyncIterator[bytes]:
        for chunk in response.iter_bytes():
            yield chunk

    async def read(self, response: httpx.Response) -> bytes:
        return response.read()

    async def close(self, response: httpx.Response) -> None:
        response.close()

    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251 - there is no event loop

    async def aclose(self) -> None:
        self.http.close()


class AsyncNetwork:
    """A `Network` on the event loop."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http

    async def send(self, request: httpx.Request) -> httpx.Response:
        return await self.http.send(request, stream=True)

    def chunks(self, response: httpx.Response) -> AsyncIterator[bytes]:
        return response.aiter_bytes()

    async def read(self, response: httpx.Response) -> bytes:
        return await response.aread()

    async def close(self, response: httpx.Response) -> None:
        await response.aclose()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def aclose(self) -> None:
        await self.http.aclose()


class Http:
    """A `Backend` that sends requests to a service."""

    def __init__(
        self, network: Network, url: str | None, api_key: str | None, timeout: Timeout, retry: Retry | None
    ) -> None:
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
        network.http.base_url = self._url
        # No compression: tensors don't shrink, and frames have to be read as they arrive.
        network.http.headers.update({"User-Agent": f"convgrad/{__version__}", "Accept-Encoding": "identity"})
        if api_key is not None:
            network.http.headers["Authorization"] = f"Bearer {checked_key(api_key)}"
        self._network = network
        self._timeout = httpx.Timeout(timeout)
        self._retry = retry or ONCE
        self._pages: dict[str, httpx.Request] = {}

    async def fetch(self, request: Request, deadline: float | None = None) -> Any:
        """Return the value of a reply."""
        match request:
            case RunGraph():
                response = await self._send(self._encoded(request), Budget(self._retry, deadline))
                return outputs_of(response.headers.get("content-type", ""), await self._read(response))[1]
            case SubmitJob():
                response = await self._send(self._encoded(request), Budget(self._retry))
                return jobs.accepted(response.status_code, core.json_of(await self._read(response)))
            case GetJobResult():
                return await self._job_result(request)
            case NextCase():
                response = await self._send(self._encoded(request), Budget(self._retry))
                return sealed.case_of(response.headers.get("content-type", ""), await self._read(response))
            case CheckHealth():
                try:
                    return core.health_of(await self._fetch(core.readiness(), ONCE))
                except (Overloaded, ShuttingDown) as error:
                    return core.health_of(error)
            case ListOperations():
                return core.objects_of(await self._fetch(core.operations()))
        return core.object_of(await self._fetch(self._encoded(request)))

    async def _job_result(self, request: GetJobResult) -> Any:
        budget = Budget(self._retry)
        match request.kind:
            case "compute":
                async with self._opened(jobs.job_request("result", request.job, _FRAMES), budget) as stream:
                    return await stream.details()
            case "graph":
                response = await self._send(jobs.job_request("result", request.job, _FORM), budget)
                return outputs_of(response.headers.get("content-type", ""), await self._read(response))[1]
        return core.object_of(await self._fetch(jobs.job_request("result", request.job)))

    async def result(
        self,
        request: Compute | Verify | GetTolerance,
        deadline: float | None,
        on_progress: OnProgress | None = None,
    ) -> Any:
        """Return the result at the end of a stream: a `Result` or a report; a reply that breaks off is retried."""
        encoded, budget = self._encoded(request), Budget(self._retry, deadline)
        while True:
            try:
                async with self._opened(encoded, budget) as stream:
                    if on_progress is not None:
                        async for event in stream:
                            if isinstance(event, Progress):
                                on_progress(event)
                    return await stream.details()
            except BrokenStream as error:
                await self._network.sleep(budget.wait_after(error))

    @asynccontextmanager
    async def stream(self, request: Compute, deadline: float | None) -> AsyncIterator[AsyncStream]:
        """Send a request and stream its reply; nothing is retried once it has begun."""
        encoded = core.with_upload_progress(self._encoded(request), request.on_upload)
        async with self._opened(encoded, Budget(self._retry, deadline)) as stream:
            yield stream

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        await self._network.sleep(seconds)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._network.aclose()

    def _encoded(self, request: Request) -> HttpRequest:
        match request:
            case Compute(op, inputs, attributes, options, whole):
                return core.call(op, inputs, attributes, options=options, whole=whole)
            case Verify(op, inputs, attributes, options):
                return core.verification(op, inputs, attributes, options=options)
            case GetTolerance(op, inputs, attributes, options):
                return core.verification(op, inputs, attributes, options=options, page="tolerance")
            case Validate(op, inputs, attributes, options):
                return core.validation(op, inputs, attributes, options=options)
            case RunGraph(graph, inputs, outputs, options):
                return core.graph_run(graph, inputs, outputs, options)
            case ValidateGraph(graph, options):
                return core.graph_validation(graph, options)
            case Describe(op):
                return core.description(op)
            case SubmitJob(Compute(op, inputs, attributes, options), key):
                return jobs.submitted(core.multipart_call(op, inputs, attributes, options=options), key)
            case SubmitJob(called, key):
                return jobs.submitted(self._encoded(called), key)
            case GetJob(what, job):
                return jobs.job_request(what, job)
            case CheckMethod(method, params):
                return sealed.encoded(method, params)
            case NextCase(check, seed):
                return sealed.next_request(check, seed=seed)
            case SubmitResult(check, case, output, result):
                return sealed.submission(check, case, output, result)
        raise AssertionError(request)

    @asynccontextmanager
    async def _opened(self, request: HttpRequest, budget: Budget) -> AsyncIterator[AsyncStream]:
        response = await self._send(request, budget)
        try:
            decoder = core.decoder_of(response.headers, request)
            yield AsyncStream(_events(self._network.chunks(response), decoder, budget), decoder.close)
        finally:
            await self._network.close(response)

    async def _fetch(self, request: HttpRequest, retry: Retry | None = None) -> Any:
        return core.json_of(await self._read(await self._send(request, Budget(retry or self._retry))))

    async def _read(self, response: httpx.Response) -> bytes:
        """Return the body of a response, and close it."""
        with translated():
            try:
                return await self._network.read(response)
            finally:
                await self._network.close(response)

    async def _send(self, request: HttpRequest, budget: Budget) -> httpx.Response:
        """Send a request, retrying as the budget allows; return the response before its body is read."""
        while True:
            try:
                return await self._send_once(request, budget)
            except ConvgradError as error:
                if isinstance(error, BrokenStream) and not request.repeatable:
                    raise
                await self._network.sleep(budget.wait_after(error))

    async def _send_once(self, request: HttpRequest, budget: Budget) -> httpx.Response:
        with translated(self._url):
            response = await self._network.send(self._build(request, budget))
        if response.is_success:
            return response
        raise core.error_of(response.status_code, response.headers, await self._read(response))

    def _build(self, request: HttpRequest, budget: Budget) -> httpx.Request:
        """Build a request as httpx's `build_request` does, which takes longer than sending a small request."""
        http, body = self._network.http, request.body
        if (page := self._pages.get(request.path)) is None:
            page = self._pages[request.path] = http.build_request("GET", request.path)
        headers = {"host": page.headers["host"], **http.headers, "accept": request.accept}
        if body is not None:
            headers["content-type"] = body.content_type
            headers["content-length"] = str(body.length)
            headers |= body.headers
        return httpx.Request(
            request.method,
            page.url,
            headers=headers,
            cookies=http.cookies or None,
            stream=None if body is None else _Content(body.pieces),
            extensions={"timeout": {**self._timeout.as_dict(), "read": budget.read_timeout(self._timeout.read)}},
        )


async def _events(chunks: AsyncIterator[bytes], decoder: Decoder, budget: Budget) -> AsyncIterator[Event]:
    try:
        with translated():
            async for data in chunks:
                budget.check()
                for event in decoder.feed(data):
                    yield event
    except TimedOut:
        budget.check()
        raise
    decoder.close()


class _Content(httpx.SyncByteStream, httpx.AsyncByteStream):
    """The body of a request, for either client of httpx."""

    def __init__(self, pieces: Callable[[], Iterable[Bytes]]) -> None:
        self._pieces = pieces

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._pieces())  # type: ignore[arg-type] # sockets accept views too

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self:
            yield piece
