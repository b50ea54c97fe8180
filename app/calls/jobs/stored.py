"""Requests and results in the spool, in one form for every API: a multipart body, and an object with its tensors."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncGenerator, Iterator, Mapping
from dataclasses import replace
from io import BufferedReader
from pathlib import Path
from typing import Any

from app.calls.work import Begin, End, Event, Output, Result, Streams, TileReady, Work
from app.intake.lease import Lease
from app.intake.requests import GraphRequest, RequestObject
from app.intake.tensors import Tensor
from app.pool.buffers import Memory
from app.telemetry.context import RequestContext
from app.threads import in_thread_if
from convgrad._errors import InternalError, NotFound
from convgrad._frames import Bytes
from convgrad._multipart import Body, multipart
from convgrad._npy import write_header
from convgrad._tensors import Part
from engine.planning import tensor_bytes
from schemas.tensors import TensorSpec

__all__ = ["Stored", "read_result", "request_body", "result_pieces"]

# Bytes of a tile, at least one row; and of a tensor that is read in less than a millisecond.
_TILE, _INLINE = 1 << 20, 1 << 18
_LENGTH = 8


def request_body(kind: str, op: str, request: RequestObject, tensors: Mapping[str, Memory]) -> tuple[str, Body]:
    """Return a digest of a request that was checked, the same in whatever form it was sent, and its body."""
    stated = {
        name: {"dtype": value.dtype.name} if isinstance(value, Tensor) else value
        for name, value in sorted(request.inputs.items())
    }
    members = {"inputs": stated, "options": request.options or {}}
    if isinstance(request, GraphRequest):
        members |= {**request.attributes, "outputs": [*request.call.wanted], "layout": request.call.layout}
    else:
        members["attributes"] = request.attributes
    parts = {name: _part(request.inputs[name], tensors[name]) for name in sorted(tensors)}
    text = json.dumps(members, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    found = hashlib.sha256(json.dumps([kind, op, len(text), *parts]).encode() + text)
    for part in parts.values():
        for piece in part.pieces():
            found.update(piece)
    return found.hexdigest(), multipart(text, parts, found.hexdigest()[:32])


def _part(tensor: Tensor, memory: Memory) -> Part:
    header, data = write_header(tensor.dtype, tensor.shape), memory.view[: tensor.nbytes]
    return Part(tensor.dtype, tensor.shape, len(header) + len(data), lambda: iter((header, data)), None)


def result_pieces(result: Result, streams: Streams) -> Iterator[Bytes]:
    """Yield a file that holds a result, of work that streams this much."""
    outputs = [{"name": each.name, "strides": each.strides, **each.spec.as_json()} for each in result.outputs]
    members = {"document": result.document, "encoding": result.encoding, "member": result.member, "streams": streams}
    text = json.dumps(members | {"outputs": outputs}, ensure_ascii=False).encode()
    yield len(text).to_bytes(_LENGTH, "little")
    yield text
    for output in result.outputs:
        yield output.data


def read_result(path: Path) -> BufferedReader:
    """Open the file of a result; raises `NotFound` if it has just expired."""
    try:
        return path.open("rb")
    except FileNotFoundError:
        raise NotFound("the result of this job has expired", data={"reason": "unknown_job"}) from None


class Stored(Work):
    """The work of a job that is done: its result, in tiles if the work had some."""

    def __init__(self, context: RequestContext, file: BufferedReader) -> None:
        """Read everything but the tensors."""
        self.context = context
        self._file = file
        length = int.from_bytes(file.read(_LENGTH), "little")
        head: dict[str, Any] = json.loads(file.read(length))
        self.streams = head.pop("streams")
        self._outputs = head.pop("outputs")
        self._result = Result(**head)

    async def read(self, lease: Lease) -> Stored:
        """Read the tensors to segments of the lease."""
        outputs = []
        for each in self._outputs:
            spec = TensorSpec(each["name"], each["dtype"], tuple(each["shape"]))
            segment = await lease.acquire(size := tensor_bytes(spec))
            if await in_thread_if(size > _INLINE, self._file.readinto, segment.view[:size]) != size:
                raise InternalError("the file of this result is damaged")
            strides = None if each["strides"] is None else tuple(each["strides"])
            tiles = -(-spec.shape[0] // _rows(spec)) if size else 0
            outputs.append(Output(spec.name, spec, segment, strides, tiles))
        self._result = replace(self._result, outputs=outputs)
        return self

    async def events(self, *, each: bool = True) -> AsyncGenerator[Event, None]:
        """Yield the events of finished work."""
        outputs, stats = self._result.outputs, self._result.document.get("stats", {})
        for output in outputs:
            yield Begin(output)
            rows, shape = _rows(output.spec), output.spec.shape
            for seq in range(output.tiles if each and self.streams == "tiles" else 0):
                box = output.array[seq * rows : (seq + 1) * rows]
                yield TileReady(output, seq, (seq * rows, *[0] * (len(shape) - 1)), box.shape, box)
            yield End(output, stats, output is outputs[-1])

    def result(self) -> Result:
        """Return the result."""
        return self._result


def _rows(spec: TensorSpec) -> int:
    """Return the rows of a tile."""
    return max(1, _TILE // max(1, tensor_bytes(spec) // max(1, spec.shape[0])))
