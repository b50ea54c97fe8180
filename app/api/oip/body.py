"""Read an Open Inference Protocol request: JSON first, then the tensors' bytes in the order of the JSON.

The header `Inference-Header-Content-Length` gives the length of the JSON, the head of the body. The call is checked as
soon as the head has arrived; then the memory of each tensor is allocated, and each following byte is written once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import lru_cache

from app.api.oip.regions import Region, Regions
from app.api.oip.request import InferRequest, InputTensor, read_request
from app.intake.body import parse_json, parse_text, read_json
from app.intake.coding import Decompressor
from app.intake.lease import Lease
from app.intake.requests import RequestObject
from app.intake.sinks import Elements, Sink, TensorFault
from app.intake.tensors import Input, Numbers, Tensor, shape_list
from convgrad._errors import InvalidParams, InvalidRequest, ParseError, TooLarge
from schemas.broken_rules import broken_rule
from schemas.rows import MAX_DIMS
from schemas.tables import CalledOperation, find_operation

__all__ = ["HEAD_LENGTH", "InferenceBody", "decompressed"]

HEAD_LENGTH = "inference-header-content-length"
_HEADER = "Inference-Header-Content-Length"
_SHORT = 4 << 10


class InferenceBody:
    """Read the body of one inference request; `check` rejects a call before its data arrives, given whether
    the values of a shape are still missing.

    Raises `ParseError` and `InvalidRequest` for a body that violates the protocol, `InvalidParams` for inputs that
    don't match their description, `TooLarge` and `Overloaded` when there is no memory for them.
    """

    def __init__(
        self,
        called: CalledOperation,
        lease: Lease,
        regions: Regions,
        check: Callable[[RequestObject, bool], Awaitable[object]],
        *,
        head_length: int | None,
        length: int | None,
        limit: int,
    ) -> None:
        self._called = called
        self._lease = lease
        self._regions = regions
        self._check = check
        if head_length is not None and not 0 < head_length <= (head_length if length is None else length):
            raise InvalidRequest(f"{_HEADER} must be from 1 to the length of the body, but is {head_length}")
        self._head_length = head_length
        self._limit = limit
        self._length = length
        self._sinks: dict[str, Sink] = {}
        """Where the binary tensors arrive, by name."""
        self.regions: dict[str, Region] = {}
        """The registered regions that inputs and outputs of the request are in, by name."""
        self.head: InferRequest
        """The request, once its head has arrived."""

    async def request(self, chunks: AsyncIterator[bytes | memoryview]) -> RequestObject:
        """Read the whole body."""
        head, rest = await self._read_head(chunks)
        # A region may be unregistered meanwhile: this call keeps using the one it found.
        self.regions = {name: self._regions.find(place) for name, place in head.places.items()}
        self._sinks = {each.name: Sink(self._lease, each.nbytes) for each in head.inputs if each.source == "binary"}
        coming = deque(sink for sink in self._sinks.values() if sink.nbytes)
        missing = sum(sink.nbytes for sink in coming)
        if self._length is not None and self._head_length is not None:
            given = self._length - self._head_length
            if missing != given:
                await self._check(*self._known(complete=False))
                raise ParseError(f"the binary tensors need {missing} bytes after the JSON, but the body has {given}")
        if missing > len(rest):
            await self._check(*self._known(complete=False))
        await self._write(memoryview(rest), coming)
        async for chunk in chunks:  # none are left of a body without a head
            if isinstance(chunk, memoryview):
                coming[0].placed(len(chunk))
                if not coming[0].missing:
                    coming.popleft()
            else:
                await self._write(memoryview(chunk), coming)
        if coming:
            missing = sum(sink.missing for sink in coming)
            raise ParseError(f"the body is {missing} bytes too short for its binary tensors")
        return self._known()[0]

    async def _read_head(self, chunks: AsyncIterator[bytes | memoryview]) -> tuple[InferRequest, bytes]:
        """Read the head; return it, and the bytes after it that have arrived."""
        length = self._head_length
        if length is None:
            document = await read_json(chunks, self._lease, length=self._length, limit=self._limit)
            self.head = read_request(self._called, document)
            if any(tensor.source == "binary" for tensor in self.head.inputs):
                raise InvalidRequest(f"binary tensors need the header {_HEADER}: the length of the JSON before them")
            return self.head, b""
        if length > self._limit:
            msg = f"{_HEADER} may be at most {self._limit}"
            raise TooLarge(msg, data={"reason": "json", "limit": self._limit})
        if length > _SHORT:
            await self._lease.count(length)
        text = bytearray()
        async for chunk in chunks:
            text += chunk
            if len(text) >= length:
                break
        else:
            raise ParseError(f"the body is shorter than the {length} bytes of JSON that {_HEADER} gives")
        head, rest = bytes(text[:length]), bytes(text[length:])
        if length <= _SHORT:
            self.head = _usual_request(self._called.called_as, head)
        else:
            self.head = read_request(self._called, await parse_json([head], self._lease))
        return self.head, rest

    async def _write(self, data: memoryview, coming: deque[Sink]) -> None:
        while data:
            if not coming:
                raise ParseError(f"the body has {len(data)} bytes or more after its last tensor")
            sink = coming[0]
            count = min(sink.missing, len(data))
            await sink.write(data[:count])
            data = data[count:]
            if not sink.missing:
                coming.popleft()
        if coming and self._length is not None:
            await coming[0].write(b"")  # allocates its memory
            if room := coming[0].room():
                self._lease.place(room)

    def _known(self, *, complete: bool = True) -> tuple[RequestObject, bool]:
        """Return the call without the values of a shape that have not arrived, and whether there is one."""
        called, pending = self._called, False
        inputs: dict[str, Input] = {}
        for tensor in self.head.inputs:
            elements = self._elements(tensor)
            if not called.operation.is_shape(tensor.name):
                inputs[tensor.name] = Tensor(tensor.dtype, tensor.shape, elements)
                continue
            _check_shape(tensor)
            if complete or not isinstance(elements, Sink) or not elements.missing:
                inputs[tensor.name] = _values(tensor, elements)
            else:
                pending = True
        request = RequestObject(called.called_as, called.operation, self.head.attributes, inputs, self.head.options)
        return (request.without_shape() if pending else request), pending

    def _elements(self, tensor: InputTensor) -> Elements:
        if tensor.place is not None:
            return self.regions[tensor.name].elements(tensor.place)
        if tensor.numbers is not None:
            return Numbers(tensor.numbers, tensor.dtype, tensor.shape)
        return self._sinks[tensor.name]


@lru_cache(256)
def _usual_request(called_as: str, text: bytes) -> InferRequest:
    """Read a short head: training sends the same one with every call, and only new tensors."""
    return read_request(find_operation(called_as), parse_text(text))


async def decompressed(chunks: AsyncIterator[bytes | memoryview], decompressor: Decompressor) -> AsyncIterator[bytes]:
    """Yield a body without its content coding; raises what the decompressor raises."""
    async for chunk in chunks:
        for piece in decompressor.pieces(bytes(chunk)):
            yield piece
            await asyncio.sleep(0)
    decompressor.close()


def _check_shape(tensor: InputTensor) -> None:
    if tensor.dtype.name not in ("s32", "s64") or len(tensor.shape) != 1 or tensor.shape[0] > MAX_DIMS:
        message = f"{tensor.name} must be INT32 or INT64 with 1 dimension of at most {MAX_DIMS} values"
        raise InvalidParams(message, errors=[broken_rule(["inputs", tensor.name], message, "shape_dtype")])


def _values(tensor: InputTensor, elements: Elements) -> list[int]:
    try:
        return shape_list(Tensor(tensor.dtype, tensor.shape, elements))
    except TensorFault as fault:
        message = f"data of {tensor.name} {fault.message}"
        raise InvalidParams(message, errors=[broken_rule(["inputs", tensor.name], message, fault.kind)]) from None
