"""One inference of the `/v2` API, from its body to its reply."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import cast

from starlette.types import Send

from app.api.answer import answer, check_media_type
from app.api.oip.body import HEAD_LENGTH, InferenceBody, decompressed
from app.api.oip.regions import Registry
from app.api.oip.reply import send_inference
from app.api.oip.statistics import Statistics
from app.calls.call import Call
from app.calls.service import Service
from app.calls.tasks import Compute, Task
from app.calls.work import Work, finish
from app.http.exchange import Exchange
from app.intake.body import media_type
from app.intake.coding import decompressor_of
from app.intake.lease import Lease
from app.intake.requests import RequestObject
from app.pool.buffers import Memory
from app.replies import frames
from app.replies.accept import choose
from app.replies.coding import choose_coding
from convgrad._errors import PROBLEM_JSON, InvalidParams, InvalidRequest
from engine.planning import Prepared, tensor_bytes
from schemas.broken_rules import broken_rule
from schemas.tables import CalledOperation

__all__ = ["REPLY_TYPES", "OipState", "infer"]

# The last one is curl's default, which the protocol's own examples rely on.
_REQUEST_TYPES = ("application/octet-stream", "application/json", "", "application/x-www-form-urlencoded")
# Whether a reply is JSON or binary depends on the requested outputs; problem objects are for errors.
REPLY_TYPES = ("application/json", "application/octet-stream", frames.MEDIA_TYPE, PROBLEM_JSON)


class OipState:
    """The state of the API between requests."""

    def __init__(self, *, shared_memory: bool) -> None:
        self.statistics = Statistics()
        self.regions = Registry(enabled=shared_memory)


async def infer(exchange: Exchange, called: CalledOperation, service: Service, state: OipState) -> None:
    """Compute, reply, and update the statistics."""
    context, task = exchange.context, _Inference(service, called, state, exchange)
    try:
        await answer(exchange, task, task.decode, task.encode)
    except BaseException:
        state.statistics.failed(called.called_as, time.monotonic() - context.started)
        raise
    state.statistics.succeeded(called.called_as, time.monotonic() - context.started, context.timings)


class _Inference(Compute):
    """Compute an operation for one inference request."""

    def __init__(self, service: Service, called: CalledOperation, state: OipState, exchange: Exchange) -> None:
        super().__init__(service, exchange.context, called)
        self._state = state
        self._exchange = exchange
        self._reply_type = choose(exchange.headers.get("accept"), REPLY_TYPES)
        self._body: InferenceBody | None = None

    async def decode(self, exchange: Exchange, _: Task, lease: Lease) -> RequestObject:
        """Read the body of the request."""
        headers, settings = exchange.headers, self.service.settings
        if not (name := media_type(headers)).endswith("+json"):
            check_media_type(name, _REQUEST_TYPES)
        decompressor = decompressor_of(headers.get("content-encoding", ""), int(settings.body_limit))
        body = self._body = InferenceBody(
            self.called,
            lease,
            self._state.regions.of(exchange.context.key),
            self._check_early,
            head_length=_head_length(headers),
            # The decompressed length is not known in advance.
            length=None if decompressor is not None else exchange.length,
            limit=int(settings.json_limit),
        )
        chunks = exchange.chunks()
        return await body.request(chunks if decompressor is None else decompressed(chunks, decompressor))

    async def _check_early(self, request: RequestObject, misses_shape: bool) -> None:
        await (self.check_head if misses_shape else self.prepare)(request)

    def open(self, prepared: Prepared, tensors: Mapping[str, Memory], lease: Lease) -> Call:
        """Return the call with the deadline of this request; its plan may have been made for an earlier one."""
        assert self._body is not None
        request = self._body.head
        for output, spec in zip(request.outputs, prepared.op.outputs, strict=True):
            if output.place is not None and output.place.byte_size < (needed := tensor_bytes(spec)):
                has = f"shared_memory_byte_size of {output.name} is {output.place.byte_size}"
                message = f"{has}, but {output.name} has {needed} bytes"
                raise InvalidParams(message, errors=[broken_rule(["outputs", output.name], message, "size")])
        call = super().open(prepared, tensors, lease)
        call.deadline = self.service.deadline(
            self.context, None if request.timeout_us is None else request.timeout_us / 1000
        )
        return call

    async def encode(self, work: Work, send: Send) -> None:
        """Run the call and reply."""
        assert self._body is not None
        request, call = self._body.head, cast("Call", work)
        if self._reply_type == frames.MEDIA_TYPE and not any(output.place for output in request.outputs):
            await frames.send_frames(call, send)
            return
        await finish(call)
        coding = choose_coding(self._exchange.headers.get("accept-encoding"))
        await send_inference(call, request, send, coding=coding, regions=self._body.regions)


def _head_length(headers: Mapping[str, str]) -> int | None:
    text = headers.get(HEAD_LENGTH)
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < 19):
        raise InvalidRequest(f"the header {HEAD_LENGTH} must be a number of bytes")
    return int(text)
