"""Everything that both clients do, as coroutines; `_core` builds the requests and parses the replies."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Protocol, TypeVar

import httpx

from convgrad import _core as core
from convgrad import _sealed as sealed
from convgrad._core import Algorithm, Inputs, OnUpload, Request
from convgrad._errors import BrokenStream, ConvgradError, Overloaded, ShuttingDown, TransportError
from convgrad._events import Array, Health, Progress, Result
from convgrad._graphs import Dump, GraphInputs, attributes_of, nodes_of, outputs_of
from convgrad._keys import checked_key
from convgrad._operations import Operations
from convgrad._report import Report
from convgrad._retry import Budget, Retry
from convgrad._sealed import SealedCase
from convgrad._shared import SharedMemory
from convgrad._stream import AsyncStream
from convgrad._tensors import Bytes, Tensor
from convgrad._transport import translated

__all__ = ["DEFAULT_TIMEOUT", "DEFAULT_URL", "ONCE", "BaseClient", "Network", "OnPoll", "OnProgress", "Timeout"]

DEFAULT_URL = "http://127.0.0.1:8000"
# A computation may be silent for as long as the service lets it run, by default five minutes.
DEFAULT_TIMEOUT = httpx.Timeout(60.0, connect=5.0, read=330.0)
ONCE = Retry(attempts=1)
_READY_POLL = 0.1

Timeout = float | httpx.Timeout | None

OnProgress = Callable[[Progress], object]
"""Called with each `Progress` of a computation."""

OnPoll = Callable[[Health | None], None]
"""Called with each reply of a service that is not ready yet; None while there is no connection."""

T = TypeVar("T")


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

    async def in_thread(self, function: Callable[[], T]) -> T:
        """Call a function that takes a while."""

    async def aclose(self) -> None:
        """Close the connections."""


class BaseClient(Operations[Coroutine[Any, Any, Array]]):
    """The methods of both clients: `AsyncClient` inherits them, `Client` runs them on a blocking network."""

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
        self._memory: SharedMemory | None = None

    async def run(
        self,
        op: str,
        inputs: Inputs,
        attributes: Mapping[str, Any] | None = None,
        *,
        reference: bool = False,
        reproducible: bool = False,
        algorithm: Algorithm = "direct",
        deadline: float | None = None,
    ) -> Array:
        request = await self._call(
            op,
            inputs,
            attributes,
            core.options(reference, deadline, reproducible=reproducible, algorithm=algorithm),
            whole=True,
        )
        result: Result = await self._result(request, deadline)
        return result.array

    async def run_outputs(
        self,
        op: str,
        inputs: Inputs,
        attributes: Mapping[str, Any] | None = None,
        *,
        outputs: Sequence[str],
        reference: bool = False,
        reproducible: bool = False,
        algorithm: Algorithm = "direct",
        deadline: float | None = None,
    ) -> dict[str, Array]:
        """Compute several outputs of `op` in one call, such as `diff_weights`, `diff_bias` and `diff_src` of a weight
        gradient; return them by name.
        """
        request = await self._call(
            op,
            inputs,
            attributes,
            core.options(reference, deadline, outputs, reproducible=reproducible, algorithm=algorithm),
            whole=True,
        )
        return dict((await self._result(request, deadline)).outputs)

    async def run_detailed(
        self,
        op: str,
        inputs: Inputs,
        attributes: Mapping[str, Any] | None = None,
        *,
        outputs: Sequence[str] | None = None,
        reference: bool = False,
        reproducible: bool = False,
        algorithm: Algorithm = "direct",
        deadline: float | None = None,
    ) -> Result:
        """Compute `op` like `run`, and return its outputs, resolved attributes and statistics.

        `outputs` are the names of those to compute in the one call, such as `diff_weights`, `diff_bias` and `diff_src`
        of a weight gradient; by default its first.
        """
        request = await self._call(
            op,
            inputs,
            attributes,
            core.options(reference, deadline, outputs, reproducible=reproducible, algorithm=algorithm),
        )
        result: Result = await self._result(request, deadline)
        return result

    @asynccontextmanager
    async def stream(
        self,
        op: str,
        inputs: Inputs,
        attributes: Mapping[str, Any] | None = None,
        *,
        outputs: Sequence[str] | None = None,
        reference: bool = False,
        reproducible: bool = False,
        algorithm: Algorithm = "direct",
        deadline: float | None = None,
        on_upload: OnUpload | None = None,
    ) -> AsyncIterator[AsyncStream]:
        """Compute `op` and stream its tiles as they become final, in a `with` block.

        Of several `outputs` the tiles come one output after another. Nothing is retried once the reply has begun.
        `on_upload` is called with the bytes sent so far and in total while the request is sent.
        """
        request = await self._call(
            op,
            inputs,
            attributes,
            core.options(reference, deadline, outputs, reproducible=reproducible, algorithm=algorithm),
        )
        async with self._opened(core.with_upload_progress(request, on_upload), Budget(self._retry, deadline)) as stream:
            yield stream

    async def validate(
        self,
        op: str,
        inputs: Inputs,
        attributes: Mapping[str, Any] | None = None,
        *,
        outputs: Sequence[str] | None = None,
        reference: bool = False,
        reproducible: bool = False,
        algorithm: Algorithm = "direct",
    ) -> dict[str, Any]:
        """Check a call without sending its tensors; return its resolved attributes, output shapes, plan and cost.

        `inputs` are as for `run`, or `{"dtype": .., "shape": ..}`. Raises what the call would raise.
        """
        options = core.options(reference, None, outputs, reproducible=reproducible, algorithm=algorithm)
        return core.object_of(await self._fetch(core.validation(op, inputs, attributes, options=options)))

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
        """Compare `result`, of your own kernel, with the float64 reference of `op`; see `Report`.

        Inputs and result have the same dtype, which may be float64. `output` names what the result is where the
        operation has several outputs, such as `diff_bias`. `explain` tests every hypothesis about the errors, also
        those of a result that passes. `fast` verifies by random projections, by default only if the reference is
        beyond the service's limit of work. `on_progress` is called with `Progress` while the service computes.
        Raises what the call would raise; a result that fails is not an error.
        """
        name = output or core.output_of(op, await self.operations())
        options = core.options(False, deadline, explain=explain, fast=fast)
        request = core.verification(op, {**inputs, name: result}, attributes, options=options)
        return Report(core.object_of(await self._result(request, deadline, on_progress)))

    async def run_graph(
        self,
        graph: Dump,
        inputs: GraphInputs,
        outputs: Sequence[int] | None = None,
        *,
        reference: bool = False,
        reproducible: bool = False,
        algorithm: Algorithm = "direct",
        deadline: float | None = None,
    ) -> dict[int, Array]:
        """Compute a graph dumped by oneDNN Graph, node after node; return tensors by id.

        `graph` is the dump or the path of its file, `inputs` are the tensors that no node computes, and `outputs` the
        ids of those to return: by default those that no node reads. Raises what a call raises; an invalid graph, with
        everything that is wrong with it, is `InvalidParams`.
        """
        request = core.graph_run(
            graph, inputs, outputs, core.options(reference, deadline, reproducible=reproducible, algorithm=algorithm)
        )
        response = await self._send(request, Budget(self._retry, deadline))
        return outputs_of(response.headers.get("content-type", ""), await self._read(response))[1]

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
        """Verify results of your own for tensors of a dumped graph, each by the node that computes it.

        What a node reads from another one is the float64 reference's, so that errors do not add up. Returns a report
        for each tensor id. Raises `ValueError` for an id that no node computes.
        """
        nodes = nodes_of(await self.validate_graph(graph), results)
        between = sorted(set().union(*(node["inputs"].values() for node in nodes.values())) - set(inputs))
        given = {**inputs, **(await self.run_graph(graph, inputs, between, reference=True) if between else {})}
        reports = {}
        for number, node in nodes.items():
            read = {name: given[tensor] for name, tensor in node["inputs"].items() if tensor in given}
            more: Any = {"explain": explain, "fast": fast, "deadline": deadline, "on_progress": on_progress}
            reports[number] = await self.verify(node["op"], read, results[number], attributes_of(node), **more)
        return reports

    async def validate_graph(
        self, graph: Dump, *, reproducible: bool = False, algorithm: Algorithm = "direct"
    ) -> dict[str, Any]:
        """Check a dumped graph; return its inputs, outputs and nodes with resolved attributes and cost."""
        return core.object_of(
            await self._fetch(
                core.graph_validation(graph, core.options(False, None, reproducible=reproducible, algorithm=algorithm))
            )
        )

    async def begin_check(
        self, takes: Mapping[str, Any] | None = None, *, cases: int | None = None, label: str | None = None
    ) -> str:
        """Begin a sealed check, whose cases the service draws and judges; return its id.

        `takes` is what the kernel takes: lists of `ops`, `dtypes`, `ranks`, `data_formats` and `weights_formats`, and
        True or False for `strides`, `dilations`, `pads`, `uneven_pads`, `groups`, `bias` and `empty`. `label` is
        for the signed document. Raises `RateLimited` when too many checks are open.
        """
        given = {"takes": takes or {}, "cases": cases, "label": label}
        return str(core.object_of(await self._fetch(sealed.beginning(given))).get("check"))

    async def next_case(self, check: str, *, seed: bool = False) -> SealedCase | None:
        """Return the case of a sealed check that is to be answered; None after the last.

        With `seed` the service sends no tensors: the inputs are generated here. Don't show the seed to the kernel.
        """
        response = await self._send(sealed.next_request(check, seed=seed), Budget(self._retry))
        return sealed.case_of(response.headers.get("content-type", ""), await self._read(response))

    async def submit_result(self, case: SealedCase, result: Tensor) -> Report:
        """Submit the kernel's result of a sealed case; a result that fails is not an error.

        Raises `InvalidParams` for another dtype or shape, and with the type `late` or `answered` in its errors.
        """
        return Report(core.object_of(await self._fetch(sealed.submission(case, result))))

    async def submit_outcome(self, case: SealedCase, outcome: str) -> None:
        """Say that the kernel has no result of a sealed case: it is `unsupported`, or the kernel `failed`."""
        await self._fetch(sealed.post("/submit", {"case": case.number, "outcome": outcome}, case.check))

    async def finish_check(self, check: str) -> dict[str, Any]:
        """End a sealed check; return its signed document."""
        return core.object_of(await self._fetch(sealed.post("/finish", {}, check)))

    async def drop_check(self, check: str) -> None:
        """Have the service forget a sealed check."""
        await self._fetch(sealed.deletion(check))

    async def verify_signature(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """Ask the service whether it signed the document of a sealed check; return `valid`, `reason` and `key_id`."""
        return core.object_of(await self._fetch(sealed.post("/verify-signature", document)))

    async def operations(self) -> list[dict[str, Any]]:
        """List the operations of the service."""
        return core.operations_of(await self._fetch(core.operations()))

    async def describe(self, op: str) -> dict[str, Any]:
        """Return the table of `op`: attributes, inputs, outputs and layouts, as data."""
        return core.object_of(await self._fetch(core.description(op)))

    async def health(self) -> Health:
        """Return whether the service accepts calls; raises `ConnectFailed` when it can't be reached."""
        try:
            return core.health_of(await self._fetch(core.readiness(), ONCE))
        except (Overloaded, ShuttingDown) as error:
            return core.health_of(error)

    async def wait_until_ready(
        self,
        timeout: float = 60.0,  # noqa: ASYNC109 - both clients have it
        *,
        on_poll: OnPoll | None = None,
    ) -> Health:
        """Wait until the service accepts calls; raises `TimedOut` when it does not within `timeout` seconds.

        Until then `on_poll` is called with each reply of the service, or None while there is no connection.
        """
        end, seen = time.monotonic() + timeout, None
        while True:
            try:
                health = await self.health()
            except ConvgradError:
                health = None
            if health is not None and health.ready:
                return health
            if on_poll is not None:
                on_poll(health)
            seen = health or seen
            if time.monotonic() + _READY_POLL > end:
                raise core.not_ready(timeout, seen)
            await self._network.sleep(_READY_POLL)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._network.aclose()
        if self._memory is not None:
            self._memory.close()

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
        build = partial(core.call, op, inputs, attributes, options=options, whole=whole, memory=self._memory)
        return build() if self._memory is None else await self._network.in_thread(build)

    async def _result(self, request: Request, deadline: float | None, on_progress: OnProgress | None = None) -> Any:
        """Send a request and return the result at the end of its reply; a reply that breaks off is retried."""
        budget = Budget(self._retry, deadline)
        while True:
            try:
                async with self._opened(request, budget) as stream:
                    if on_progress is not None:
                        async for event in stream:
                            if isinstance(event, Progress):
                                on_progress(event)
                    return await stream.details()
            except BrokenStream as error:
                await self._network.sleep(budget.wait_after(error))

    @asynccontextmanager
    async def _opened(self, request: Request, budget: Budget) -> AsyncIterator[AsyncStream]:
        response = await self._send(request, budget)
        try:
            decoder = core.decoder_of(response.headers, request)
            yield AsyncStream(self._network.chunks(response), decoder, budget)
        finally:
            await self._network.close(response)

    async def _fetch(self, request: Request, retry: Retry | None = None) -> Any:
        return core.json_of(await self._read(await self._send(request, Budget(retry or self._retry))))

    async def _read(self, response: httpx.Response) -> bytes:
        """Return the body of a response, and close it."""
        with translated():
            try:
                return await self._network.read(response)
            finally:
                await self._network.close(response)

    async def _send(self, request: Request, budget: Budget) -> httpx.Response:
        """Send a request, retrying as the budget allows; return the response before its body is read."""
        while True:
            try:
                return await self._send_once(request, budget)
            except ConvgradError as error:
                if isinstance(error, BrokenStream) and not request.repeatable:
                    raise
                await self._network.sleep(budget.wait_after(error))

    async def _send_once(self, request: Request, budget: Budget) -> httpx.Response:
        if self._memory is not None:
            self._memory.check()
        try:
            with translated(self._url):
                response = await self._network.send(self._build(request, budget))
            if response.is_success:
                return response
            raise core.error_of(response.status_code, response.headers, await self._read(response))
        except TransportError as error:
            if self._memory is not None:
                self._memory.check(error)
            raise

    def _build(self, request: Request, budget: Budget) -> httpx.Request:
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


class _Content(httpx.SyncByteStream, httpx.AsyncByteStream):
    """The body of a request, for either client of httpx."""

    def __init__(self, pieces: Callable[[], Iterable[Bytes]]) -> None:
        self._pieces = pieces

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._pieces())  # type: ignore[arg-type] # sockets accept views too

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self:
            yield piece
