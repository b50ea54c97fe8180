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
from app.intake.lease import Lease
from app.intake.requests import RequestObject
from app.intake.sinks import NpySink, TensorFault
from app.intake.tensors import Input, check_shape_tensor, npy_tensor, shape_list
from convgrad._errors import InvalidParams, InvalidRequest, ParseError, TooLarge, Unsupported, UnsupportedMediaType
from convgrad._npy import NpyHeader
from schemas.broken_rules import BrokenRule, broken_rule, dims, invalid_params, safe_key, too_large
from schemas.tensors import WireTensor, read_tensor

__all__ = ["MultipartBody"]

_MAX_BOUNDARY = 70  # RFC 2046
_ENCODINGS = ("", "binary", "8bit", "7bit")

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
        self._text: list[bytes | memoryview] | None = None  # of the request
        self._length = 0
        self._request: RequestObject | None = None
        self._part: _TensorPart | None = None
        self._parts: dict[str, _TensorPart] = {}  # by canonical name
        self._checked = False
        self._parser = _Parser(_boundary(content_type))

    async def request(self, chunks: AsyncIterator[bytes | memoryview]) -> RequestObject:
        """Read the whole body."""
        async for chunk in chunks:
            if isinstance(chunk, memoryview):
                assert self._part is not None
                self._part.sink.placed(len(chunk))
            else:
                for event in self._parser.feed(chunk):
                    await self._take(event)
                if self._request is not None and not self._checked and not self._parser.ended:
                    await self._check_arrived()
                if self._part is not None and self._parser.in_data and (room := self._part.sink.room()):
                    self._lease.place(room)
            if self._bound is not None:
                self._bound -= len(chunk)
        if not self._parser.ended:
            raise ParseError("the multipart body ends before its closing boundary")
        if self._request is None:
            raise _no_request()
        return await self._request.with_parts(self._arrived()).read()

    async def _take(self, event: _Event) -> None:
        if isinstance(event, Mapping):
            await self._open(event)
        elif self._part is not None:
            await self._part.write(event)
        elif event is not None and self._text is not None:
            self._text.append(event)
            self._length += len(event)
            if self._length > self._limit:
                msg = f"the request may have at most {self._limit} bytes"
                raise TooLarge(msg, data={"reason": "json", "limit": self._limit})
        elif self._text is not None:
            self._request = await self._read(await parse_json(self._text, self._lease))

    async def _open(self, headers: Mapping[str, str]) -> None:
        name = _name(headers.get("content-disposition", ""), headers.get("content-transfer-encoding", ""))
        if self._text is None:
            if name != "request":
                raise _no_request()
            self._text = []
            return
        self._part = self._tensor_part(name)

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
        part = _TensorPart(
            called, name, wire, self._lease, self._bound, self._check_arrived, is_shape=rows.is_shape(name)
        )
        self._parts[row] = part
        return part

    def _arrived(self) -> dict[str, tuple[str, Input]]:
        inputs = {row: (part.name, part.input()) for row, part in self._parts.items()}
        return {row: (name, value) for row, (name, value) in inputs.items() if value is not None}

    async def _check_arrived(self) -> None:
        """Check what is known before the data of a tensor arrives: what has no data yet may come as a part."""
        assert self._request is not None
        self._checked = True
        given = {name: value for name, value in self._request.inputs.items() if _has_data(value)}
        request = replace(self._request, inputs=given).with_parts(self._arrived())
        if self._request.rows.shape_input in self._parts.keys() - self._arrived().keys():
            request = request.without_shape()
        await self._check(await request.read())


class _TensorPart:
    """One `.npy` part: its sink, and its faults as errors of the call."""

    def __init__(
        self,
        called: str,
        name: str,
        wire: WireTensor,
        lease: Lease,
        bound: int | None,
        on_missing: Callable[[], Awaitable[None]],
        *,
        is_shape: bool,
    ) -> None:
        self.name = name
        self._called = called
        self._wire = wire
        self._is_shape = is_shape
        self._on_missing = on_missing
        self.sink = NpySink(lease, self._check, bound=bound)

    async def write(self, data: memoryview | None) -> None:
        """Take the next bytes of the file, or None at its end."""
        with self._named():
            if data is None:
                self.sink.close()
            else:
                await self.sink.write(data)

    def input(self) -> Input | None:
        """Return the tensor, or the values of a shape; None for those that are not known yet."""
        header = self.sink.header
        if header is None or (self._is_shape and self.sink.missing):
            return None
        with self._named():
            tensor = npy_tensor(header, self._wire.dtype, self.sink)
            return shape_list(tensor) if self._is_shape else tensor

    async def _check(self, header: NpyHeader, complete: bool) -> None:
        kind = self.sink.dtype(self._wire.dtype)
        if self._wire.shape is not None and self._wire.shape != header.shape:
            message = f"the request gives shape {dims(self._wire.shape)}, but the file has {dims(header.shape)}"
            raise TensorFault(message, "shape")
        if self._is_shape:
            check_shape_tensor(kind, header.shape)
        if not complete:
            await self._on_missing()

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except TensorFault as fault:
            raise _refusal(self._called, self.name, f"{self.name}: {fault.message}", fault.kind) from None
        except Unsupported as error:
            if "errors" in error.data:
                raise
            wrong = broken_rule(["inputs", self.name], f"{self.name}: {error.message}", "unsupported_dtype")
            raise Unsupported(wrong["msg"], data={"errors": [wrong]}) from None
        except TooLarge as error:
            raise error if "loc" in error.data else too_large(error, ["inputs", self.name], self.name) from None


class _Parser:
    """Split a body into its parts as it arrives; `ended` once its closing boundary has, whatever follows."""

    def __init__(self, boundary: bytes) -> None:
        self.ended = False
        self._events: list[_Event] = []
        self._headers: dict[str, str] = {}
        self._field = self._value = b""
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._on_part_begin,
                "on_header_field": self._on_header_field,
                "on_header_value": self._on_header_value,
                "on_header_end": self._on_header_end,
                "on_headers_finished": lambda: self._events.append(self._headers),
                "on_part_data": lambda data, start, end: self._events.append(memoryview(data)[start:end]),
                "on_part_end": lambda: self._events.append(None),
                "on_end": self._on_end,
            },
        )

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

    def _on_part_begin(self) -> None:
        self._headers = {}

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._field += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _on_header_end(self) -> None:
        self._headers[self._field.decode("latin-1").lower()] = self._value.decode("latin-1").strip()
        self._field = self._value = b""

    def _on_end(self) -> None:
        self.ended = True


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
