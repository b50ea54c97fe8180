"""Targets that drive one parser each, compared with another reader of the same format where there is one.

The first byte of an input selects how the rest is split, because no result may depend on that.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import struct
import tempfile
import zlib
from collections.abc import Awaitable, Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from app.intake.body import parse_text
from app.intake.elements import TensorFault, elements_of
from app.intake.lease import Lease
from app.intake.multipart import NpyPart
from app.pool.buffers import SegmentPool
from app.telemetry.context import RequestContext
from convgrad._assembly import Assembly
from convgrad._dtypes import DTYPES
from convgrad._errors import ConvgradError, Forbidden, InvalidParams, NotFound, ParseError
from convgrad._frames import MAGIC, FrameDecoder
from convgrad._mcp.local import LocalCalls
from convgrad._npy import parse_header
from schemas.tensors import WireTensor

__all__ = ["RUNNER", "assembly", "frames", "json_text", "lists", "npy", "paths", "pieces"]

RUNNER = asyncio.Runner()
_TEMPORARY = tempfile.TemporaryDirectory(prefix="convgrad-fuzz-")
"""The event loop of all targets: a new one per input would take most of the time."""

_POOL = SegmentPool(8 << 20)
_STEPS = (1 << 20, 1, 2, 3, 7, 64, 511, 513)
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
        sink = NpyPart("src", WireTensor(None, None), lease, len(file))
        for piece in pieces(file, how):
            await sink.write(sink.parse(piece))
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


def json_text(data: bytes) -> None:
    """Parse a JSON body: an accepted one is JSON with the same content."""
    try:
        found = parse_text(data)
    except ParseError:
        return
    expected = json.loads(data.removeprefix(b"\xef\xbb\xbf").decode())
    assert repr(found) == repr(expected), found


def lists(data: bytes) -> None:
    """Convert lists of numbers: accepted ones are what NumPy makes of them."""
    try:
        values = parse_text(b"[" + data + b"]")
        shape = np.shape(values)
        elements = elements_of(values, DTYPES["f64"], shape)
    except (ConvgradError, TensorFault, ValueError):
        return
    words = data.replace(b'"', b"")
    np.testing.assert_array_equal(elements.reshape(shape), np.array(json.loads(b"[" + words + b"]"), float))


def _outcome(read: Callable[[Lease, int], Awaitable[Any]], how: int) -> Any:
    """Run `read` with memory from the pool, all of which must be freed; return our own errors as values."""

    async def held() -> Any:
        with Lease(_POOL, RequestContext("id")) as lease:
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


def paths(data: bytes) -> None:
    """Give a tool of `convgrad mcp` a path: a file below the allowed folder, or an error of ours."""
    path, root = data.decode("utf-8", "replace"), _folder()
    try:
        found = LocalCalls(root).existing(path)
    except (Forbidden, NotFound):
        return
    assert found.is_file()
    assert os.path.realpath(found).startswith(f"{root}{os.sep}"), (path, found)


@cache
def _folder() -> Path:
    """Make a folder with a file, a folder, links out of it, and a link to itself; return its path."""
    root = Path(os.path.realpath(_TEMPORARY.name)) / "root"
    (root / "folder").mkdir(parents=True)
    for file in (root / "real.npy", root / "folder" / "real.npy", root.parent / "outside.npy"):
        file.write_bytes(b"")
    (root / "link").symlink_to(root.parent)
    (root / "loop").symlink_to("loop")
    (root / "hidden").symlink_to("loop/../link/outside.npy")
    return root
