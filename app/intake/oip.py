"""Read an Open Inference Protocol request as it arrives: JSON first, then the tensors' bytes in its order.

With the header `Inference-Header-Content-Length` the JSON is the head of the body. The call is checked as
soon as the head is there; then the memory of every tensor is taken, and each byte that follows is written
once, to its place.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from starlette.datastructures import Headers
from starlette.types import Receive

from app.intake.coding import Decoder, decoder_of
from app.intake.document import parse_document
from app.intake.landing import Holding, TensorFault
from app.intake.lists import ListsIntake
from app.intake.oip_request import InferRequest, InputTensor, read_request
from app.intake.regions import Region, Regions
from app.pool.buffers import Segment
from app.timings import Timings
from convgrad._errors import Cancelled, InvalidParams, InvalidRequest, ParseError
from schemas.problems import problem
from schemas.tables import MAX_DIMS, CalledOperation
from schemas.tensors import TensorMeta

__all__ = ["HEAD_LENGTH", "Metas", "OipIntake", "read_inference"]

HEAD_LENGTH = "inference-header-content-length"
_HEADER = "Inference-Header-Content-Length"

Metas = Mapping[str, TensorMeta | list[int]]
Check = Callable[[InferRequest, Metas, bool], Awaitable[None]]

_INTEGERS = ("s32", "s64")
# A document of this size is parsed in less than a millisecond.
_SMALL = 16 << 10


class OipIntake:
    """Take the body of one inference request in chunks; `finish` gives it with its tensors in segments.

    `check` sees request and inputs before any tensor's bytes are taken, and refuses by raising. Its last
    argument says whether the values of the `weights_shape` input are known; while they are still to come it
    is called once more, with them, at the end. `forwarded` are parameters that came outside the body.

    Raises `ParseError` and `InvalidRequest` for a body that breaks the protocol, `InvalidParams` for inputs
    that don't hold what they say, `TooLarge` and `Overloaded` when there is no memory for them.
    """

    def __init__(
        self,
        called: CalledOperation,
        holding: Holding,
        regions: Regions,
        *,
        head_length: int | None,
        length: int | None,
        head_limit: int,
        check: Check,
        forwarded: Mapping[str, str] | None = None,
    ) -> None:
        self._called = called
        self._holding = holding
        self._regions = regions
        self._found: dict[str, Region] = {}
        if head_length is not None and not 0 < head_length <= (head_length if length is None else length):
            raise InvalidRequest(f"{_HEADER} is {head_length}, and must be from 1 to the length of the body")
        self._head_left = head_length
        self._head_length = head_length
        self._length = length
        self._check = check
        self._forwarded = forwarded
        self._json = ListsIntake(
            holding, length=length if head_length is None else head_length, max_skeleton=head_limit
        )
        self._request: InferRequest | None = None
        self._segments: dict[str, Segment] = {}
        self._shapes: dict[str, bytearray] = {}  # of weights_shape inputs: a few bytes, off the pool
        self._metas: dict[str, TensorMeta | list[int]] = {}
        self._known = True
        self._targets: deque[memoryview] = deque()

    async def take(self, chunk: bytes) -> None:
        """Take the next bytes of the body."""
        if self._request is None:
            head = chunk if self._head_left is None else chunk[: self._head_left]
            document = self._whole(head)
            if document is None:
                await self._json.take(head)
            if self._head_left is None:
                return
            self._head_left -= len(head)
            if self._head_left:
                return
            await self._open(await self._json.finish() if document is None else document)
            if len(head) == len(chunk):
                return
            self._write(memoryview(chunk)[len(head) :])
        else:
            self._write(memoryview(chunk))

    async def finish(self) -> tuple[InferRequest, dict[str, Segment]]:
        """Give the request and the segments of its tensors by their names; the whole body must have come."""
        if self._request is None:
            if self._head_left:
                raise ParseError(f"the body ends before the {self._head_length} bytes of its inference header")
            await self._open(await self._json.finish())
        if self._targets:
            missing = sum(map(len, self._targets))
            raise ParseError(f"the body ends {missing} bytes before the last of its binary tensors does")
        request = self._request
        assert request is not None
        if not self._known:
            for tensor in request.inputs:
                if tensor.name in self._shapes:
                    self._metas[tensor.name] = _integers(tensor, self._shapes[tensor.name])
            await self._check(request, self._metas, True)
        return request, self._segments

    def _whole(self, head: bytes) -> Any:
        """Parse a head that came in one small piece and has no lists in it: most have not."""
        if len(head) == self._head_length == self._head_left and len(head) <= _SMALL and b'"data"' not in head:
            return parse_document(head)
        return None

    async def _open(self, document: Any) -> None:
        """Read the head, check the call, then take memory for its tensors."""
        request = self._request = read_request(self._called, document, self._forwarded)
        binary = [tensor for tensor in request.inputs if tensor.source == "binary"]
        if binary and self._head_length is None:
            raise InvalidRequest(f"binary tensors need the header {_HEADER}, the length of the JSON before them")
        # A region may be forgotten meanwhile: this call goes on with the one that it found.
        self._found = {tensor.name: self._regions.find(tensor.place) for tensor in request.inputs if tensor.place}
        for tensor in request.inputs:
            self._metas[tensor.name] = await self._meta(tensor)
        await self._check(request, self._metas, self._known)
        self._check_length(sum(tensor.nbytes for tensor in binary))
        for tensor in request.inputs:
            if not self._is_shape(tensor):
                await self._place(tensor)
        for tensor in binary:
            room = self._shapes.get(tensor.name)
            target = self._segments[tensor.name].view if room is None else memoryview(room)
            if tensor.nbytes:
                self._targets.append(target[: tensor.nbytes])

    def _check_length(self, binary: int) -> None:
        """Compare what the head announces with the length of the body, where that is known."""
        if self._length is None or self._head_length is None:
            return
        if (rest := self._length - self._head_length) != binary:
            raise ParseError(f"the binary tensors need {binary} bytes after the JSON, and the body has {rest}")

    async def _meta(self, tensor: InputTensor) -> TensorMeta | list[int]:
        """Find what the check needs of an input: its dtype and shape, or its values when it is a shape."""
        if tensor.numbers is not None:
            with _named(tensor.name):
                tensor.numbers.check(tensor.shape)
        if not self._is_shape(tensor):
            return tensor.meta
        if tensor.dtype.name not in _INTEGERS or len(tensor.shape) != 1 or tensor.shape[0] > MAX_DIMS:
            message = f"{tensor.name} must be INT32 or INT64, of 1 dimension with at most {MAX_DIMS} values"
            raise InvalidParams(message, errors=[problem(["inputs", tensor.name], message, "shape_dtype")])
        if tensor.numbers is not None:
            with _named(tensor.name):
                return tensor.numbers.integers()
        room = bytearray(tensor.nbytes)
        if tensor.place is not None:
            await self._found[tensor.name].read(tensor.place.offset, memoryview(room))
            return _integers(tensor, room)
        self._shapes[tensor.name] = room
        self._known = False
        return TensorMeta("s32", tensor.shape)  # either width will do, and the rules know one

    async def _place(self, tensor: InputTensor) -> None:
        """Take the memory of a tensor, and bring there what has come already."""
        if tensor.numbers is not None:
            with _named(tensor.name):
                segment = await tensor.numbers.collect(tensor.dtype)
        else:
            segment = await self._holding.acquire_async(tensor.nbytes)
        self._segments[tensor.name] = segment
        if tensor.place is not None:
            await self._found[tensor.name].read(tensor.place.offset, segment.view[: tensor.nbytes])

    def _is_shape(self, tensor: InputTensor) -> bool:
        return self._called.operation.input_spellings.get(tensor.name) == "weights_shape"

    def _write(self, data: memoryview) -> None:
        while data:
            if not self._targets:
                raise ParseError(f"the body goes on for {len(data)} bytes or more after the last of its tensors")
            target = self._targets[0]
            count = min(len(target), len(data))
            target[:count] = data[:count]
            data = data[count:]
            if count == len(target):
                self._targets.popleft()
            else:
                self._targets[0] = target[count:]


async def read_inference(
    receive: Receive, headers: Headers, intake: OipIntake, timings: Timings, *, body_limit: int
) -> None:
    """Pass the body to `intake` as it arrives, decoded where it is coded; raises what that raises.

    Raises `Cancelled` when the client leaves, `UnsupportedMediaType` for an unknown content coding.
    """
    decoder = decoder_of(headers.get("content-encoding", ""), body_limit)
    more = True
    while more:
        with timings.measure("receive"):
            message = await receive()
        if message["type"] == "http.disconnect":
            raise Cancelled("the client left before its request was complete")
        chunk, more = message.get("body", b""), message.get("more_body", False)
        with timings.measure("decode"):
            await _pass_on(chunk, intake, decoder)
    if decoder is not None:
        decoder.close()


async def _pass_on(chunk: bytes, intake: OipIntake, decoder: Decoder | None) -> None:
    if decoder is None:
        await intake.take(chunk)
        return
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


def _integers(tensor: InputTensor, data: bytes | bytearray) -> list[int]:
    return [int(value) for value in np.frombuffer(data, tensor.dtype.numpy)]
