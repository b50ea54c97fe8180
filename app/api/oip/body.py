"""Read an Open Inference Protocol request as it arrives: JSON first, then the tensors' bytes in the order of the JSON.

The header `Inference-Header-Content-Length` gives the length of the JSON, the head of the body. The call is known as
soon as the head has arrived; then the memory of each tensor is allocated, and each following byte is written once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from app.api.oip.head_cache import CachedHead, HeadCache
from app.api.oip.regions import Region, Regions
from app.api.oip.request import InferRequest, InputTensor, begun_request, read_request
from app.intake.coding import Decompressor
from app.intake.json import JsonIntake
from app.intake.lease import Lease
from app.intake.requests import Arrived, Begun, Known, RequestEvent, RequestObject
from app.intake.sinks import RawSink, TensorFault
from app.intake.strict_json import Partial, parse_document
from app.intake.tensors import Elements, Input, Tensor
from app.intake.values import TensorValues
from convgrad._dtypes import DTYPES
from convgrad._errors import InvalidParams, InvalidRequest, ParseError
from schemas.broken_rules import broken_rule
from schemas.rows import MAX_DIMS
from schemas.tables import CalledOperation

__all__ = ["HEAD_LENGTH", "InferenceBody", "decompressed"]

HEAD_LENGTH = "inference-header-content-length"
_HEADER = "Inference-Header-Content-Length"

_INTEGERS = ("s32", "s64")
# A document of this size is parsed in less than a millisecond.
_SMALL = 16 << 10


class InferenceBody:
    """Read the body of one inference request; `events` yields what has arrived.

    Calls whose head is in `heads` have been prepared before. Raises `ParseError` and `InvalidRequest` for a body that
    violates the protocol, `InvalidParams` for inputs that don't match their description, `TooLarge` and `Overloaded`
    when there is no memory for them.
    """

    def __init__(
        self,
        called: CalledOperation,
        lease: Lease,
        regions: Regions,
        heads: HeadCache,
        *,
        head_length: int | None,
        length: int | None,
        head_limit: int,
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
        self._json: JsonIntake | None = None
        self._text = b""
        self._sinks: dict[str, RawSink] = {}
        """Where the binary tensors arrive, by name."""
        self._coming: deque[RawSink] = deque()
        self.regions: dict[str, Region] = {}
        """The registered regions that inputs and outputs of the request are in, by name."""
        self.request: InferRequest | None = None
        """The request, once its head has arrived."""

    async def events(self, chunks: AsyncIterator[bytes | memoryview]) -> AsyncIterator[RequestEvent]:
        """Read the whole body."""
        head = known = None
        async for chunk in chunks:
            if isinstance(chunk, memoryview):
                self._placed(len(chunk))
                yield self._arrived()
                continue
            rest = chunk
            if head is None:
                text = chunk if self._head_left is None else chunk[: self._head_left]
                if (head := await self._take_head(text)) is None:
                    if isinstance(begun := await self._lists().begun(), Partial):
                        yield Begun(begun_request(self._called, begun))
                    continue
                rest = chunk[len(text) :]
                self._open(head)
                known = self._known(head, head.shape_bytes(memoryview(rest)))
                yield known
                self._check_length(head.nbytes)
            await self._write(memoryview(rest))
            if self._coming and self._length is not None:
                await self._coming[0].supply()
                self._lease.place([self._coming[0].room()])
        if head is None:
            if self._head_left:
                raise ParseError(f"the body is shorter than the {self._head_length} bytes of JSON that {_HEADER} gives")
            head = self._parse_head(await self._lists().finish_async())
            self._open(head)
            known = self._known(head, head.shape_bytes(memoryview(b"")))
        if self._coming:
            missing = sum(sink.missing for sink in self._coming)
            raise ParseError(f"the body is {missing} bytes too short for its binary tensors")
        assert known is not None
        shapes = b"".join([self._sinks[tensor.name].content() for tensor, _ in head.shapes])
        if known.prepared is None and head.shapes:
            known = self._known(head, shapes)
        yield known
        self._remember(head, shapes, known)

    async def _take_head(self, text: bytes) -> CachedHead | None:
        """Read bytes of the head; return it once it is complete."""
        whole = self._length if self._head_length is None else self._head_length
        short = len(text) == whole and len(text) <= min(_SMALL, self._head_limit)
        if short and self._json is None and b'"data"' not in text:
            # In one chunk and without lists of numbers, as most heads are.
            self._head_left = 0
            self._text = text
            known = self._heads.find(self._called.called_as, text)
            if known is not None and not (known.binary and self._head_length is None):
                return known
            return self._parse_head(parse_document(text))
        document = self._lists()
        await document.take(text)
        await document.supply()
        if self._head_left is None:
            return None
        self._head_left -= len(text)
        return None if self._head_left else self._parse_head(await document.finish_async())

    def _lists(self) -> JsonIntake:
        if self._json is None:
            # A body without a length may claim any for its head.
            length = self._length if None in (self._length, self._head_length) else self._head_length
            self._json = JsonIntake(
                TensorValues(self._lease, only_lists=True), length=length, max_skeleton=self._head_limit
            )
        return self._json

    def _parse_head(self, document: Any) -> CachedHead:
        request = read_request(self._called, document, self._lease)
        binary = tuple(tensor for tensor in request.inputs if tensor.source == "binary")
        if binary and self._head_length is None:
            raise InvalidRequest(f"binary tensors need the header {_HEADER}: the length of the JSON before them")
        shapes, at = [], 0
        for tensor in binary:
            if self._is_shape(tensor):
                _check_shape(tensor)
                shapes.append((tensor, at))
            at += tensor.nbytes
        return CachedHead(request, binary, tuple(shapes), at)

    def _open(self, head: CachedHead) -> None:
        """Find the regions of the request's tensors, and make a sink for each binary one."""
        # A region may be unregistered meanwhile: this call keeps using the one it found.
        self.regions = {name: self._regions.find(place) for name, place in head.request.places.items()}
        for tensor in head.binary:
            sink = RawSink(self._lease, expected=tensor.nbytes, own=tensor.name not in head.shape_names)
            self._sinks[tensor.name] = sink
            if tensor.nbytes:
                self._coming.append(sink)
        self.request = head.request

    def _known(self, head: CachedHead, shapes: bytes | None) -> Known:
        """Return the call; `shapes` are the bytes of its shape inputs, or None if they have not arrived."""
        request = head.request
        inputs: dict[str, Input] = {}
        start = 0
        for tensor in request.inputs:
            if shapes is not None and tensor.name in head.shape_names:
                inputs[tensor.name] = _integers(tensor, shapes[start : start + tensor.nbytes])
                start += tensor.nbytes
            else:
                inputs[tensor.name] = self._input(tensor)
        names = self._called.called_as, self._called.operation
        call = RequestObject(*names, request.attributes, inputs, request.options)
        if shapes is None:
            return Known(call, likely=head.last_call)
        return Known(call, head.calls.get(shapes))

    def _remember(self, head: CachedHead, shapes: bytes, known: Known) -> None:
        """Cache the plan for later calls with the same head."""
        if shapes in head.calls:
            return
        # A shape in shared memory may be different the next time.
        if not any(self._is_shape(tensor) for tensor in head.request.inputs if tensor.place is not None):
            head.remember(shapes, known.prepared)
            if self._text:
                self._heads.keep(self._called.called_as, self._text, head)

    def _check_length(self, binary: int) -> None:
        """Check the length of the body, if known, against the sizes in the head."""
        if self._length is None or self._head_length is None:
            return
        if (rest := self._length - self._head_length) != binary:
            raise ParseError(f"the binary tensors need {binary} bytes after the JSON, but the body has {rest}")

    def _input(self, tensor: InputTensor) -> Input:
        """Return an input, or the values of a shape; a shape that has not arrived is a tensor."""
        if tensor.numbers is not None:
            with _named(tensor.name):
                tensor.numbers.check(tensor.dtype, tensor.shape)
        elements: Elements | None = tensor.numbers or self._sinks.get(tensor.name)
        if tensor.place is not None:
            elements = self.regions[tensor.name].elements(tensor.place, self._lease)
        if not self._is_shape(tensor):
            return Tensor(tensor.dtype, tensor.shape, elements)
        _check_shape(tensor)
        if tensor.source == "binary" or elements is None:
            return Tensor(DTYPES["s32"], tensor.shape)  # the rules accept only s32 here
        return _integers(tensor, elements.content())

    def _is_shape(self, tensor: InputTensor) -> bool:
        return self._called.operation.is_shape(tensor.name)

    async def _write(self, data: memoryview) -> None:
        while data:
            if not self._coming:
                raise ParseError(f"the body has {len(data)} bytes or more after its last tensor")
            sink = self._coming[0]
            await sink.supply()
            count = min(sink.missing, len(data))
            sink.write(data[:count])
            data = data[count:]
            self._close_complete(sink)

    def _placed(self, count: int) -> None:
        """Count bytes that were read straight into their tensor."""
        sink = self._coming[0]
        sink.placed(count)
        self._close_complete(sink)

    def _close_complete(self, sink: RawSink) -> None:
        if not sink.missing:
            sink.close()
            self._coming.popleft()

    def _arrived(self) -> Arrived:
        rows = self._called.operation.input_spellings
        return Arrived.at({rows[name]: sink for name, sink in self._sinks.items() if sink.in_place})


async def decompressed(chunks: AsyncIterator[bytes | memoryview], decompressor: Decompressor) -> AsyncIterator[bytes]:
    """Yield a body without its content coding; raises what the decompressor raises."""
    async for chunk in chunks:
        for piece in decompressor.pieces(bytes(chunk)):
            yield piece
            await asyncio.sleep(0)
    decompressor.close()


@contextmanager
def _named(name: str) -> Iterator[None]:
    try:
        yield
    except TensorFault as fault:
        message = f"data of {name} {fault.message}"
        raise InvalidParams(message, errors=[broken_rule(["inputs", name], message, fault.kind)]) from None


def _check_shape(tensor: InputTensor) -> None:
    if tensor.dtype.name not in _INTEGERS or len(tensor.shape) != 1 or tensor.shape[0] > MAX_DIMS:
        message = f"{tensor.name} must be INT32 or INT64 with 1 dimension of at most {MAX_DIMS} values"
        raise InvalidParams(message, errors=[broken_rule(["inputs", tensor.name], message, "shape_dtype")])


def _integers(tensor: InputTensor, data: bytes | bytearray | memoryview) -> list[int]:
    return [int(value) for value in np.frombuffer(data, tensor.dtype.numpy)]
