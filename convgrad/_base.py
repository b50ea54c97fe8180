"""The methods of all clients, as coroutines over a `Backend`."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol

from convgrad import _core as core
from convgrad._core import Algorithm
from convgrad._errors import ConvgradError
from convgrad._events import Array, Health, Result
from convgrad._graphs import Dump, GraphInputs, attributes_of, nodes_of
from convgrad._jobs import AsyncJob
from convgrad._operations import Operations
from convgrad._report import Report
from convgrad._requests import (
    CheckHealth,
    CheckMethod,
    Compute,
    Describe,
    GetJob,
    GetTolerance,
    Inputs,
    ListOperations,
    NextCase,
    OnUpload,
    Request,
    RunGraph,
    SubmitJob,
    SubmitResult,
    Validate,
    ValidateGraph,
    Verify,
)
from convgrad._sealed import SealedCase
from convgrad._stream import AsyncStream, OnProgress
from convgrad._tensors import Tensor
from convgrad._tolerance import Tolerance

__all__ = ["Backend", "BaseClient", "OnPoll"]

_READY_POLL = 0.1

OnPoll = Callable[[Health | None], None]
"""Called with each reply of a service that is not ready yet; None while there is no connection."""


class Backend(Protocol):
    """What answers requests: a service (`_http.py`) or this process (`_local.py`). A blocking one never suspends."""

    async def fetch(self, request: Request, deadline: float | None = None) -> Any:
        """Return what the request asks for."""

    async def result(
        self,
        request: Compute | Verify | GetTolerance,
        deadline: float | None,
        on_progress: OnProgress | None = None,
    ) -> Any:
        """Return the `Result` of a computation, or the report of a verification."""

    def stream(self, request: Compute, deadline: float | None) -> AbstractAsyncContextManager[AsyncStream]:
        """Compute, and stream what becomes final."""

    async def sleep(self, seconds: float) -> None:
        """Wait."""

    async def aclose(self) -> None:
        """Free what the backend holds."""


class BaseClient(Operations[Coroutine[Any, Any, Array]]):
    """The methods of all clients: the async ones inherit them, the others run them on a backend that blocks."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

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
        options = core.options(reference, deadline, reproducible=reproducible, algorithm=algorithm)
        request = Compute(op, inputs, attributes or {}, options, whole=True)
        result: Result = await self._backend.result(request, deadline)
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
        options = core.options(reference, deadline, outputs, reproducible=reproducible, algorithm=algorithm)
        request = Compute(op, inputs, attributes or {}, options, whole=True)
        result: Result = await self._backend.result(request, deadline)
        return dict(result.outputs)

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
        options = core.options(reference, deadline, outputs, reproducible=reproducible, algorithm=algorithm)
        request = Compute(op, inputs, attributes or {}, options)
        result: Result = await self._backend.result(request, deadline)
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
        options = core.options(reference, deadline, outputs, reproducible=reproducible, algorithm=algorithm)
        request = Compute(op, inputs, attributes or {}, options, on_upload=on_upload)
        async with self._backend.stream(request, deadline) as stream:
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
        found: dict[str, Any] = await self._backend.fetch(Validate(op, inputs, attributes or {}, options))
        return found

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
        arithmetic: Mapping[str, Any] | None = None,
        deadline: float | None = None,
        on_progress: OnProgress | None = None,
    ) -> Report:
        """Compare `result`, of your own kernel, with the float64 reference of `op`; see `Report`.

        Inputs and result have the same dtype, which may be float64. `output` names what the result is where the
        operation has several outputs, such as `diff_bias`. `explain` tests every hypothesis about the errors, also
        those of a result that passes. `fast` verifies by random projections, by default only if the reference is
        beyond the service's limit of work. `arithmetic` is what the kernel says of itself, such as
        ``{"products": "tf32"}`` or ``{"algorithm": "winograd F(4, 3)"}``; by default products and sums are in f32.
        `on_progress` is called with `Progress` while the service computes. Raises what the call would raise; a result
        that fails is not an error.
        """
        name = output or core.output_of(op, await self.operations())
        options = core.options(False, deadline, explain=explain, fast=fast, arithmetic=arithmetic)
        request = Verify(op, {**inputs, name: result}, attributes or {}, options)
        return Report(core.object_of(await self._backend.result(request, deadline, on_progress)))

    async def tolerance(
        self,
        op: str,
        inputs: Inputs,
        attributes: Mapping[str, Any] | None = None,
        *,
        output: str | None = None,
        arithmetic: Mapping[str, Any] | None = None,
        deadline: float | None = None,
        on_progress: OnProgress | None = None,
    ) -> Tolerance:
        """Return how far honest results of `op` may be from its float64 reference, for each element and as one pair.

        `inputs` are as for `run`, float64 too, and `output` and `arithmetic` as for `verify`; see `Tolerance`. Data
        with NaN or Inf are no error. Raises what the call would raise, and `TooLarge` beyond the service's limit of
        work: the whole reference is computed.
        """
        options = core.options(False, deadline, None if output is None else [output], arithmetic=arithmetic)
        request = GetTolerance(op, inputs, attributes or {}, options)
        return Tolerance.of(core.object_of(await self._backend.result(request, deadline, on_progress)))

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
        options = core.options(reference, deadline, reproducible=reproducible, algorithm=algorithm)
        found: dict[int, Array] = await self._backend.fetch(RunGraph(graph, inputs, outputs, options), deadline)
        return found

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
        options = core.options(False, None, reproducible=reproducible, algorithm=algorithm)
        found: dict[str, Any] = await self._backend.fetch(ValidateGraph(graph, options))
        return found

    async def submit(
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
        idempotency_key: str | None = None,
    ) -> AsyncJob:
        """Have the service keep the call and compute it, whether or not anybody waits; return the job.

        The arguments are those of `run_detailed`; `deadline` counts from when the job begins to run. A request with the
        `idempotency_key` of an earlier one is the same job. Raises what the call would raise before it is queued,
        `Overloaded` if the service has no room for the job, `InvalidParams` if the key was used for another request,
        and `NotFound` for a service without jobs.
        """
        options = core.options(reference, deadline, outputs, reproducible=reproducible, algorithm=algorithm)
        return await self._submit(Compute(op, inputs, attributes or {}, options), idempotency_key)

    async def submit_verification(
        self,
        op: str,
        inputs: Inputs,
        result: Tensor,
        attributes: Mapping[str, Any] | None = None,
        *,
        output: str | None = None,
        fast: bool | None = None,
        arithmetic: Mapping[str, Any] | None = None,
        deadline: float | None = None,
        idempotency_key: str | None = None,
    ) -> AsyncJob:
        """Have the service keep a verification, with the arguments of `verify`; return the job, as `submit` does."""
        name = output or core.output_of(op, await self.operations())
        options = core.options(False, deadline, fast=fast, arithmetic=arithmetic)
        return await self._submit(Verify(op, {**inputs, name: result}, attributes or {}, options), idempotency_key)

    async def submit_graph(
        self,
        graph: Dump,
        inputs: GraphInputs,
        outputs: Sequence[int] | None = None,
        *,
        reference: bool = False,
        reproducible: bool = False,
        algorithm: Algorithm = "direct",
        deadline: float | None = None,
        idempotency_key: str | None = None,
    ) -> AsyncJob:
        """Have the service keep a graph, with the arguments of `run_graph`; return the job, as `submit` does."""
        options = core.options(reference, deadline, reproducible=reproducible, algorithm=algorithm)
        return await self._submit(RunGraph(graph, inputs, outputs, options), idempotency_key)

    async def _submit(self, request: Compute | Verify | RunGraph, key: str | None) -> AsyncJob:
        return AsyncJob(self._backend, await self._backend.fetch(SubmitJob(request, key or secrets.token_hex(16))))

    async def job(self, job: str) -> AsyncJob:
        """Return the job with an id; raises `NotFound` if there is none, or it is another key's."""
        return AsyncJob(self._backend, await self._backend.fetch(GetJob("get", job)))

    async def jobs(self) -> list[dict[str, Any]]:
        """Return the states of the jobs of this key, or without keys of this address, the newest first."""
        listed = core.object_of(await self._backend.fetch(GetJob("list"))).get("jobs")
        return core.objects_of(listed)

    async def begin_check(
        self,
        takes: Mapping[str, Any] | None = None,
        *,
        cases: int | None = None,
        label: str | None = None,
        digest: str | None = None,
        arithmetic: Mapping[str, Any] | None = None,
    ) -> str:
        """Begin a sealed check, whose cases the service draws and judges; return its id.

        `takes` is what the kernel takes: lists of `ops`, `dtypes`, `ranks`, `data_formats` and `weights_formats`, and
        True or False for `strides`, `dilations`, `pads`, `uneven_pads`, `groups`, `bias` and `empty`. `label` and
        `digest`, ``sha256:`` and the SHA-256 of the kernel, are for the signed document. `arithmetic` is what the
        kernel says of itself, as in `verify`: each case is judged by the members that mean something for it, and the
        document has them. With `convgrad.local()` the check is a self-test. Raises `InvalidParams` with every broken
        rule, and `RateLimited` or `Overloaded` when too many checks are open.
        """
        given = {"takes": takes or {}, "cases": cases, "label": label, "digest": digest, "arithmetic": arithmetic}
        return str((await self._backend.fetch(CheckMethod("check.begin", given))).get("check"))

    async def next_case(self, check: str, *, seed: bool = False) -> SealedCase | None:
        """Return the case of a sealed check that is to be answered; None after the last.

        With `seed` the service sends no tensors: the inputs are generated here. Don't show the seed to the kernel.
        Raises `NotFound` for an unknown check, `Forbidden` for that of another key, `InvalidParams` for a finished one,
        and `RateLimited` when the inputs need too much memory.
        """
        found: SealedCase | None = await self._backend.fetch(NextCase(check, seed))
        return found

    async def submit_result(self, case: SealedCase, result: Tensor) -> Report:
        """Submit the kernel's result of a sealed case; a result that fails is not an error.

        Raises `InvalidParams` for another dtype or shape, and with the type `late` or `answered` in its errors;
        `NotFound` and `Forbidden` as `next_case` does.
        """
        request = SubmitResult(case.check, case.number, case.output, result)
        return Report(await self._backend.fetch(request))

    async def submit_outcome(self, case: SealedCase, outcome: str) -> None:
        """Say that the kernel has no result of a sealed case: it is `unsupported`, or the kernel `failed`.

        Raises what `submit_result` does.
        """
        given = {"check": case.check, "case": case.number, "outcome": outcome}
        await self._backend.fetch(CheckMethod("check.submit", given))

    async def finish_check(self, check: str) -> dict[str, Any]:
        """End a sealed check; return its signed document. Raises `NotFound` and `Forbidden` as `next_case` does."""
        found: dict[str, Any] = await self._backend.fetch(CheckMethod("check.finish", {"check": check}))
        return found

    async def drop_check(self, check: str) -> None:
        """Have the service forget a sealed check. Raises `NotFound` and `Forbidden` as `next_case` does."""
        await self._backend.fetch(CheckMethod("check.drop", {"check": check}))

    async def check_key(self) -> dict[str, str]:
        """Return the public key that signs the documents of checks: `algorithm`, `key_id`, `public_key` in base64."""
        found: dict[str, str] = await self._backend.fetch(CheckMethod("check.key"))
        return found

    async def verify_signature(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """Ask the service whether it signed the document of a sealed check; return `valid`, `reason` and `key_id`.

        Raises `InvalidParams` for what is no JSON object.
        """
        found: dict[str, Any] = await self._backend.fetch(CheckMethod("check.verify_signature", {"document": document}))
        return found

    async def operations(self) -> list[dict[str, Any]]:
        """List the operations of the service."""
        found: list[dict[str, Any]] = await self._backend.fetch(ListOperations())
        return found

    async def describe(self, op: str) -> dict[str, Any]:
        """Return the table of `op`: attributes, inputs, outputs and layouts, as data."""
        found: dict[str, Any] = await self._backend.fetch(Describe(op))
        return found

    async def health(self) -> Health:
        """Return whether the service accepts calls; raises `ConnectFailed` when it can't be reached."""
        found: Health = await self._backend.fetch(CheckHealth())
        return found

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
            await self._backend.sleep(_READY_POLL)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._backend.aclose()
