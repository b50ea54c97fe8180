"""One inference of the `/v2` API: its body is JSON, then the tensors' bytes in the order of the JSON.

The header `Inference-Header-Content-Length` gives the length of the JSON, the head of the body. The call is checked as
soon as the head has arrived; then the memory of each tensor is allocated, and each following byte is written once.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from starlette.types import Send

from app.api.answer import check_media_type
from app.api.oip.regions import Region, RegionElements, Regions
from app.api.oip.request import HEAD_LENGTH, InferRequest, read_request
from app.calls.call import Call
from app.calls.service import Service
from app.calls.tasks import Compute, Task
from app.calls.work import Work, finish
from app.http.exchange import Exchange
from app.intake.body import coding_of, decompressed, media_type, parse_json, parse_text, read_json
from app.intake.elements import Sink, TensorFault
from app.intake.lease import Lease
from app.intake.requests import RequestObject
from app.intake.tensors import Input, Tensor, shape_list
from app.pool.buffers import Memory
from app.replies import frames
from app.replies.body import json_bytes, send_body
from app.replies.formats import choose, choose_coding
from app.replies.result import NUMBERS, list_pieces, spliced
from app.telemetry.context import Timings
from convgrad._dtypes import dtype
from convgrad._errors import PROBLEM_JSON, InvalidParams, InvalidRequest, ParseError, TooLarge, Unsupported
from engine.planning import Prepared, tensor_bytes
from schemas.broken_rules import broken_rule
from schemas.rows import MAX_DIMS
from schemas.tables import CalledOperation, find_operation

__all__ = ["REPLY_TYPES", "VERSION", "Inference", "OipState", "Statistics"]

# Triton's names for the parts of a request, and ours.
_PARTS = {"queue": "queue", "compute_input": "decode", "compute_infer": "compute", "compute_output": "encode"}
_COMPUTE = ("compute_input", "compute_infer", "compute_output")
# There is no response cache.
_DURATIONS = ("success", "fail", *_PARTS, "cache_hit", "cache_miss")


class Statistics:
    """Count the inferences of each model name since the service started."""

    def __init__(self) -> None:
        self._last_ms: dict[str, int] = {}
        self._counts, self._ns = Counter[tuple[str, str]](), Counter[tuple[str, str]]()  # by model and duration

    def count(self, model: str, seconds: float, timings: Timings | None) -> None:
        """Count a request, with its timings if it succeeded; others were rejected, failed or abandoned."""
        durations = {"fail": seconds}
        if timings is not None:
            durations = {"success": seconds} | {name: timings.seconds.get(part, 0.0) for name, part in _PARTS.items()}
        self._last_ms[model] = int(time.time() * 1000)
        for name, duration in durations.items():
            self._counts[model, name] += 1
            self._ns[model, name] += round(duration * 1e9)

    def report(self, model: str, version: str) -> dict[str, Any]:
        """Return the protocol's object for one model; zeros if it was never called."""
        durations = {name: {"count": self._counts[model, name], "ns": self._ns[model, name]} for name in _DURATIONS}
        done = self._counts[model, "success"]
        return {
            "name": model,
            "version": version,
            "last_inference": self._last_ms.get(model, 0),
            "inference_count": done,
            "execution_count": done,
            "inference_stats": durations,
            "batch_stats": [{"batch_size": 1, **{name: durations[name] for name in _COMPUTE}}] if done else [],
        }


# The last one is curl's default, which the protocol's own examples rely on.
_REQUEST_TYPES = ("application/octet-stream", "application/json", "", "application/x-www-form-urlencoded")
# Whether a reply is JSON or binary depends on the requested outputs; problem objects are for errors.
REPLY_TYPES = ("application/json", "application/octet-stream", frames.MEDIA_TYPE, PROBLEM_JSON)

VERSION = "1"
"""The only version of every model."""

_HEADER = "Inference-Header-Content-Length"
_SHORT = 4 << 10


class OipState:
    """The state of the API between requests."""

    def __init__(self, *, shared_memory: bool) -> None:
        self.statistics = Statistics()
        self._shared_memory = shared_memory
        self._regions = defaultdict[str, Regions](Regions)

    def regions(self, key: str) -> Regions:
        """Return the regions of a key, which others can't see or use; raises `Unsupported` if they are disabled."""
        if not self._shared_memory:
            raise Unsupported(
                "shared memory is disabled: this service was started without CONVGRAD_OIP_SHARED_MEMORY=true"
            )
        return self._regions[key]


class Inference(Compute):
    """Compute an operation for one inference request."""

    _head: InferRequest
    """The request, once its head has arrived."""

    def __init__(self, service: Service, called: CalledOperation, state: OipState, exchange: Exchange) -> None:
        super().__init__(service, exchange.context, called)
        self._state = state
        self._exchange = exchange
        self._reply_type = choose(exchange.headers.get("accept", ""), REPLY_TYPES)
        self._sinks: dict[str, Sink] = {}
        """Where the binary tensors arrive, by name."""
        self._regions: dict[str, Region] = {}
        """The registered regions that inputs and outputs of the request are in, by name."""

    async def decode(self, exchange: Exchange, _: Task, lease: Lease) -> RequestObject:
        """Read the body of the request; each call is checked before its data arrives.

        Raises `ParseError` and `InvalidRequest` for a body that violates the protocol, `InvalidParams` for inputs that
        don't match their description, `TooLarge` and `Overloaded` when there is no memory for them.
        """
        headers, chunks, length = exchange.headers, exchange.chunks(), exchange.length
        if not (name := media_type(headers)).endswith("+json"):
            check_media_type(name, _REQUEST_TYPES)
        if (coding := coding_of(headers.get("content-encoding", ""))) is not None:
            # The length of the decompressed body is not known in advance.
            chunks, length = decompressed(chunks, coding, int(self.service.settings.body_limit)), None
        head_length = _head_length(headers, length)
        rest = await self._read_head(chunks, lease, head_length, length)
        # A region may be unregistered meanwhile: this call keeps using the one it found.
        for name, place in self._head.places.items():
            self._regions[name] = self._state.regions(self.context.key).find(place)
        coming, missing = deque[Sink](), 0
        for name, tensor in self._head.inputs.items():
            if tensor.elements is None and name not in self._regions:
                self._sinks[name] = Sink(lease, tensor.nbytes)
                missing += tensor.nbytes
                if tensor.nbytes:
                    coming.append(self._sinks[name])
        if self._sinks and head_length is None:
            raise InvalidRequest(f"binary tensors need the header {_HEADER}: the length of the JSON before them")
        given = missing if length is None or head_length is None else length - head_length
        if missing != given or missing > len(rest):
            request, waits = self._request()
            await (self.check_head if waits else self.prepare)(request)
        if missing != given:
            raise ParseError(f"the binary tensors need {missing} bytes after the JSON, but the body has {given}")
        await _write(rest, coming, lease, direct=length is not None)
        async for chunk in chunks:  # none are left of a body without a head
            if isinstance(chunk, memoryview):
                coming[0].received += len(chunk)
                if not coming[0].missing:
                    coming.popleft()
            else:
                await _write(chunk, coming, lease, direct=length is not None)
        if coming:
            missing = sum(sink.missing for sink in coming)
            raise ParseError(f"the body is {missing} bytes too short for its binary tensors")
        return self._request()[0]

    async def _read_head(
        self, chunks: AsyncIterator[bytes | memoryview], lease: Lease, head_length: int | None, length: int | None
    ) -> bytes:
        """Read the head; return the bytes after it that have arrived."""
        limit, text = int(self.service.settings.json_limit), bytearray()
        if head_length is None:
            self._head = read_request(self.called, await read_json(chunks, lease, length=length, limit=limit))
        elif head_length > limit:
            raise TooLarge(f"{_HEADER} may be at most {limit}", data={"reason": "json", "limit": limit})
        else:
            if head_length > _SHORT:
                await lease.count(head_length)
            async for chunk in chunks:
                text += chunk
                if len(text) >= head_length:
                    break
            else:
                raise ParseError(f"the body is shorter than the {head_length} bytes of JSON that {_HEADER} gives")
            head = bytes(text[:head_length])
            if head_length <= _SHORT:
                self._head = _usual_request(self.called.called_as, head)
            else:
                self._head = read_request(self.called, await parse_json(head, lease))
        return bytes(text[head_length:])

    def _request(self) -> tuple[RequestObject, bool]:
        """Return the request without the values of a shape that have not arrived, and whether there is one."""
        called, head, inputs, waits = self.called, self._head, dict[str, Input](), False
        for name, tensor in head.inputs.items():
            elements = tensor.elements or self._sinks.get(name)
            if (place := head.places.get(name)) is not None:
                elements = RegionElements(self._regions[name], place)
            whole = inputs[name] = replace(tensor, elements=elements)
            if called.operation.is_shape(name):
                _check_shape(name, tensor)
                if waits := isinstance(elements, Sink) and elements.missing > 0:
                    del inputs[name]
                else:
                    inputs[name] = _values(name, whole)
        request = RequestObject(called.called_as, called.operation, head.attributes, inputs, head.options)
        return (request.without_shape() if waits else request), waits

    def open(self, prepared: Prepared, tensors: Mapping[str, Memory], lease: Lease) -> Call:
        """Return the call with the deadline of this request; its plan may have been made for an earlier one."""
        for output, spec in zip(self._head.outputs, prepared.op.outputs, strict=True):
            if output.place is not None and output.place.byte_size < (needed := tensor_bytes(spec)):
                has = f"shared_memory_byte_size of {output.name} is {output.place.byte_size}"
                message = f"{has}, but {output.name} has {needed} bytes"
                raise InvalidParams(message, errors=[broken_rule(["outputs", output.name], message, "size")])
        call, within_us = super().open(prepared, tensors, lease), self._head.timeout_us
        call.deadline = self.service.deadline(self.context, None if within_us is None else within_us / 1000)
        return call

    async def encode(self, work: Work, send: Send) -> None:
        """Run the call and reply: with frames, or with each output in the requested form.

        Raises, before the reply begins, what `Region.write` raises.
        """
        request, call = self._head, cast("Call", work)
        if self._reply_type == frames.MEDIA_TYPE and not any(output.place for output in request.outputs):
            await frames.send_frames(call, send)
            return
        await finish(call)
        timings, described = call.context.timings, list[dict[str, Any]]()
        binary, listed = list[memoryview](), list[npt.NDArray[Any]]()
        with timings.measure("encode"):
            for wanted, output in zip(request.outputs, call.outputs, strict=True):
                kind = dtype(output.spec.dtype)
                entry: dict[str, Any] = {"name": wanted.name, "datatype": kind.oip, "shape": list(output.spec.shape)}
                described.append(entry)
                # One in shared memory has no parameters: Triton's clients would take any for those of binary data.
                if wanted.place is not None:
                    await self._regions[wanted.name].write(wanted.place.offset, output.data)
                elif wanted.binary:
                    entry["parameters"] = {"binary_data_size": output.nbytes}
                    binary.append(output.data)
                else:
                    entry["data"] = ""  # where the numbers come
                    listed.append(np.frombuffer(output.data, kind.numpy))
        named = {} if request.id is None else {"id": request.id}
        named |= {"model_name": call.prepared.op.called_as, "model_version": VERSION}
        text = json_bytes({**named, "outputs": described})

        def head() -> Iterator[bytes]:
            return timings.each("encode", spliced(text, b"data", list(map(list_pieces, listed)), quoted=False))

        size, pieces = None, head()
        if sum(map(len, listed)) <= NUMBERS:
            whole = b"".join(pieces)
            size, pieces = len(whole), iter([whole])
        elif binary:
            # The length of the JSON is sent before it: numbers that may be too many to keep are formatted twice.
            size = 0
            for piece in head():
                size += len(piece)
                await asyncio.sleep(0)
        await send_body(
            send,
            chain(pieces, binary),
            "application/octet-stream" if binary else "application/json",
            None if size is None else size + sum(map(len, binary)),
            headers={HEAD_LENGTH: str(size)} if binary else {},
            coding=choose_coding(self._exchange.headers.get("accept-encoding", "")),
        )


def _head_length(headers: Mapping[str, str], length: int | None) -> int | None:
    """Return the length of the JSON in a body of `length` bytes, if that is known; None without the header."""
    text = headers.get(HEAD_LENGTH)
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < 19):
        raise InvalidRequest(f"the header {HEAD_LENGTH} must be a number of bytes")
    if not 0 < int(text) <= (int(text) if length is None else length):
        raise InvalidRequest(f"{_HEADER} must be from 1 to the length of the body, but is {int(text)}")
    return int(text)


@lru_cache(256)
def _usual_request(called_as: str, text: bytes) -> InferRequest:
    """Read a short head: training sends the same one with every call, and only new tensors."""
    return read_request(find_operation(called_as), parse_text(text))


async def _write(chunk: bytes, coming: deque[Sink], lease: Lease, *, direct: bool) -> None:
    """Write bytes of the body to where they belong; `direct` bodies are then read from the socket into that memory."""
    data = memoryview(chunk)
    while data:
        if not coming:
            raise ParseError(f"the body has {len(data)} bytes or more after its last tensor")
        count = min(coming[0].missing, len(data))
        await coming[0].write(data[:count])
        data = data[count:]
        if not coming[0].missing:
            coming.popleft()
    if coming and direct:
        await coming[0].write(b"")  # allocates its memory
        if room := coming[0].room():
            lease.place(room)


def _check_shape(name: str, tensor: Tensor) -> None:
    if tensor.dtype.name not in ("s32", "s64") or len(tensor.shape) != 1 or tensor.shape[0] > MAX_DIMS:
        message = f"{name} must be INT32 or INT64 with 1 dimension of at most {MAX_DIMS} values"
        raise InvalidParams(message, errors=[broken_rule(["inputs", name], message, "shape_dtype")])


def _values(name: str, tensor: Tensor) -> list[int]:
    try:
        return shape_list(tensor)
    except TensorFault as fault:
        message = f"data of {name} {fault.message}"
        raise InvalidParams(message, errors=[broken_rule(["inputs", name], message, fault.kind)]) from None


VERSION = "1"
"""The only version of every model."""
