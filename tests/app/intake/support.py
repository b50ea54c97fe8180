"""Helpers for the intake's tests: request bodies in the forms that clients send, and functions that read them."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.intake.lease import Lease
from app.intake.multipart import MultipartBody
from app.intake.requests import RequestObject, read_request_object
from app.intake.tensors import collect_tensors
from app.pool.buffers import SegmentPool
from app.telemetry.context import RequestContext
from convgrad._dtypes import dtype
from convgrad._errors import ConvgradError, InvalidParams
from schemas.ops import resolve
from schemas.tables import CalledOperation, find_operation

MIB = 1 << 20
HEAD = 256 << 10
BOUNDARY = "a-boundary"
CONTENT_TYPE = f"multipart/form-data; boundary={BOUNDARY}"
OPERATION = find_operation("ConvolutionBackwardWeights")
ATTRIBUTES: dict[str, Any] = {
    "strides": [1], "pads_begin": [0], "pads_end": [0], "dilations": [1], "data_format": "NCX", "weights_format": "OIX",
}  # fmt: skip
Array = NDArray[Any]


def arrays(dtype: str = "f4", *, n: int = 2) -> dict[str, Array]:
    """Return the inputs of a small one-dimensional convolution with two channels and a kernel of three."""
    src = np.arange(n * 2 * 8).reshape(n, 2, 8)
    return {"src": src.astype(dtype), "diff_dst": (src[:, :, :6] + 1).astype(dtype)}


def npy(array: Array) -> bytes:
    """Return what `numpy.save` writes."""
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()


def text(raw: bytes) -> str:
    """Return the base64 text of some bytes."""
    return base64.b64encode(raw).decode()


def multipart(parts: Sequence[tuple[str, bytes]], *, end: bytes = b"--\r\n") -> bytes:
    """Return a multipart body as curl writes it."""
    body = b"".join(
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"; filename="x"\r\n'
        f"Content-Type: application/octet-stream\r\n\r\n".encode()
        + content
        + b"\r\n"
        for name, content in parts
    )
    return body + f"--{BOUNDARY}".encode() + end


def request(inputs: dict[str, Any] | None = None, **members: Any) -> bytes:
    """Return the `request` part."""
    given = {"attributes": ATTRIBUTES, "inputs": {"weights_shape": [2, 2, 3]} | (inputs or {})}
    return json.dumps(given | members).encode()


async def chunks(body: bytes, step: int) -> AsyncIterator[bytes]:
    """Yield a body in pieces of `step` bytes."""
    for start in range(0, len(body), step):
        yield body[start : start + step]


def reading(read: Callable[[Any], RequestObject]) -> Callable[[Any], Awaitable[RequestObject]]:
    """Return a task's way of reading a request object."""

    async def read_request(document: Any) -> RequestObject:
        return read(document)

    return read_request


def read_parts(
    body: bytes, *, step: int = 10**6, called: CalledOperation = OPERATION, declared: bool = True
) -> dict[str, bytes]:
    """Read a multipart body as the service does; return the tensors that the kernels would get."""

    async def run(lease: Lease) -> dict[str, bytes]:
        read, length = reading(partial(read_request_object, called)), len(body) if declared else None
        parts = MultipartBody(CONTENT_TYPE, lease, read, check_head, length=length, limit=HEAD)
        return await collected(await parts.request(chunks(body, step)), lease)

    return in_pool(run)


def read_object(value: Any, *, called: CalledOperation = OPERATION) -> dict[str, bytes]:
    """Read a parsed request object as the service does; return the tensors that the kernels would get."""

    async def run(lease: Lease) -> dict[str, bytes]:
        return await collected(await read_request_object(called, value).read(), lease)

    return in_pool(run)


async def check_head(call: RequestObject) -> None:
    """Check what has arrived of a call against the rules of its operation; what is missing may still come."""
    try:
        resolve(call.called_as, call.attributes, call.metas)
    except InvalidParams as error:
        if any(found["type"] != "missing" for found in error.errors):
            raise


async def collected(call: RequestObject, lease: Lease) -> dict[str, bytes]:
    """Check a call and return copies of its tensors."""
    op = resolve(call.called_as, call.attributes, call.metas)
    spellings = call.rows.input_spellings
    found = {spellings[name]: memory for name, memory in (await collect_tensors(call.inputs, lease)).items()}
    return {
        spec.name: bytes(found[spec.name].view[: prod(spec.shape) * dtype(spec.dtype).itemsize]) for spec in op.inputs
    }


def in_pool(run: Callable[[Lease], Awaitable[dict[str, bytes]]]) -> dict[str, bytes]:
    """Run with a lease from a new pool, and check that all memory is released, whatever the outcome."""
    pool = SegmentPool(64 * MIB)

    async def held() -> dict[str, bytes] | ConvgradError:
        with Lease(pool, RequestContext("id")) as lease:
            try:
                return await run(lease)
            except ConvgradError as error:
                # A traceback holds frames, and frames hold views.
                return error.with_traceback(None)

    outcome = asyncio.run(held())
    assert pool.stats().used == 0
    if isinstance(outcome, ConvgradError):
        raise outcome
    return outcome
