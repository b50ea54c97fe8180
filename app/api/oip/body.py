"""Read an Open Inference Protocol request as it arrives: JSON first, then the tensors' bytes in the order of the JSON.

The header `Inference-Header-Content-Length` gives the length of the JSON, the head of the body. The call is checked as
soon as the head has arrived; then the memory of every tensor is allocated, and each following byte is written once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from starlette.types import Receive

from app.api.oip.known_heads import Head, Heads
from app.api.oip.regions import LentRegion, Region, Regions
from app.api.oip.request import InferRequest, InputTensor, read_request
from app.calls.call import Prepared
from app.intake.coding import Decoder, decoder_of
from app.intake.json import JsonIntake
from app.intake.lists import NumberLists
from app.intake.sinks import Lease, TensorFault
from app.intake.strict_json import parse_document
from app.pool.buffers import Segment
from app.telemetry.timings import Timings
from convgrad._errors import Cancelled, InvalidParams, InvalidRequest, ParseError
from schemas.problems import problem
from schemas.rows import MAX_DIMS
from schemas.tables import CalledOperation
from schemas.tensors import TensorMeta

__all__ = ["HEAD_LENGTH", "Metas", "OipIntake", "read_inference"]

HEAD_LENGTH = "inference-header-content-length"
_HEADER = "Inference-Header-Content-Length"

Metas = Mapping[str, TensorMeta | list[int]]
Check = Callable[[InferRequest, Metas, bool], Awaitable[Prepared | None]]
Checked = Callable[[InferRequest, Prepared], None]
OnArrival = Callable[[InferRequest, Prepared, Mapping[str, Segment], Mapping[str, int]], Awaitable[None]]

_INTEGERS = ("s32", "s64")
# A document of this size is parsed in less than a millisecond.
_SMALL = 16 << 10


class OipIntake:
    """Read the body of one inference request in chunks; `finish` returns it with its tensors in segments.

    `check` gets request and inputs before any tensor's bytes are received; it rejects the call by raising, or returns
    it prepared. Its last argument says whether the values of the shape input are known: if they arrive later
    it returns None and is called again at the end. Calls whose head is in `heads` have passed it before; `checked` gets
    every call and may reject it. While tensors arrive, `on_arrival` gets the call, or, if a shape is still to
    come, the last call with the same head. `forwarded` are parameters from outside the body.

    Raises `ParseError` and `InvalidRequest` for a body that violates the protocol, `InvalidParams` for inputs that
    don't match their description, `TooLarge` and `Overloaded` when there is no memory for them.
    """

    def __init__(
        self,
        called: CalledOperation,
        lease: Lease,
        regions: Regions,
        heads: Heads,
        *,
        head_length: int | None,
        length: int | None,
        head_limit: int,
        check: Check,
        checked: Checked,
        on_arrival: OnArrival | None = None,
        forwarded: Mapping[str, str] | None = None,
    ) -> None:
        self._called = called
        self._lease = lease
        self._regions = regions
        self._heads = heads
        if head_length is not None and not 0 < head_length <= (head_length if length is None else length):
            raise InvalidRequest(f"{_HEADER} must be from 1 to the length of the body, but is {head_length}")
        self._head_left = head_length
        self._head_length = head_length
        self._head_limit = head_limit
        self._length = length
        self._check = check
        self._checked = checked
        self._on_arrival = on_arrival
        self._forwarded = forwarded
        self._json: JsonIntake | None = None
        self._text = b""
        self._head: Head | None = None
        self._prepared: Prepared | None = None
        self._found: dict[str, Region] = {}
        self._segments: dict[str, Segment] = {}
        self._shapes: list[bytearray] = []  # of shape inputs: a few bytes, not from the pool
        self._targets: deque[memoryview] = deque()

    async def take(self, chunk: bytes) -> None:
        """Read the next bytes of the body."""
        if self._head is not None:
            self._write(memoryview(chunk))
            return
        text = chunk if self._head_left is None else chunk[: self._head_left]
        if (head := await self._take_head(text)) is not None:
            rest = memoryview(chunk)[len(text) :]
            await self._open(head, rest)
            self._write(rest)
            if self._length is not None:
                self._lease.place(self._targets)

    async def placed(self, count: int) -> None:
        """Count bytes that were read straight into their tensor."""
        self._advance(count)
        head = self._head
        assert head is not None
        if self._on_arrival is not None and (likely := self._prepared or head.last_call) is not None:
            await self._on_arrival(head.request, likely, self._segments, self._received_bytes(head))

    async def finish(self) -> tuple[InferRequest, Prepared, dict[str, Segment]]:
        """Return the request, its call and its tensors' segments by name; the whole body must have been read."""
        if self._head is None:
            if self._head_left:
                raise ParseError(f"the body ends within the {self._head_length} bytes of its inference header")
            await self._open(self._parse_head(await self._lists().finish_async()), memoryview(b""))
        if self._targets:
            missing = sum(map(len, self._targets))
            raise ParseError(f"the body is {missing} bytes too short for its binary tensors")
        head = self._head
        assert head is not None
        if self._prepared is None:
            self._prepared = await self._complete(head, b"".join(self._shapes))
        return head.request, self._prepared, self._segments

    async def _take_head(self, text: bytes) -> Head | None:
        """Read bytes of the head; return it once it is complete."""
        whole = self._length if self._head_length is None else self._head_length
        short = len(text) == whole and len(text) <= min(_SMALL, self._head_limit)
        if short and self._json is None and b'"data"' not in text:
            # In one chunk and without lists of numbers, as most heads are.
            self._head_left = 0
            self._text = b"" if self._forwarded else text
            known = self._heads.find(self._called.called_as, self._text)
            if known is not None and not (known.binary and self._head_length is None):
                return known
            return self._parse_head(parse_document(text))
        await self._lists().take(text)
        if self._head_left is None:
            return None
        self._head_left -= len(text)
        return None if self._head_left else self._parse_head(await self._lists().finish_async())

    def _lists(self) -> JsonIntake:
        if self._json is None:
            length = self._length if self._head_length is None else self._head_length
            self._json = JsonIntake(NumberLists(self._lease), length=length, max_skeleton=self._head_limit)
        return self._json

    def _parse_head(self, document: Any) -> Head:
        request = read_request(self._called, document, self._forwarded)
        binary = tuple(tensor for tensor in request.inputs if tensor.source == "binary")
        if binary and self._head_length is None:
            raise InvalidRequest(f"binary tensors need the header {_HEADER}: the length of the JSON before them")
        shapes, at = [], 0
        for tensor in binary:
            if self._is_shape(tensor):
                _check_shape(tensor)
                shapes.append((tensor, at))
            at += tensor.nbytes
        return Head(request, binary, tuple(shapes), at)

    async def _open(self, head: Head, rest: memoryview) -> None:
        """Check what is known of the call, then allocate memory for its tensors."""
        # A region may be unregistered meanwhile: this call keeps using the one it found.
        self._found = {tensor.name: self._regions.find(tensor.place) for tensor in head.request.inputs if tensor.place}
        if (shapes := head.shape_bytes(rest)) is not None:
            self._prepared = await self._complete(head, shapes)
        elif not head.passed:
            await self._check(head.request, await self._metas(head), False)
            head.passed = True
        self._check_length(head.nbytes)
        for tensor in head.request.inputs:
            if not self._is_shape(tensor):
                await self._place(tensor)
        for tensor in head.binary:
            if self._is_shape(tensor):
                self._shapes.append(bytearray(tensor.nbytes))
                target = memoryview(self._shapes[-1])
            else:
                target = self._segments[tensor.name].view[: tensor.nbytes]
            if tensor.nbytes:
                self._targets.append(target)
        self._head = head

    async def _complete(self, head: Head, shapes: bytes) -> Prepared:
        """Check the whole call, unless the same call passed before."""
        if (known := head.calls.get(shapes)) is None:
            metas, at = await self._metas(head), 0
            for tensor, _ in head.shapes:
                metas[tensor.name] = _integers(tensor, shapes[at : at + tensor.nbytes])
                at += tensor.nbytes
            known = await self._check(head.request, metas, True)
            assert known is not None
            # A shape in shared memory may be different the next time.
            if not any(tensor.place and self._is_shape(tensor) for tensor in head.request.inputs):
                head.remember(shapes, known)
                if self._text:
                    self._heads.keep(self._called.called_as, self._text, head)
        self._checked(head.request, known)
        return known

    def _check_length(self, binary: int) -> None:
        """Check the length of the body, if known, against the sizes in the head."""
        if self._length is None or self._head_length is None:
            return
        if (rest := self._length - self._head_length) != binary:
            raise ParseError(f"the binary tensors need {binary} bytes after the JSON, but the body has {rest}")

    async def _metas(self, head: Head) -> dict[str, TensorMeta | list[int]]:
        """Return what the check needs of the inputs: dtype and shape, or the values of a shape input."""
        return {tensor.name: await self._meta(tensor) for tensor in head.request.inputs}

    async def _meta(self, tensor: InputTensor) -> TensorMeta | list[int]:
        if tensor.numbers is not None:
            with _named(tensor.name):
                tensor.numbers.check(tensor.dtype, tensor.shape)
        if not self._is_shape(tensor):
            return tensor.meta
        _check_shape(tensor)
        if tensor.numbers is not None:
            with _named(tensor.name):
                return tensor.numbers.integers()
        if tensor.place is not None:
            room = bytearray(tensor.nbytes)
            await self._found[tensor.name].read(tensor.place.offset, memoryview(room))
            return _integers(tensor, room)
        return TensorMeta("s32", tensor.shape)  # the rules know s32 only, but s64 is as good

    async def _place(self, tensor: InputTensor) -> None:
        """Allocate the memory of a tensor, and fill in data that is not binary."""
        region = self._found.get(tensor.name)
        if isinstance(region, LentRegion) and tensor.place is not None and tensor.place.offset == 0:
            self._segments[tensor.name] = self._lease.adopt(region.segment(tensor.nbytes))
            return
        if tensor.numbers is not None:
            segment = await tensor.numbers.collect()
        else:
            segment = await self._lease.acquire_async(tensor.nbytes)
        self._segments[tensor.name] = segment
        if tensor.place is not None:
            await self._found[tensor.name].read(tensor.place.offset, segment.view[: tensor.nbytes])

    def _is_shape(self, tensor: InputTensor) -> bool:
        return self._called.operation.input_spellings.get(tensor.name) == self._called.operation.shape_input

    def _write(self, data: memoryview) -> None:
        while data:
            if not self._targets:
                raise ParseError(f"the body has {len(data)} bytes or more after its last tensor")
            target = self._targets[0]
            count = min(len(target), len(data))
            target[:count] = data[:count]
            data = data[count:]
            self._advance(count)

    def _received_bytes(self, head: Head) -> dict[str, int]:
        """Count the bytes of each input that are in its segment; binary tensors arrive one after the other."""
        received, left = {}, sum(map(len, self._targets))
        for tensor in reversed(head.request.inputs):
            missing = min(left, tensor.nbytes) if tensor.source == "binary" else 0
            left -= missing
            received[self._called.operation.input_spellings[tensor.name]] = tensor.nbytes - missing
        return received

    def _advance(self, count: int) -> None:
        rest = self._targets[0][count:]
        if rest:
            self._targets[0] = rest
        else:
            self._targets.popleft()


async def read_inference(
    receive: Receive, headers: Mapping[str, str], intake: OipIntake, timings: Timings, *, body_limit: int
) -> None:
    """Pass the body to `intake` as it arrives, decompressed if needed; raises what that raises.

    Raises `Cancelled` when the client disconnects, `UnsupportedMediaType` for an unknown content coding.
    """
    decoder = decoder_of(headers.get("content-encoding", ""), body_limit)
    more = True
    while more:
        with timings.measure("receive"):
            message = await receive()
        if message["type"] == "http.disconnect":
            raise Cancelled("the client disconnected before its request was complete")
        chunk, more = message.get("body", b""), message.get("more_body", False)
        with timings.measure("decode"):
            await _pass_on(chunk, intake, decoder)
    if decoder is not None:
        decoder.close()


async def _pass_on(chunk: bytes | memoryview, intake: OipIntake, decoder: Decoder | None) -> None:
    if isinstance(chunk, memoryview):
        await intake.placed(len(chunk))
    elif decoder is None:
        await intake.take(chunk)
    else:
        for piece in decoder.pieces(chunk):
            await intake.take(piece)
            await asyncio.sleep(0)


@contextmanager
def _named(name: str) -> Iterator[None]:
    try:
        yield
    except TensorFault as fault:
        message = f"data of {name} {fault.message}"
        raise InvalidParams(message, errors=[problem(["inputs", name], message, fault.kind)]) from None


def _check_shape(tensor: InputTensor) -> None:
    if tensor.dtype.name not in _INTEGERS or len(tensor.shape) != 1 or tensor.shape[0] > MAX_DIMS:
        message = f"{tensor.name} must be INT32 or INT64 with 1 dimension of at most {MAX_DIMS} values"
        raise InvalidParams(message, errors=[problem(["inputs", tensor.name], message, "shape_dtype")])


def _integers(tensor: InputTensor, data: bytes | bytearray) -> list[int]:
    return [int(value) for value in np.frombuffer(data, tensor.dtype.numpy)]
