"""The JSON-RPC methods: every operation under every name, and `ops.*` and `rpc.discover` about them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from app.calls.call import Call
from app.calls.service import Service
from app.intake.requests import read_call
from app.intake.sinks import Lease
from app.intake.tensors import settle
from app.replies.body import dump
from app.telemetry.context import RequestContext
from convgrad._errors import ConvgradError, TooLarge, UnknownOperation
from schemas.describe import describe, list_operations
from schemas.dumps import is_dump
from schemas.openrpc import openrpc_document
from schemas.problems import invalid_params, problem
from schemas.rpc import CALL_PARAMS, bind_params
from schemas.tables import CalledOperation, find_operation, operation_names

__all__ = ["METHODS", "Method", "Params", "Turn"]

Params = Mapping[str, Any] | Sequence[Any] | None


# A batch may ask some thousand times for a document of tens of kilobytes: all documents of one answer are bounded.
_DOCUMENTS = 4 << 20


class Documents:
    """Count the bytes of the documents in one answer."""

    def __init__(self) -> None:
        self._left = _DOCUMENTS

    def add(self, count: int) -> None:
        """Count one more; raises `TooLarge` when they are too many."""
        if count > self._left:
            raise TooLarge(
                f"the documents in the answer to one batch may have {_DOCUMENTS} bytes: ask for the rest in another",
                data={"reason": "batch", "limit": _DOCUMENTS},
            )
        self._left -= count


@dataclass(frozen=True, slots=True)
class Turn:
    """Hold what the methods of one HTTP request share.

    `refusal` is why calls are not taken now: their tensors were passed over while the body was read, so that
    the refusal can be answered under the right id.
    """

    service: Service
    lease: Lease
    context: RequestContext
    refusal: ConvgradError | None = None
    documents: Documents = field(default_factory=Documents)


Method = Callable[[Params, Turn], AbstractAsyncContextManager[Any]]
"""Open a method's outcome: plain values, JSON text in bytes, or a `Call` to run while it is open."""


def _plain(answer: Callable[..., Any], *names: str) -> Method:
    """Make a method of a function whose parameters, all required, are given by name or by position."""

    @asynccontextmanager
    async def method(params: Params, turn: Turn) -> AsyncIterator[Any]:  # noqa: ARG001 - it needs no service
        yield answer(**bind_params(params, names, required=names))

    return method


@cache
def _discover() -> bytes:
    return dump(openrpc_document())


def _describe(op: object) -> dict[str, Any]:
    return describe(_called(op).called_as)


@asynccontextmanager
async def _validate(params: Params, turn: Turn) -> AsyncIterator[dict[str, Any]]:
    if turn.refusal is not None:
        raise turn.refusal.with_traceback(None)
    if is_dump(params):
        assert isinstance(params, Mapping)
        given: Any = {name: value for name, value in params.items() if name != "op"}
        called = _called(params.get("op", _kind(params)))
    else:
        given = bind_params(params, ("op", *CALL_PARAMS), required=("op",))
        called = _called(given.pop("op"))
    request = read_call(called, given, turn.lease, need_data=False)
    yield await turn.service.validate(called.called_as, request.attributes, request.metas, request.options)


def _operation(called: CalledOperation) -> Method:
    @asynccontextmanager
    async def method(params: Params, turn: Turn) -> AsyncIterator[Call]:
        if turn.refusal is not None:
            raise turn.refusal.with_traceback(None)
        given = params if is_dump(params) else bind_params(params, CALL_PARAMS)
        request = read_call(called, given, turn.lease)
        prepared = await turn.service.prepare(
            called.called_as, request.attributes, request.metas, request.options, started=turn.context.started
        )
        with turn.context.timings.measure("decode"):
            tensors = await settle(request.inputs, turn.lease)
        async with turn.service.call(prepared, tensors, turn.lease, timings=turn.context.timings) as call:
            yield call

    return method


def _called(op: object) -> CalledOperation:
    try:
        return find_operation(op)
    except UnknownOperation as error:
        raise invalid_params("params", [problem(["op"], error.message, "unknown_operation")]) from None


def _kind(dump: Mapping[str, Any]) -> object:
    graph = dump.get("graph")
    only = graph[0] if isinstance(graph, list) and len(graph) == 1 else dump
    return only.get("kind") if isinstance(only, Mapping) else None


METHODS: dict[str, Method] = {
    **{name: _operation(find_operation(name)) for name in operation_names()},
    "ops.list": _plain(list_operations),
    "ops.describe": _plain(_describe, "op"),
    "ops.validate": _validate,
    "rpc.discover": _plain(_discover),
}
"""Every method by its name."""
