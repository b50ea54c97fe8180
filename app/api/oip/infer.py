"""One inference of the `/v2` API, from its body to its reply."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from app.api.oip.body import HEAD_LENGTH, Metas, OipIntake, read_inference
from app.api.oip.known_heads import Heads
from app.api.oip.regions import Region, Regions, Registry
from app.api.oip.reply import send_inference
from app.api.oip.request import InferRequest, Place
from app.api.oip.statistics import Statistics
from app.calls.call import Prepared
from app.calls.overlap import OverlappedCall
from app.calls.planning import tensor_bytes
from app.calls.service import Service
from app.http.context import context_of, exchange_of, headers_of
from app.http.disconnect import cancel_on_disconnect
from app.intake.body import media_type
from app.intake.sinks import Lease
from app.pool.buffers import Segment
from app.replies import frames
from app.replies.coding import choose_coding
from app.telemetry.context import RequestContext
from convgrad._errors import DeadlineExceeded, InvalidParams, InvalidRequest, UnsupportedMediaType
from schemas.problems import invalid_params, problem
from schemas.tables import CalledOperation

__all__ = ["Inference", "OipState"]

# The last one is curl's default, which the protocol's own examples rely on.
_REQUEST_TYPES = ("", "application/json", "application/octet-stream", "application/x-www-form-urlencoded")


# Headers with this prefix are parameters, as in Triton when configured so: load generators such as Triton's
# perf_analyzer can set headers over HTTP, but not parameters.
_PARAMETER = "convgrad-parameter-"


class OipState:
    """The state of the API between requests."""

    def __init__(self, *, shared_memory: bool) -> None:
        self.statistics = Statistics()
        self.heads = Heads()
        self.regions = Registry(enabled=shared_memory)


class Inference(Response):
    """A response that uses the ASGI channels itself, to read the body and send the reply piece by piece."""

    def __init__(self, called: CalledOperation, service: Service, state: OipState) -> None:
        self._called = called
        self._service = service
        self._state = state
        self._regions: dict[str, Region] = {}
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Compute, reply, and update the statistics."""
        context, name = context_of(scope), self._called.called_as
        try:
            ended = await self._answer(scope, context, receive, send)
        except BaseException:
            self._state.statistics.failed(name, time.monotonic() - context.started)
            raise
        self._state.statistics.succeeded(name, ended - context.started, context.timings)

    async def _answer(self, scope: Scope, context: RequestContext, receive: Receive, send: Send) -> float:
        """Reply; return the time when the reply was sent, before its memory is released."""
        headers = headers_of(scope)
        _check_content_type(headers)
        service = self._service
        with service.admit(), service.lease(exchange_of(scope).direct_body) as lease:
            async with OverlappedCall(service, lease, context.timings) as early:
                intake = self._intake(headers, context, lease, early)
                limit = int(service.settings.body_limit)
                try:
                    async with asyncio.timeout(service.settings.deadline_s):
                        await read_inference(receive, headers, intake, context.timings, body_limit=limit)
                        with context.timings.measure("decode"):
                            request, prepared, tensors = await intake.finish()
                except TimeoutError:
                    raise DeadlineExceeded("the deadline passed before the whole request arrived") from None
                running = await early.complete(self._timed(prepared, request, context), tensors)
                async with cancel_on_disconnect(receive), running:
                    if frames.MEDIA_TYPE in headers.get("accept", "") and not self._regions:
                        await frames.send_frames(running, send)
                    else:
                        await running.finish()
                        coding = choose_coding(headers.get("accept-encoding"))
                        await send_inference(running, request, send, coding=coding, regions=self._regions)
                    ended = time.monotonic()
        return ended

    def _intake(
        self, headers: Mapping[str, str], context: RequestContext, lease: Lease, early: OverlappedCall
    ) -> OipIntake:
        regions = self._state.regions.of(context.key)

        def checked(request: InferRequest, prepared: Prepared) -> None:
            for output, spec in zip(request.outputs, prepared.op.outputs, strict=True):
                if output.place is not None:
                    self._regions[output.name] = _region_for(output.name, output.place, tensor_bytes(spec), regions)

        async def on_arrival(
            request: InferRequest, prepared: Prepared, tensors: Mapping[str, Segment], received: Mapping[str, int]
        ) -> None:
            await early.advance(self._timed(prepared, request, context), tensors, received)

        return OipIntake(
            self._called,
            lease,
            regions,
            self._state.heads,
            head_length=_length(headers, HEAD_LENGTH),
            # The decompressed length is not known in advance.
            length=None if headers.get("content-encoding") else _length(headers, "content-length"),
            head_limit=int(self._service.settings.head_limit),
            check=self._check,
            checked=checked,
            on_arrival=on_arrival,
            forwarded=_forwarded(headers),
        )

    async def _check(self, request: InferRequest, metas: Metas, complete: bool) -> Prepared | None:
        """Check what is known; `complete` when that includes the values of the shape input."""
        name, attributes = self._called.called_as, request.attributes
        if complete:
            return await self._service.prepare(name, attributes, metas, request.options)
        spellings, shape = self._called.operation.attribute_spellings, self._called.operation.shape_input
        # The input takes precedence over the attribute.
        attributes = {name: value for name, value in attributes.items() if spellings.get(name) != shape}
        try:
            self._service.check(name, attributes, metas, request.options)
        except InvalidParams as error:
            errors = [
                found
                for found in error.errors
                if not (found["type"] == "missing" and spellings.get(found["loc"][-1]) == shape)
            ]
            if errors:
                raise invalid_params(name, errors) from None
        return None

    def _timed(self, prepared: Prepared, request: InferRequest, context: RequestContext) -> Prepared:
        """Return the call, which may come from the cache, with the deadline of this request."""
        allowed = self._service.settings.deadline_s
        if request.timeout_us is not None:
            allowed = min(allowed, request.timeout_us / 1e6)
        return Prepared(prepared.op, prepared.computations, prepared.options, context.started + allowed)


def _region_for(name: str, place: Place, needed: int, regions: Regions) -> Region:
    """Return the region for an output; raises `InvalidParams` when the output does not fit its place there."""
    if place.byte_size < needed:
        message = f"shared_memory_byte_size of {name} is {place.byte_size}, but {name} has {needed} bytes"
        raise InvalidParams(message, errors=[problem(["outputs", name], message, "size")])
    return regions.find(place)


def _forwarded(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the parameters sent as headers: `Convgrad-Parameter-Pads-Begin: 1,1`."""
    return {
        name.removeprefix(_PARAMETER).replace("-", "_"): value
        for name, value in headers.items()
        if name.startswith(_PARAMETER)
    }


def _length(headers: Mapping[str, str], name: str) -> int | None:
    text = headers.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < 19):
        raise InvalidRequest(f"the header {name} must be a number of bytes")
    return int(text)


def _check_content_type(headers: Mapping[str, str]) -> None:
    given = media_type(headers)
    if given not in _REQUEST_TYPES and not given.endswith("+json"):
        raise UnsupportedMediaType(
            "the Content-Type of an inference request must be application/json or application/octet-stream",
            data={"supported": list(_REQUEST_TYPES[1:3])},
        )
