"""Read a multipart/form-data body as it arrives: the request object first, then one `.npy` part per tensor.

The call is known as soon as the header of the last tensor is, before that tensor's data is received.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from python_multipart.multipart import parse_options_header

from app.caching import cached_if_short
from app.intake.body import ReadRequest
from app.intake.json import JsonIntake
from app.intake.lease import Lease
from app.intake.parts import PartEvent, PartReader
from app.intake.requests import Arrived, Begun, Known, RequestEvent, RequestObject
from app.intake.sinks import NpySink, TensorFault
from app.intake.tensors import Input, check_shape_tensor, npy_tensor, shape_list
from app.intake.values import TensorValues
from convgrad._errors import InvalidParams, InvalidRequest, ParseError, TooLarge, Unsupported, UnsupportedMediaType
from convgrad._npy import NpyHeader
from schemas.broken_rules import BrokenRule, broken_rule, dims, invalid_params, safe_key, too_large
from schemas.dumps import is_dump
from schemas.tensors import WireTensor, read_tensor

__all__ = ["MultipartIntake"]

_MAX_BOUNDARY = 70  # RFC 2046
_HEADER_BYTES = 4096
_ENCODINGS = (b"", b"binary", b"8bit", b"7bit")


class MultipartIntake:
    """Read a multipart body; `events` yields what has arrived.

    `read_request` makes a request object of the JSON in the first part, of at most `max_request` bytes. Raises
    `UnsupportedMediaType` for a content type without a usable boundary, `ParseError` for a body that is not multipart,
    `InvalidRequest` when the request does not come first, and `InvalidParams` for unknown parts and invalid tensors.
    """

    def __init__(
        self,
        content_type: str,
        read_request: ReadRequest,
        lease: Lease,
        *,
        length: int | None = None,
        max_request: int,
    ) -> None:
        self._read_request = read_request
        self._max_request = max_request
        self._lease = lease
        self._bound = length
        self._request: RequestObject | None = None
        self._told = self._begun = False  # whether `Known`, and `Begun`, was yielded
        self._head: JsonIntake | None = None
        self._body: _TensorPart | None = None
        self._parts: dict[str, _TensorPart] = {}  # by canonical name
        self._coming: dict[str, _TensorPart] = {}  # those that were not complete at the last `supply`
        self._missing: set[str] = set()  # inputs whose dtype, shape or values are not known yet
        self._reader = PartReader(_boundary(content_type), max_header_bytes=_HEADER_BYTES)

    async def events(self, chunks: AsyncIterator[bytes | memoryview]) -> AsyncIterator[RequestEvent]:
        """Read the whole body."""
        async for chunk in chunks:
            if isinstance(chunk, memoryview):
                if (arrived := self._placed(len(chunk))) is not None:
                    yield arrived
            else:
                for event in self._reader.feed(chunk):
                    await self._take(event)
                if self._bound is not None:
                    self._bound -= len(chunk)
                if (call := await self._known()) is not None:
                    yield call
                await self._supply()
                if self._body is not None and self._reader.in_body:
                    self._lease.place([self._body.sink.room()])
        if not self._reader.ended:
            raise ParseError("the multipart body ends before its closing boundary")
        if self._request is None:
            raise _no_request()
        yield Known(await self._read())

    async def _take(self, event: PartEvent) -> None:
        if isinstance(event, dict):
            self._open(event)
        elif self._body is not None:
            self._body.write(event)
        elif self._head is not None and event is not None:
            await self._head.take(bytes(event))
        elif self._head is not None:
            self._request = await self._read_request(await self._head.finish_async())
            self._missing = _needed(self._request)

    def _placed(self, count: int) -> Arrived | None:
        """Count bytes that were read straight into their tensor."""
        assert self._body is not None
        self._body.sink.placed(count)
        if self._bound is not None:
            self._bound -= count
        if not self._told:
            return None
        return Arrived.at({row: part.sink for row, part in self._parts.items() if part.in_place})

    async def _known(self) -> Begun | Known | None:
        """Return the call once every dtype and shape is known; before that, its attributes and options, once."""
        self._missing.difference_update([row for row, part in self._coming.items() if part.known])
        if self._request is None or self._told:
            return None
        if not self._missing:
            self._told = True
            return Known(await self._read(), all_described=False)
        if self._begun:
            return None
        self._begun = True
        return Begun({"attributes": self._request.attributes, "options": self._request.options})

    async def _supply(self) -> None:
        """Allocate the memory that the bytes so far need."""
        if self._head is not None:
            await self._head.supply()
        for part in self._coming.values():
            await part.supply()
        self._coming = {row: part for row, part in self._coming.items() if not part.closed}

    def _open(self, headers: dict[bytes, bytes]) -> None:
        name = _name(headers.get(b"content-disposition", b""), headers.get(b"content-transfer-encoding", b""))
        if self._head is None:
            if name != "request":
                raise _no_request()
            self._head = JsonIntake(TensorValues(self._lease), length=self._bound, max_skeleton=self._max_request)
            return
        self._body = self._tensor_part(name)

    def _tensor_part(self, name: str) -> _TensorPart:
        assert self._request is not None
        called, rows = self._request.called_as, self._request.rows
        row = rows.input_spellings.get(name)
        if row is None:
            names = ", ".join(rows.input_spellings)
            message = f"there is no part {safe_key(name)}: the parts are request, {names}"
            raise _refusal(called, safe_key(name), message, "unknown_input")
        if row in self._parts:
            raise _refusal(called, name, f"the part {name} is given twice", "conflict")
        broken: list[BrokenRule] = []
        description = self._request.described(row)
        wire = WireTensor(None, None) if description is None else read_tensor(description, ["inputs", name], broken)
        if broken or wire is None:
            raise invalid_params(called, broken)
        if wire.member is not None:
            raise _refusal(called, name, f"{name} is in the request and in a part: give one", "conflict")
        part = _TensorPart(called, name, wire, self._lease, self._bound, is_shape=rows.is_shape(name))
        self._parts[row] = self._coming[row] = part
        self._missing.add(row)
        return part

    async def _read(self) -> RequestObject:
        assert self._request is not None
        parts = {row: (part.name, part.input()) for row, part in self._parts.items()}
        return await self._request.read(self._lease, parts=parts)


class _TensorPart:
    """One `.npy` part: its sink, and its faults as errors of the call."""

    def __init__(
        self, called: str, name: str, wire: WireTensor, lease: Lease, bound: int | None, *, is_shape: bool
    ) -> None:
        self.name = name
        self.closed = False
        self._called = called
        self._wire = wire
        self._is_shape = is_shape
        self.sink = NpySink(lease, bound=bound, own=not is_shape, on_header=self._check)

    @property
    def known(self) -> bool:
        """Whether everything that the operation's rules need of it has arrived."""
        return self.closed if self._is_shape else self.sink.header is not None

    @property
    def in_place(self) -> bool:
        """Whether the bytes received so far are where and in the order that the kernels read them."""
        header = self.sink.header
        moves = header is None or header.big_endian or (header.fortran_order and len(header.shape) > 1)
        return not (moves or self._is_shape) and self.sink.in_place

    def write(self, data: memoryview | None) -> None:
        """Take the next bytes of the file, or None at its end."""
        with self._named():
            if data is not None:
                self.sink.write(data)
                return
            self.sink.close()
        self.closed = True

    async def supply(self) -> None:
        with self._named():
            await self.sink.supply()

    def input(self) -> Input:
        """Return the tensor; `supply` allocates its memory."""
        tensor = npy_tensor(self.sink, self._wire.dtype)
        if not self._is_shape:
            return tensor
        with self._named():
            return shape_list(tensor)

    def _check(self, header: NpyHeader) -> None:
        kind = self.sink.dtype(self._wire.dtype)
        if self._wire.shape is not None and self._wire.shape != header.shape:
            message = f"the request gives shape {dims(self._wire.shape)}, but the file has {dims(header.shape)}"
            raise TensorFault(message, "shape")
        if self._is_shape:
            check_shape_tensor(kind, header.shape)

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except TensorFault as fault:
            raise _refusal(self._called, self.name, f"{self.name}: {fault.message}", fault.kind) from None
        except Unsupported as error:
            wrong = broken_rule(["inputs", self.name], f"{self.name}: {error.message}", "unsupported_dtype")
            raise Unsupported(wrong["msg"], data={"errors": [wrong]}) from None
        except TooLarge as error:
            raise too_large(error, ["inputs", self.name], self.name) from None


@cached_if_short
def _name(disposition: bytes, encoding: bytes) -> str:
    """Return a part's name; raises `InvalidRequest` without one, or for an encoded part."""
    kind, options = parse_options_header(disposition)
    if kind != b"form-data" or b"name" not in options:
        raise InvalidRequest('every part needs the header Content-Disposition: form-data; name=".."')
    if encoding.lower() not in _ENCODINGS:
        raise InvalidRequest("a part must not have a Content-Transfer-Encoding other than binary")
    return options[b"name"].decode("utf-8", "replace")


def _boundary(content_type: str) -> bytes:
    kind, options = parse_options_header(content_type)
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not boundary or len(boundary) > _MAX_BOUNDARY:
        raise UnsupportedMediaType(f"multipart/form-data needs a boundary of 1 to {_MAX_BOUNDARY} characters")
    return boundary


def _needed(request: RequestObject) -> set[str]:
    """Return the inputs whose dtype or shape is still missing."""
    rows = request.rows
    described = {rows.input_spellings.get(name): description for name, description in request.inputs.items()}
    needed = {row.name for row in rows.inputs if row.required or described.get(row.name) is not None}
    is_attribute = is_dump(request.attributes) or any(map(rows.is_shape, request.attributes))
    if rows.shape_input is not None and not is_attribute:
        needed.add(rows.shape_input)
    return {row for row in needed if not _has_meta(described.get(row))}


def _has_meta(description: Any) -> bool:
    """Whether the request's description of an input is all that the check needs."""
    if isinstance(description, list):
        return True
    return isinstance(description, Mapping) and (
        "npy" in description or ("dtype" in description and "shape" in description)
    )


def _no_request() -> InvalidRequest:
    return InvalidRequest("the first part must be named request and hold the request object")


def _refusal(called: str, name: str, message: str, kind: str) -> InvalidParams:
    return invalid_params(called, [broken_rule(["inputs", name], message, kind)])
