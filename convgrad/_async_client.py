"""The asyncio client: `_client` and `_stream` with `await`."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Self

import httpx

from convgrad import _core as core
from convgrad._assembly import Assembly
from convgrad._base import (
    DEFAULT_TIMEOUT,
    ONCE,
    READY_POLL,
    Base,
    Certificate,
    OnPoll,
    OnProgress,
    Timeout,
    Trust,
    options,
    tls_context,
)
from convgrad._core import Inputs, OnUpload, Request
from convgrad._errors import BrokenStream, ConvgradError, Overloaded, ShuttingDown, TimedOut
from convgrad._events import Array, Event, Health, Progress, Result
from convgrad._graphs import Dump, GraphInputs, attributes_of, nodes_of, outputs_of
from convgrad._messages import Messages
from convgrad._operations import Operations
from convgrad._report import Report
from convgrad._retry import Budget, Retry
from convgrad._tensors import Bytes, Tensor
from convgrad._transport import translated
from convgrad._whole import Whole

__all__ = ["AsyncClient", "AsyncStream"]


class AsyncClient(Base, Operations[Coroutine[Any, Any, Array]]):
    """`Client` for asyncio: the same names with `await`, `async with` and `async for`."""

    def __init__(
        self,
        url: str | None = None,
        *,
        api_key: str | None = None,
        timeout: Timeout = DEFAULT_TIMEOUT,
        retry: Retry | None = Retry(),  # noqa: B008 - frozen
        transport: httpx.AsyncBaseTransport | None = None,
        uds: str | os.PathLike[str] | None = None,
        verify: Trust | None = None,
        cert: Certificate | None = None,
    ) -> None:
        super().__init__(url, api_key, timeout, retry)
        trust = tls_context(verify, cert)
        if uds is not None and transport is None:
            transport = httpx.AsyncHTTPTransport(uds=os.fspath(uds), verify=trust)
        self._http: httpx.AsyncClient = httpx.AsyncClient(transport=transport, verify=trust, **self._settings())

    async def run(
        self,
        op: str,
        inputs: Inputs,
        attributes: Mapping[str, Any] | None = None,
        *,
        reference: bool = False,
        deadline: float | None = None,
    ) -> Array:
        """Compute `op` and return its output; see `Client.run`."""
        request = await self._call(op, inputs, attributes, options(reference, deadline), whole=True)
        return (await self._result(request, deadline)).array

    async def run_detailed(
        self,
        op: str,
        inputs: Inputs,
        attributes: Mapping[str, Any] | None = None,
        *,
        outputs: Sequence[str] | None = None,
        reference: bool = False,
        deadline: float | None = None,
    ) -> Result:
        """Compute `op` and return the whole reply; see `Client.run_detailed`."""
        request = await self._call(op, inputs, attributes, options(reference, deadline, outputs))
        return await self._result(request, deadline)

    @asynccontextmanager
    async def stream(
        self,
        op: str,
        inputs: Inputs,
        attributes: Mapping[str, Any] | None = None,
        *,
        outputs: Sequence[str] | None = None,
        reference: bool = False,
        deadline: float | None = None,
        on_upload: OnUpload | None = None,
    ) -> AsyncIterator[AsyncStream]:
        """Compute `op` and stream its tiles as they become final, for `async with`; see `Client.stream`."""
        request = await self._call(op, inputs, attributes, options(reference, deadline, outputs))
        request = core.watched(request, on_upload)
        async with self._opened(request, Budget(self._retry, deadline)) as stream:
            yield stream

    async def validate(
        self,
        op: str,
        inputs: Inputs,
        attributes: Mapping[str, Any] | None = None,
        *,
        outputs: Sequence[str] | None = None,
        reference: bool = False,
    ) -> dict[str, Any]:
        """Check a call without sending its tensors; see `Client.validate`."""
        return core.object_of(
            await self._fetch(core.validation(op, inputs, attributes, options=options(reference, None, outputs)))
        )

    async def verify(
        self,
        op: str,
        inputs: Inputs,
        result: Tensor,
        attributes: Mapping[str, Any] | None = None,
        *,
        output: str | None = None,
        explain: bool = False,
        fast: bool | None = None,
        deadline: float | None = None,
        on_progress: OnProgress | None = None,
    ) -> Report:
        """Compare `result` with the float64 reference; see `Client.verify`."""
        name = output or core.output_of(op, await self.operations())
        request = core.verification(
            op, {**inputs, name: result}, attributes, options=options(False, deadline, explain=explain, fast=fast)
        )
        return Report(core.object_of(await self._response(request, deadline, on_progress)))

    async def run_graph(
        self,
        graph: Dump,
        inputs: GraphInputs,
        outputs: Sequence[int] | None = None,
        *,
        reference: bool = False,
        deadline: float | None = None,
    ) -> dict[int, Array]:
        """Compute a dumped graph; see `Client.run_graph`."""
        request = core.graph_run(graph, inputs, outputs, options(reference, deadline))
        response = await self._send(request, Budget(self._retry, deadline))
        with translated():
            try:
                return outputs_of(response.headers.get("content-type", ""), await response.aread())[1]
            finally:
                await response.aclose()

    async def verify_graph(
        self,
        graph: Dump,
        inputs: GraphInputs,
        results: GraphInputs,
        *,
        explain: bool = False,
        fast: bool | None = None,
        deadline: float | None = None,
        on_progress: OnProgress | None = None,
    ) -> dict[int, Report]:
        """Verify results for tensors of a dumped graph; see `Client.verify_graph`."""
        nodes = nodes_of(await self.validate_graph(graph), results)
        between = sorted(set().union(*(node["inputs"].values() for node in nodes.values())) - set(inputs))
        given = {**inputs, **(await self.run_graph(graph, inputs, between, reference=True) if between else {})}
        reports = {}
        for number, node in nodes.items():
            read = {name: given[tensor] for name, tensor in node["inputs"].items() if tensor in given}
            more: Any = {"explain": explain, "fast": fast, "deadline": deadline, "on_progress": on_progress}
            reports[number] = await self.verify(node["op"], read, results[number], attributes_of(node), **more)
        return reports

    async def validate_graph(self, graph: Dump) -> dict[str, Any]:
        """Check a dumped graph; return its inputs, outputs and nodes with resolved attributes and cost."""
        return core.object_of(await self._fetch(core.graph_validation(graph)))

    async def operations(self) -> list[dict[str, Any]]:
        """List the operations of the service."""
        return core.operations_of(await self._fetch(core.operations()))

    async def describe(self, op: str) -> dict[str, Any]:
        """Return the table of `op`; see `Client.describe`."""
        return core.object_of(await self._fetch(core.description(op)))

    async def health(self) -> Health:
        """Ask whether the service accepts calls; see `Client.health`."""
        try:
            return core.health_of(await self._fetch(core.readiness(), ONCE))
        except (Overloaded, ShuttingDown) as error:
            return core.health_of(error)

    async def wait_until_ready(
        self,
        timeout: float = 60.0,  # noqa: ASYNC109 - the sync client's name
        *,
        on_poll: OnPoll | None = None,
    ) -> Health:
        """Wait until the service accepts calls; see `Client.wait_until_ready`."""
        end, seen = time.monotonic() + timeout, None
        while True:
            if (health := await self._health_or_none()) is not None and health.ready:
                return health
            if on_poll is not None:
                on_poll(health)
            seen = health or seen
            if time.monotonic() + READY_POLL > end:
                raise core.not_ready(timeout, seen)
            await asyncio.sleep(READY_POLL)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _call(
        self,
        op: str,
        inputs: Inputs,
        attributes: Mapping[str, Any] | None,
        options: Mapping[str, Any],
        *,
        whole: bool = False,
    ) -> Request:
        """Build the request of a call; copying tensors to shared memory takes a while."""
        build = partial(core.call, op, inputs, attributes, options=options, whole=whole, sharing=self._sharing)
        return build() if self._sharing is None else await asyncio.to_thread(build)

    async def _health_or_none(self) -> Health | None:
        try:
            return await self.health()
        except ConvgradError:
            return None

    async def _result(self, request: Request, deadline: float | None) -> Result:
        budget = Budget(self._retry, deadline)
        while True:
            try:
                async with self._opened(request, budget) as stream:
                    return await stream.details()
            except BrokenStream as error:
                await asyncio.sleep(budget.wait_after(error))

    @asynccontextmanager
    async def _opened(self, request: Request, budget: Budget) -> AsyncIterator[AsyncStream]:
        response = await self._send(request, budget)
        try:
            yield AsyncStream(response, core.assembly_of(response.headers, request.body), budget)
        finally:
            await response.aclose()

    async def _response(self, request: Request, deadline: float | None, on_progress: OnProgress | None) -> Any:
        """Send a request whose reply is events; return the result."""
        budget = Budget(self._retry, deadline)
        while True:
            response = await self._send(request, budget)
            try:
                messages = Messages(response.headers.get("content-type", ""))
                async for event in AsyncStream(response, messages, budget):
                    if on_progress is not None and isinstance(event, Progress):
                        on_progress(event)
                return messages.close()
            except BrokenStream as error:
                await asyncio.sleep(budget.wait_after(error))
            finally:
                await response.aclose()

    async def _fetch(self, request: Request, retry: Retry | None = None) -> Any:
        response = await self._send(request, Budget(retry or self._retry))
        with translated():
            try:
                return core.json_of(await response.aread())
            finally:
                await response.aclose()

    async def _send(self, request: Request, budget: Budget) -> httpx.Response:
        while True:
            try:
                return await self._send_once(request, budget)
            except ConvgradError as error:
                await asyncio.sleep(budget.wait_after(error))

    async def _send_once(self, request: Request, budget: Budget) -> httpx.Response:
        content = None if request.body is None else _as_async(request.body.pieces())
        with translated(self._url):
            response = await self._http.send(self._build(request, budget, content), stream=True)
            if response.is_success:
                return response
            try:
                raise core.error_of(response.status_code, response.headers, await response.aread())
            finally:
                await response.aclose()


class AsyncStream:
    """`Stream` for asyncio."""

    def __init__(self, response: httpx.Response, assembly: Assembly | Whole | Messages, budget: Budget) -> None:
        self._response = response
        self._budget = budget
        self._assembly = assembly
        self._events = self._read()

    def __aiter__(self) -> AsyncIterator[Event]:
        return self._events

    async def result(self) -> Array:
        """Read the rest of the reply and return the output; see `Stream.result`."""
        return (await self.details()).array

    async def details(self) -> Result:
        """Read the rest of the reply and return all of it; see `Stream.details`."""
        async for _ in self._events:
            pass
        found: Result = self._assembly.close()
        return found

    async def _read(self) -> AsyncIterator[Event]:
        try:
            with translated():
                async for data in self._response.aiter_bytes():
                    self._budget.check()
                    for event in self._assembly.feed(data):
                        yield event
        except TimedOut:
            self._budget.check()
            raise
        self._assembly.close()


async def _as_async(pieces: Iterable[Bytes]) -> AsyncIterator[Bytes]:
    for piece in pieces:
        yield piece
