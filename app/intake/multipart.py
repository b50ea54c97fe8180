"""Read a multipart/form-data body as it arrives: the request object first, then one `.npy` part per tensor.

What has arrived is checked before memory is allocated for a tensor that has not.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, MultipartState, parse_options_header

from app.caching import cached_if_short
from app.intake.body import parse_json
from app.intake.elements import Sink, TensorFault, npy_dtype
from app.intake.lease import Lease
from app.intake.requests import RequestObject
from app.intake.tensors import Input, check_shape_tensor, npy_tensor, shape_list
from convgrad._errors import InvalidParams, InvalidRequest, ParseError, TooLarge, Unsupported, UnsupportedMediaType
from convgrad._npy import HEADER_LIMIT, NpyHeader, parse_header
from schemas.broken_rules import BrokenRule, broken_rule, dims, invalid_params, safe_key, too_large
from schemas.tensors import WireTensor, read_tensor

__all__ = ["MultipartBody", "NpyPart"]

_MAX_BOUNDARY = 70  # RFC 2046
_ENCODINGS = ("", "binary", "8bit", "7bit")
# The most that a header of a file can need: magic, version, length field, text.
_HEAD = HEADER_LIMIT + 12

_Event = Mapping[str, str] | memoryview | None
"""The headers of a part, by lower-case name, then any number of pieces of its data, then None at its end."""


class MultipartBody:
    """Read a multipart body whose first part, of at most `limit` bytes, holds the request object.

    `read` makes a request object of that JSON; `check` rejects one of which data is still missing. Raises
    `UnsupportedMediaType` for a content type without a usable boundary, `ParseError` for a body that is not multipart,
    `InvalidRequest` when the request does not come first, and `InvalidParams` for unknown parts and invalid tensors.
    """

    def __init__(
        self,
        content_type: str,
        lease: Lease,
        read: Callable[[Any], Awaitable[RequestObject]],
        check: Callable[[RequestObject], Awaitable[object]],
        *,
        length: int | None = None,
        limit: int,
    ) -> None:
        self._lease = lease
        self._read = read
        self._check = check
        self._bound = length
        self._limit = limit
        self._text: bytearray | None = None  # of the request
        self._request: RequestObject | None = None
        self._part: NpyPart | None = None
        self._parts: dict[str, NpyPart] = {}  # by canonical name
        self._checked = False
        self._parser = _Parser(_boundary(content_type))

    async def request(self, chunks: AsyncIterator[bytes | memoryview]) -> RequestObject:
        """Read the whole body."""
        async for chunk in chunks:
            if isinstance(chunk, memoryview):
                assert self._part is not None
                self._part.received += len(chunk)
            else:
                for event in self._parser.feed(chunk):
                    await self._take(event)
                if self._request is not None and not self._checked and not self._parser.ended:
                    await self._check_arrived()
                if self._part is not None and self._parser.in_data and (room := self._part.room()):
                    self._lease.place(room)
            if self._bound is not None:
                self._bound -= len(chunk)
        if not self._parser.ended:
            raise ParseError("the multipart body ends before its closing boundary")
        if self._request is None:
            raise _no_request()
        return await replace(self._request, inputs={**self._request.inputs, **self._arrived()}).read()

    async def _take(self, event: _Event) -> None:
        if isinstance(event, Mapping):
            name = _name(event.get("content-disposition", ""), event.get("content-transfer-encoding", ""))
            if self._text is not None:
                self._part = self._tensor_part(name)
            elif name == "request":
                self._text = bytearray()
            else:
                raise _no_request()
        elif self._part is not None:
            assert self._request is not None
            with _named(self._request.called_as, self._part.name):
                await self._write(self._part, event)
        elif event is not None and self._text is not None:
            self._text += event
            if len(self._text) > self._limit:
                msg = f"the request may have at most {self._limit} bytes"
                raise TooLarge(msg, data={"reason": "json", "limit": self._limit})
        elif self._text is not None:
            text, self._text = self._text, bytearray()
            self._request = await self._read(await parse_json(text, self._lease))

    async def _write(self, part: NpyPart, data: memoryview | None) -> None:
        """Write the next bytes of a part, or end it; before memory is allocated for its data, the call is checked."""
        if data is None:
            part.close()
            return
        rest = part.parse(data)
        if part.header is not None and not part.received and len(rest) < part.nbytes:
            await self._check_arrived()
        await part.write(rest)

    def _tensor_part(self, name: str) -> NpyPart:
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
        inputs = dict(self._request.inputs)
        spelled = next((each for each in inputs if rows.input_spellings.get(each) == row), None)
        description = None if spelled is None else inputs.pop(spelled)
        wire = WireTensor(None, None) if description is None else read_tensor(description, ["inputs", name], broken)
        if broken or wire is None:
            raise invalid_params(called, broken)
        if wire.member is not None:
            raise _refusal(called, name, f"{name} is in the request and in a part: give one", "conflict")
        part = self._parts[row] = NpyPart(name, wire, self._lease, self._bound, is_shape=rows.is_shape(name))
        self._request = replace(self._request, inputs=inputs)  # without the description
        return part

    def _arrived(self) -> dict[str, Input]:
        assert self._request is not None
        inputs: dict[str, Input] = {}
        for part in self._parts.values():
            with _named(self._request.called_as, part.name):
                if (value := part.input()) is not None:
                    inputs[part.name] = value
        return inputs

    async def _check_arrived(self) -> None:
        """Check what is known before the data of a tensor arrives: what has no data yet may come as a part."""
        assert self._request is not None
        self._checked = True
        inputs = {name: value for name, value in self._request.inputs.items() if _has_data(value)} | self._arrived()
        request = replace(self._request, inputs=inputs)
        shape = self._parts.get(request.rows.shape_input or "")
        if shape is not None and shape.name not in inputs:
            request = request.without_shape()
        await self._check(await request.read())


class NpyPart(Sink):
    """Receive a `.npy` file, of at most `bound` bytes: its header is parsed, its data goes to byte 0 of the memory.

    `wire` is the description of the tensor in the request. Every method raises `TensorFault`.
    """

    def __init__(self, name: str, wire: WireTensor, lease: Lease, bound: int | None, *, is_shape: bool = False) -> None:
        super().__init__(lease)
        self.name = name
        self.header: NpyHeader | None = None
        self._wire = wire
        self._bound = bound
        self._is_shape = is_shape
        self._head = bytearray()

    def parse(self, data: bytes | memoryview) -> bytes | memoryview:
        """Take the header from the next bytes of the file; return those that follow it."""
        if self.header is not None:
            return data
        before = len(self._head)
        self._head += data[:_HEAD]
        try:
            header = self.header = parse_header(self._head)
        except ParseError as error:
            raise TensorFault(error.message, "npy") from None
        if header is None:
            return b""
        self._head.clear()
        self.nbytes = header.nbytes
        if self._bound is not None and self.nbytes > (most := self._bound - header.offset):
            message = f"dtype and shape need {self.nbytes} bytes, but at most {most} can still arrive"
            raise TensorFault(message, "size")
        dtype = npy_dtype(header, self._wire.dtype)
        if self._wire.shape is not None and self._wire.shape != header.shape:
            message = f"the request gives shape {dims(self._wire.shape)}, but the file has {dims(header.shape)}"
            raise TensorFault(message, "shape")
        if self._is_shape:
            check_shape_tensor(dtype, header.shape)
        return memoryview(data)[header.offset - before :]

    async def write(self, data: bytes | memoryview) -> None:
        """Receive the next bytes of the data, which follow the header."""
        if len(data) > self.missing:
            raise TensorFault(f"dtype and shape need {self.nbytes} bytes, but more arrived", "size")
        if self.header is not None:
            await super().write(data)

    def close(self) -> None:
        """Check that the header and all of its data have arrived."""
        if self.header is None:
            raise TensorFault("the .npy data ends inside its header", "npy")
        if self.missing:
            raise TensorFault(f"dtype and shape need {self.nbytes} bytes, but {self.received} arrived", "size")

    def input(self) -> Input | None:
        """Return the tensor, or the values of a shape; None for those that are not known yet."""
        if self.header is None or (self._is_shape and self.missing):
            return None
        tensor = npy_tensor(self.header, self._wire.dtype, self)
        return shape_list(tensor) if self._is_shape else tensor


@contextmanager
def _named(called: str, name: str) -> Iterator[None]:
    """Make errors of the call of what is wrong with one tensor."""
    try:
        yield
    except TensorFault as fault:
        raise _refusal(called, name, f"{name}: {fault.message}", fault.kind) from None
    except Unsupported as error:
        if "errors" in error.data:
            raise
        wrong = broken_rule(["inputs", name], f"{name}: {error.message}", "unsupported_dtype")
        raise Unsupported(wrong["msg"], data={"errors": [wrong]}) from None
    except TooLarge as error:
        raise error if "loc" in error.data else too_large(error, ["inputs", name], name) from None


class _Parser:
    """Split a body into its parts as it arrives."""

    def __init__(self, boundary: bytes) -> None:
        self._events: list[_Event] = []
        self._headers: dict[str, str] = {}
        self._field, self._value = bytearray(), bytearray()
        self._parser = MultipartParser(
            boundary,
            {
                "on_header_field": lambda data, start, end: self._field.extend(data[start:end]),
                "on_header_value": lambda data, start, end: self._value.extend(data[start:end]),
                "on_header_end": self._on_header_end,
                "on_headers_finished": self._on_headers_finished,
                "on_part_data": lambda data, start, end: self._events.append(memoryview(data)[start:end]),
                "on_part_end": lambda: self._events.append(None),
            },
        )

    @property
    def ended(self) -> bool:
        """Whether the closing boundary has arrived, whatever follows it."""
        return self._parser.state == MultipartState.END

    @property
    def in_data(self) -> bool:
        """Whether the next bytes belong to the open part unless they are a boundary."""
        return self._parser.state == MultipartState.PART_DATA and not self._parser.index

    def feed(self, chunk: bytes) -> list[_Event]:
        """Parse the next bytes; return what is in them. Raises `ParseError`."""
        try:
            if not self.ended:
                self._parser.write(chunk)
        except MultipartParseError:
            raise ParseError("the body is not valid multipart/form-data with the declared boundary") from None
        events, self._events = self._events, []
        return events

    def _on_header_end(self) -> None:
        self._headers[self._field.decode("latin-1").lower()] = self._value.decode("latin-1").strip()
        self._field, self._value = bytearray(), bytearray()

    def _on_headers_finished(self) -> None:
        self._events.append(self._headers)
        self._headers = {}


@cached_if_short
def _name(disposition: str, encoding: str) -> str:
    """Return a part's name; raises `InvalidRequest` without one, or for an encoded part."""
    kind, options = parse_options_header(disposition)
    if kind != b"form-data" or b"name" not in options:
        raise InvalidRequest('every part needs the header Content-Disposition: form-data; name=".."')
    if encoding.lower() not in _ENCODINGS:
        raise InvalidRequest("a part must not have a Content-Transfer-Encoding other than binary")
    return options[b"name"].decode("utf-8", "replace")


@cached_if_short
def _boundary(content_type: str) -> bytes:
    kind, options = parse_options_header(content_type)
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not boundary or len(boundary) > _MAX_BOUNDARY:
        raise UnsupportedMediaType(f"multipart/form-data needs a boundary of 1 to {_MAX_BOUNDARY} characters")
    return boundary


def _has_data(description: Any) -> bool:
    return not isinstance(description, Mapping) or "data" in description or "npy" in description


def _no_request() -> InvalidRequest:
    return InvalidRequest("the first part must be named request and hold the request object")


def _refusal(called: str, name: str, message: str, kind: str) -> InvalidParams:
    return invalid_params(called, [broken_rule(["inputs", name], message, kind)])
