"""The blocking client: network and waiting; `_core` builds its requests and parses its replies."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import httpx

from convgrad import _core as core
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
from convgrad._errors import BrokenStream, ConvgradError, Overloaded, ShuttingDown
from convgrad._events import Array, Health, Progress, Result
from convgrad._graphs import Dump, GraphInputs, attributes_of, nodes_of, outputs_of
from convgrad._messages import Messages
from convgrad._operations import Operations
from convgrad._report import Report
from convgrad._retry import Budget, Retry
from convgrad._stream import Stream
from convgrad._tensors import Tensor
from convgrad._transport import translated

__all__ = ["Client"]


class Client(Base, Operations[Array]):
    """Compute convolution gradients on a convgrad service.

    `url` is the service's address, by default that in the variable CONVGRAD_URL, or this machine; with the Unix socket
    `uds` its host may be any name. `api_key`, by default CONVGRAD_API_KEY, is sent as a Bearer token. `timeout` is
    httpx's, in seconds. `retry` says how often to retry; None for a single attempt. `transport` replaces the network,
    for tests. Tensors may be arrays of any strides and byte order, and what NumPy or DLPack can read, as PyTorch's;
    results are writeable arrays. A client is thread-safe; use it in `with`, or close it.

    For HTTPS `verify` is whom to trust: a PEM file of authorities, by default CONVGRAD_CACERT, or those of httpx; a TLS
    context; or False to check nothing. `cert` is the client's own certificate: a PEM file, or one with the certificate
    and one with its key, by default CONVGRAD_CERT and CONVGRAD_CERT_KEY; a third member is the key's password.

    Raises `ValueError` for a URL that is not HTTP, for files of certificates that can't be used, and for a key that a
    header can't contain, without showing the key. Every failure of a call is a `ConvgradError`, but for these:
    `OSError` for files that can't be read, `ValueError` for a graph's file that is not JSON and a tensor that no node
    computes, `TypeError` for arguments of the wrong type, and `RuntimeError` for a client that is closed.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        api_key: str | None = None,
        timeout: Timeout = DEFAULT_TIMEOUT,
        retry: Retry | None = Retry(),  # noqa: B008 - frozen
        transport: httpx.BaseTransport | None = None,
        uds: str | os.PathLike[str] | None = None,
        verify: Trust | None = None,
        cert: Certificate | None = None,
    ) -> None:
        super().__init__(url, api_key, timeout, retry)
        trust = tls_context(verify, cert)
        if uds is not None and transport is None:
            transport = httpx.HTTPTransport(uds=os.fspath(uds), verify=trust)
        self._http: httpx.Client = httpx.Client(transport=transport, verify=trust, **self._settings())

    def run(
        self,
        op: str,
        inputs: Inputs,
        attributes: Mapping[str, Any] | None = None,
        *,
        reference: bool = False,
        deadline: float | None = None,
    ) -> Array:
        """Compute `op`, under any of its names, and return its output.

        `inputs` are arrays or paths of `.npy` files by name; `attributes` are those on the operation's page.
        `reference` selects the slow kernel that accumulates in float64, and alone takes tensors of that dtype. After
        `deadline` seconds the service stops and the call raises `DeadlineExceeded`. If the reply breaks off, the call
        is retried.
        """
        request = core.call(
            op, inputs, attributes, options=options(reference, deadline), whole=True, sharing=self._sharing
        )
        return self._result(request, deadline).array

    def run_detailed(
        self,
        op: str,
        inputs: Inputs,
        attributes: Mapping[str, Any] | None = None,
        *,
        outputs: Sequence[str] | None = None,
        reference: bool = False,
        deadline: float | None = None,
    ) -> Result:
        """Compute `op` like `run`, and return its outputs, resolved attributes and statistics.

        `outputs` are the names of those to compute in the one call, such as `diff_weights`, `diff_bias` and `diff_src`
        of a weight gradient; by default the operation's own one.
        """
        request = core.call(
            op, inputs, attributes, options=options(reference, deadline, outputs), sharing=self._sharing
        )
        return self._result(request, deadline)

    @contextmanager
    def stream(
        self,
        op: str,
        inputs: Inputs,
        attributes: Mapping[str, Any] | None = None,
        *,
        outputs: Sequence[str] | None = None,
        reference: bool = False,
        deadline: float | None = None,
        on_upload: OnUpload | None = None,
    ) -> Iterator[Stream]:
        """Compute `op` and stream its tiles as they become final; for `with`.

        Of several `outputs` the tiles come one output after another. Nothing is retried once the reply has begun.
        `on_upload` is called with the bytes sent so far and in total while the request is sent.
        """
        request = core.call(
            op, inputs, attributes, options=options(reference, deadline, outputs), sharing=self._sharing
        )
        request = core.watched(request, on_upload)
        with self._opened(request, Budget(self._retry, deadline)) as stream:
            yield stream

    def validate(
        self,
        op: str,
        inputs: Inputs,
        attributes: Mapping[str, Any] | None = None,
        *,
        outputs: Sequence[str] | None = None,
        reference: bool = False,
    ) -> dict[str, Any]:
        """Check a call without sending its tensors; return its resolved attributes, output shapes, plan and cost.

        `inputs` are as for `run`, or `{"dtype": .., "shape": ..}`. Raises what the call would raise.
        """
        return core.object_of(
            self._fetch(core.validation(op, inputs, attributes, options=options(reference, None, outputs)))
        )

    def verify(
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
        those of a result that passes. `fast` verifies by random projections, by default only where the
        reference is beyond the service's limit of work. `on_progress` gets `Progress` while the service computes.
        Raises what the call would raise; a result that fails is not an error.
        """
        name = output or core.output_of(op, self.operations())
        request = core.verification(
            op, {**inputs, name: result}, attributes, options=options(False, deadline, explain=explain, fast=fast)
        )
        return Report(core.object_of(self._response(request, deadline, on_progress)))

    def run_graph(
        self,
        graph: Dump,
        inputs: GraphInputs,
        outputs: Sequence[int] | None = None,
        *,
        reference: bool = False,
        deadline: float | None = None,
    ) -> dict[int, Array]:
        """Compute a graph dumped by oneDNN Graph, node after node; return tensors by id.

        `graph` is the dump or the path of its file, `inputs` are the tensors that no node computes, and `outputs` the
        ids of those to return: by default those that no node reads. Raises what a call raises; an invalid graph, with
        everything that is wrong with it, is `InvalidParams`.
        """
        request = core.graph_run(graph, inputs, outputs, options(reference, deadline))
        response = self._send(request, Budget(self._retry, deadline))
        with translated():
            try:
                return outputs_of(response.headers.get("content-type", ""), response.read())[1]
            finally:
                response.close()

    def verify_graph(
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
        nodes = nodes_of(self.validate_graph(graph), results)
        between = sorted(set().union(*(node["inputs"].values() for node in nodes.values())) - set(inputs))
        given = {**inputs, **(self.run_graph(graph, inputs, between, reference=True) if between else {})}
        reports = {}
        for number, node in nodes.items():
            read = {name: given[tensor] for name, tensor in node["inputs"].items() if tensor in given}
            more: Any = {"explain": explain, "fast": fast, "deadline": deadline, "on_progress": on_progress}
            reports[number] = self.verify(node["op"], read, results[number], attributes_of(node), **more)
        return reports

    def validate_graph(self, graph: Dump) -> dict[str, Any]:
        """Check a dumped graph; return its inputs, outputs and nodes with resolved attributes and cost."""
        return core.object_of(self._fetch(core.graph_validation(graph)))

    def operations(self) -> list[dict[str, Any]]:
        """List the operations of the service."""
        return core.operations_of(self._fetch(core.operations()))

    def describe(self, op: str) -> dict[str, Any]:
        """Return the table of `op`: attributes, inputs, outputs and layouts, as data."""
        return core.object_of(self._fetch(core.description(op)))

    def health(self) -> Health:
        """Ask whether the service accepts calls; raises `ConnectFailed` when it can't be reached."""
        try:
            return core.health_of(self._fetch(core.readiness(), ONCE))
        except (Overloaded, ShuttingDown) as error:
            return core.health_of(error)

    def wait_until_ready(self, timeout: float = 60.0, *, on_poll: OnPoll | None = None) -> Health:
        """Wait until the service accepts calls; raises `TimedOut` when it does not within `timeout` seconds.

        `on_poll` gets what the service answers until then, to show its progress; None while there is no connection.
        """
        end, seen = time.monotonic() + timeout, None
        while True:
            if (health := self._health_or_none()) is not None and health.ready:
                return health
            if on_poll is not None:
                on_poll(health)
            seen = health or seen
            if time.monotonic() + READY_POLL > end:
                raise core.not_ready(timeout, seen)
            time.sleep(READY_POLL)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _health_or_none(self) -> Health | None:
        try:
            return self.health()
        except ConvgradError:
            return None

    def _result(self, request: Request, deadline: float | None) -> Result:
        budget = Budget(self._retry, deadline)
        while True:
            try:
                with self._opened(request, budget) as stream:
                    return stream.details()
            except BrokenStream as error:
                time.sleep(budget.wait_after(error))

    @contextmanager
    def _opened(self, request: Request, budget: Budget) -> Iterator[Stream]:
        response = self._send(request, budget)
        try:
            yield Stream(response, core.assembly_of(response.headers, request.body), budget)
        finally:
            response.close()

    def _response(self, request: Request, deadline: float | None, on_progress: OnProgress | None) -> Any:
        """Send a request whose reply is events; return the result."""
        budget = Budget(self._retry, deadline)
        while True:
            response = self._send(request, budget)
            try:
                messages = Messages(response.headers.get("content-type", ""))
                for event in Stream(response, messages, budget):
                    if on_progress is not None and isinstance(event, Progress):
                        on_progress(event)
                return messages.close()
            except BrokenStream as error:
                time.sleep(budget.wait_after(error))
            finally:
                response.close()

    def _fetch(self, request: Request, retry: Retry | None = None) -> Any:
        response = self._send(request, Budget(retry or self._retry))
        with translated():
            try:
                return core.json_of(response.read())
            finally:
                response.close()

    def _send(self, request: Request, budget: Budget) -> httpx.Response:
        """Send a request, retrying as the budget allows; return the response before its body is read."""
        while True:
            try:
                return self._send_once(request, budget)
            except ConvgradError as error:
                time.sleep(budget.wait_after(error))

    def _send_once(self, request: Request, budget: Budget) -> httpx.Response:
        content = None if request.body is None else iter(request.body.pieces())
        with translated(self._url):
            response = self._http.send(self._build(request, budget, content), stream=True)
            if response.is_success:
                return response
            try:
                raise core.error_of(response.status_code, response.headers, response.read())
            finally:
                response.close()
