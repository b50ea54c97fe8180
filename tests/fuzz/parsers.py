"""Targets that drive one parser each, compared with another reader of the same format where there is one.

The first byte of an input selects how the rest is split, because no result may depend on that.
"""

from __future__ import annotations

import asyncio
import io
import json
import struct
import zlib
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import numpy as np

from app.intake.inline import InlineTensor
from app.intake.json import JsonIntake
from app.intake.lease import Lease
from app.intake.numbers import Numbers
from app.intake.sinks import NpySink, TensorFault
from app.intake.values import TensorValues
from app.pool.buffers import SegmentPool
from convgrad._assembly import Assembly
from convgrad._errors import ConvgradError, InvalidParams
from convgrad._frames import MAGIC, FrameDecoder
from convgrad._npy import parse_header

__all__ = ["RUNNER", "assembly", "frames", "json_tensors", "lists", "npy", "pieces"]

RUNNER = asyncio.Runner()
"""The event loop of all targets: a new one per input would take most of the time."""

_POOL = SegmentPool(8 << 20)
_STEPS = (1 << 20, 1, 2, 3, 7, 64, 511, 513)
_LARGEST = 1 << 16
_PRINTABLE = bytes(range(32, 127))
_NUMPY_HEADERS: dict[int, Callable[..., Any]] = {
    1: np.lib.format.read_array_header_1_0,
    2: np.lib.format.read_array_header_2_0,
}


def pieces(data: bytes, how: int) -> Iterator[bytes]:
    """Split `data` in one of eight ways, into at most some dozens of pieces."""
    step = max(_STEPS[how & 7], len(data) >> 6)
    return (data[start : start + step] for start in range(0, len(data), step))


def npy(data: bytes) -> None:
    """Read a .npy file: pieces give the same result as the whole, and NumPy reads every accepted header alike."""
    how, file = data[0] if data else 0, data[1:]

    async def land(lease: Lease, how: int) -> Any:
        sink = NpySink(lease, bound=len(file))
        for piece in pieces(file, how):
            sink.write(piece)
            await sink.supply()
        sink.close()
        return sink.header, sink.content()

    whole, cut = _outcome(land, 0), _outcome(land, how)
    assert whole == cut or type(whole) is type(cut) is not tuple, (whole, cut)
    try:
        header = parse_header(file)
    except ConvgradError:
        return
    # We reject white space other than blanks; NumPy, which parses the header as Python, accepts it.
    plain = header is not None and not file[12 : header.offset - 1].translate(None, _PRINTABLE)
    if header is not None and plain and (read := _NUMPY_HEADERS.get(file[6])):
        shape, fortran_order, dtype = read(io.BytesIO(file[8:]), max_header_size=1 << 20)
        assert (shape, fortran_order, dtype) == (header.shape, header.fortran_order, np.dtype(header.descr))


def frames(data: bytes) -> None:
    """Decode tensor frames: pieces give the same result as the whole; half of the inputs get a right checksum."""
    how, stream = data[0] if data else 0, data[1:]
    if how & 8:
        stream = _mended(stream)
    assert _frames(stream, how) == _frames(stream, 0)


def _frames(stream: bytes, how: int) -> list[Any]:
    decoder, found = FrameDecoder(max_json=1 << 14, max_body=1 << 20), list[Any]()
    try:
        for piece in pieces(stream, how):
            for frame in decoder.decode(piece):
                found.append((frame.header, bytes(frame.body)))
        decoder.close()
    except ConvgradError as error:
        found.append((type(error), error.message))
    return found


def _mended(stream: bytes) -> bytes:
    """Repair the first frame: set its lengths and checksum to match its bytes."""
    json_length, rest = stream[8:9], stream[16:]
    size = min(json_length[0] if json_length else 0, len(rest))
    return _frame(rest[:size], rest[size:])


def _frame(text: bytes, body: bytes) -> bytes:
    return struct.pack("<IIQ", MAGIC, len(text), len(body)) + text + body + struct.pack("<I", zlib.crc32(text + body))


def assembly(data: bytes) -> None:
    """Assemble a reply from valid frames with any headers and bodies, alternating lines of the input."""
    how, lines = data[0] if data else 0, data[1:].split(b"\n")
    stream = b"".join(_frame(lines[at], b"".join(lines[at + 1 : at + 2])) for at in range(0, len(lines), 2))
    reader = Assembly()
    try:
        for piece in pieces(stream, how):
            for _ in reader.feed(piece):
                pass
        reader.close()
    except ConvgradError:
        pass


def json_tensors(data: bytes) -> None:
    """Read a JSON body as it arrives: an accepted one is JSON with the same content, however it was split."""
    how, body = data[0] if data else 0, data[1:]

    async def read(lease: Lease, how: int) -> Any:
        intake = JsonIntake(TensorValues(lease), length=len(body) if how & 8 else None, max_skeleton=_LARGEST)
        for piece in pieces(body, how):
            await intake.take(piece)
        document = intake.finish()
        # Once a tensor's text is rejected, the rest of it is not examined.
        return _fault(document) or document

    _compare(body, _outcome(read, how), _outcome(read, how & 8))


def lists(data: bytes) -> None:
    """Read a JSON body with lists of numbers: an accepted one is JSON with the same numbers, however it was split."""
    how, body = data[0] if data else 0, data[1:]

    async def read(lease: Lease, how: int) -> Any:
        intake = JsonIntake(TensorValues(lease, only_lists=True), length=len(body), max_skeleton=_LARGEST)
        for piece in pieces(body, how):
            await intake.take(piece)
        document = await intake.finish_async()
        return _fault(document) or document

    _compare(body, _outcome(read, how), _outcome(read, 0))


def _fault(document: Any) -> ConvgradError | None:
    if isinstance(document, InlineTensor | Numbers) and document.fault is not None:
        return InvalidParams("a tensor is wrong in itself", errors=[])
    inner = document.values() if isinstance(document, dict) else document if isinstance(document, list) else ()
    return next(filter(None, map(_fault, inner)), None)


def _compare(body: bytes, found: Any, whole: Any) -> None:
    """Compare a document with the one read whole, and both with the standard parser's."""
    refused = isinstance(found, ConvgradError)
    assert refused == isinstance(whole, ConvgradError), (found, whole)
    if not refused:
        expected = json.loads(body.removeprefix(b"\xef\xbb\xbf").decode())
        assert _same(found, expected), found
        assert _same(whole, expected), whole


def _same(found: Any, expected: Any) -> bool:
    """Compare two documents; a tensor's text may have become a placeholder, and a list the count of its numbers."""
    if isinstance(found, InlineTensor):
        return isinstance(expected, str)
    if isinstance(found, Numbers):
        return isinstance(expected, list) and found.count == _count(expected)
    if type(found) is not type(expected):
        return False
    if isinstance(found, dict):
        return list(found) == list(expected) and all(_same(value, expected[name]) for name, value in found.items())
    if isinstance(found, list):
        return len(found) == len(expected) and all(map(_same, found, expected))
    return bool(found == expected)


def _count(value: Any) -> int:
    return sum(map(_count, value)) if isinstance(value, list) else 1


def _outcome(read: Callable[[Lease, int], Awaitable[Any]], how: int) -> Any:
    """Run `read` with memory from the pool, all of which must be freed; return our own errors as values."""

    async def held() -> Any:
        with Lease(_POOL) as lease:
            try:
                return await read(lease, how)
            except ConvgradError as error:
                return error.with_traceback(None)
            except TensorFault as fault:
                return InvalidParams(fault.message, errors=[])

    outcome = RUNNER.run(held())
    if isinstance(outcome, ConvgradError):
        assert _POOL.stats().used == 0
    return outcome
