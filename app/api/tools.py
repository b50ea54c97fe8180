"""The tools of `/mcp` over a service: the session manager of the package mcp, over the methods of `/rpc`.

Hosts, origins and keys are checked before, as on every page. Neither revision has sessions here: each request is
answered on its own, and closing its stream stops its work.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from inspect import isawaitable
from typing import Any

from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.server.transport_security import TransportSecuritySettings
from starlette.requests import Request
from starlette.types import Send

from app.api.answer import answer
from app.api.rpc.methods import METHODS, TaskMethod
from app.calls.service import Service
from app.calls.tasks import Task
from app.calls.work import Progress, Result, Work
from app.http.exchange import Exchange, exchange_of
from app.intake.elements import Elements, Sink
from app.intake.lease import Lease
from app.intake.requests import RequestObject
from app.intake.tensors import Tensor
from app.pool.buffers import Segment
from app.threads import in_thread_if
from convgrad._dtypes import dtype
from convgrad._errors import Forbidden
from convgrad._mcp.records import seeded, seeded_bytes
from convgrad._mcp.server import make_server
from convgrad._mcp.tools import OnProgress
from schemas.tables import find_operation

__all__ = ["ServiceCalls", "session_manager"]

# Bytes that a seed makes in less than a millisecond.
_INLINE = 1 << 18


def session_manager(service: Service) -> StreamableHTTPSessionManager:
    """Return what answers the messages to a service, while its `run` is entered."""
    checked_before = TransportSecuritySettings(enable_dns_rebinding_protection=False)
    server = make_server(ServiceCalls(service))
    server.streamable_http_app(stateless_http=True, transport_security=checked_before)
    return server.session_manager


class ServiceCalls:
    """Calls of the requests to a service: the methods of `/rpc`, with handles and seeds in place of tensors."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def call(self, method: str, params: dict[str, Any], request: Request | None, on_progress: OnProgress) -> Any:
        """Return the result of a method; raises its error, which the request's metrics count."""
        found = METHODS.get(method)
        if found is None:  # `compute` with a name that is no operation
            find_operation(method)
        if not isinstance(found, TaskMethod):
            return await _plain(found, params)
        assert request is not None
        exchange, reply = exchange_of(request.scope), dict[str, Any]()

        async def encode(work: Work, _: Send) -> None:
            async for event in work.events():
                if isinstance(event, Progress):
                    on_progress(event.done, event.total)
            reply.update(await self._reply(method, work.result(), exchange.context.tenant))

        try:
            task, document = found.read(self._service, exchange.context, params)
            await answer(exchange, task, partial(self._decode, document), encode)
        except Exception as caught:  # noqa: BLE001 - every error is a result or an internal one
            raise exchange.context.fail(caught).with_traceback(None) from None
        return reply

    async def _decode(self, document: Mapping[str, Any], exchange: Exchange, task: Task, lease: Lease) -> RequestObject:
        given = document.get("inputs") or {}
        inputs = {name: await self._tensor(value, lease, exchange.context.tenant) for name, value in given.items()}
        return await (await task.read({**document, "inputs": inputs} if inputs else document)).read()

    async def _tensor(self, given: Any, lease: Lease, owner: str) -> Any:
        """Return a tensor as the requests of all APIs have it; one that a seed makes counts in the memory budget."""
        if not isinstance(given, Mapping) or not given.keys() & {"handle", "path", "seed"}:
            return given
        if "path" in given:
            raise Forbidden("a service reads no files: upload the tensor to /v1/tensors and give its handle")
        if "seed" in given:
            await lease.count(size := seeded_bytes(given))
            made = await in_thread_if(size > _INLINE, seeded, given)
            return Tensor(dtype(given["dtype"]), made.shape, _Made(made.tobytes()))
        kept = self._service.kept_tensors.find(given["handle"], owner)
        assert isinstance(kept.memory, Segment)
        elements = Sink(lease, kept.nbytes)
        elements.segment = lease.share(kept.memory)
        return Tensor(dtype(kept.spec.dtype), kept.spec.shape, elements)

    async def _reply(self, method: str, result: Result, owner: str) -> dict[str, Any]:
        """Return a result as JSON, its tensors kept under handles."""
        reply, kept = dict(result.document), self._service.kept_tensors
        if result.outputs:
            reply[result.member] = {each.name: await kept.keep_copy(each, owner) for each in result.outputs}
        if method == "check.finish":
            reply["record"] = f"POST /v1/checks/{reply['check']}/finish"
        return reply


class _Made(Elements):
    """The elements of a tensor that was made from a seed."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def content(self) -> bytes:
        """Return all bytes."""
        return self._data


async def _plain(method: Any, params: dict[str, Any]) -> Any:
    """Return the value of a method without a task, which may be its JSON text."""
    value = method(params)
    value = await value if isawaitable(value) else value
    return json.loads(value) if isinstance(value, bytes) else value
