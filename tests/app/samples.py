"""Calls as any HTTP client would make them, and functions that read the replies; none of the project's own code."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import httpx
import ml_dtypes
import numpy as np
import numpy.typing as npt

from tests.problems import Case

Array = npt.NDArray[Any]
Files = list[tuple[str, tuple[str, bytes, str]]]

JSON = "application/json"
NPY = "application/x-npy"
SSE = "text/event-stream"
FRAMES = "application/x-tensor-stream"

DTYPES = {"f32": np.dtype("<f4"), "f16": np.dtype("<f2"), "bf16": np.dtype(ml_dtypes.bfloat16), "f64": np.dtype("<f8")}

SMALL = Case(
    name="small", op="ConvTransposeBackwardWeights", n=2, src_channels=4, dst_channels=6, groups=2,
    src_spatial=(5, 4), dst_spatial=(9, 8), kernel=(3, 2), strides=(2, 2), pads_begin=(1, 0), pads_end=(1, 0),
    weights_format="IOX", groups_axis="O",
)  # fmt: skip
CALL_PAGES = (f"/v1/ops/{SMALL.op}", "/rpc", f"/v2/models/{SMALL.op}/infer")
"""A page of each API that computes."""

_FORWARD = Case(
    op="ConvTranspose", n=2, src_channels=3, dst_channels=4, src_spatial=(5, 4), dst_spatial=(6, 5), kernel=(2, 2),
    weights_format="XOI", groups_axis="O", bias=True,
)  # fmt: skip
_CONVOLUTION = Case(
    op="ConvolutionBackwardWeights", n=2, src_channels=4, dst_channels=6, src_spatial=(9,), dst_spatial=(4,),
    kernel=(3,), strides=(2,), data_format="NXC", weights_format="XIO",
)  # fmt: skip
_BIAS = Case(op="BiasAdd", n=2, src_channels=3, dst_channels=3, src_spatial=(4, 5), dst_spatial=(4, 5), kernel=(1, 1))
CASES = {
    case.op: case
    for case in (
        SMALL,
        replace(SMALL, op="ConvTransposeBackwardData"),
        _FORWARD,
        _CONVOLUTION,
        replace(_CONVOLUTION, op="Convolution", bias=True),
        replace(_CONVOLUTION, op="ConvolutionBackwardData"),
        replace(_BIAS, bias=True),
        replace(_BIAS, op="BiasAddBackward"),
    )
}
"""A small call of each operation."""


def doubled(size: int, src_channels: int, dst_channels: int, n: int = 1) -> Case:
    """Return a call that doubles both sides of its images: little work for many bytes."""
    return Case(
        op="ConvTranspose", n=n, src_channels=src_channels, dst_channels=dst_channels, src_spatial=(size, size),
        dst_spatial=(2 * size, 2 * size), kernel=(2, 2), strides=(2, 2), weights_format="IOX", groups_axis="O",
    )  # fmt: skip


def square(n: int, src_channels: int, dst_channels: int, src: int, dst: int) -> Case:
    """Return the weight gradient of square images without padding: much work for few bytes if `dst` is small."""
    return Case(
        n=n, src_channels=src_channels, dst_channels=dst_channels, src_spatial=(src, src), dst_spatial=(dst, dst),
        kernel=(src - dst + 1, src - dst + 1),
    )  # fmt: skip


# A result larger than any socket buffer.
LARGE = doubled(1024, 1, 1)
# Tenths of a second of work for the reference kernel.
SLOW = square(4, 48, 128, 40, 20)
# Some tens of milliseconds of work for one worker with the reference kernel, with few bytes and early tiles.
HEAVY = square(4, 32, 96, 40, 32)
# A few seconds for two workers.
LONG = square(2, 128, 128, 64, 32)


def npy(array: Array) -> bytes:
    """Return a .npy file as written by NumPy."""
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def request_object(case: Case, **options: Any) -> dict[str, Any]:
    """Return the request object of a case without its tensors."""
    described = {name: {"dtype": case.dtype} for name in case.input_shapes}
    request: dict[str, Any] = {"attributes": case.attributes(), "inputs": described}
    return request | ({"options": options} if options else {})


def parts(case: Case, inputs: dict[str, Array], **options: Any) -> Files:
    """Return the multipart form of a call: the request first, then a file for each tensor."""
    request = json.dumps(request_object(case, **options)).encode()
    files = [(name, (f"{name}.npy", npy(array), NPY)) for name, array in inputs.items()]
    return [("request", ("request.json", request, JSON)), *files]


def numbers(array: Array) -> Any:
    """Return an array as nested lists of numbers."""
    return array.astype(np.float64).tolist()


def part(name: str, content: bytes, content_type: str) -> tuple[str, tuple[str, bytes, str]]:
    """Return a part of a form."""
    return name, (name, content, content_type)


def document(
    case: Case, inputs: dict[str, Array], *, as_npy: bool = False, as_numbers: bool = False, **options: Any
) -> dict[str, Any]:
    """Return the JSON form of a call."""
    tensors: dict[str, Any] = {}
    for name, array in inputs.items():
        if as_npy:
            tensors[name] = {"dtype": case.dtype, "npy": base64.b64encode(npy(array)).decode()}
        else:
            data = numbers(array) if as_numbers else base64.b64encode(array.tobytes()).decode()
            tensors[name] = {"dtype": case.dtype, "shape": list(array.shape), "data": data}
    return request_object(case, **options) | {"inputs": tensors}


def post(
    http: httpx.Client,
    case: Case,
    inputs: dict[str, Array],
    accept: str = JSON,
    headers: dict[str, str] | None = None,
    **options: Any,
) -> httpx.Response:
    """Post a case as multipart."""
    sent = {"accept": accept, **(headers or {})}
    return http.post(f"/v1/ops/{case.op}", files=parts(case, inputs, **options), headers=sent)


def read_npy(body: bytes, dtype: str) -> Array:
    """Return the array in a .npy reply."""
    array: Array = np.load(io.BytesIO(body), allow_pickle=False)
    return array.view(DTYPES[dtype]) if array.dtype.kind == "V" else array


def read_tensor(tensor: dict[str, Any]) -> Array:
    """Return an output tensor of a JSON reply."""
    if "npy" in tensor:
        return read_npy(base64.b64decode(tensor["npy"], validate=True), tensor["dtype"])
    return _elements(tensor["data"], tensor["dtype"], tensor["shape"])


def _elements(data: Any, dtype: str, shape: list[int]) -> Array:
    kind = DTYPES[dtype]
    if isinstance(data, list):
        array = np.array(data, np.float64 if dtype == "f64" else np.float32)
        assert array.shape == tuple(shape) or 0 in shape
        return array.astype(kind).reshape(shape)
    return np.frombuffer(base64.b64decode(data, validate=True), kind).reshape(shape)


def read_json(response: httpx.Response) -> Array:
    """Return the one output of a JSON reply."""
    (tensor,) = response.json()["outputs"].values()
    return read_tensor(tensor)


def messages(text: str) -> Iterator[dict[str, Any]]:
    """Yield the messages of an event stream."""
    for event in text.removesuffix("\n\n").split("\n\n"):
        if not event.startswith(":"):
            yield json.loads(event.removeprefix("data: "))


def read_events(response: httpx.Response) -> Array:
    """Assemble an event stream's tiles; the last message must agree with them."""
    *notifications, last = messages(response.text)
    (output,) = last["result"]["outputs"].values()
    tiles = [entry["params"] for entry in notifications if entry["method"] == "notifications/tile"]
    boxes = [
        (tile["offset"], tile["shape"], _elements(tile["data"], output["dtype"], tile["shape"]).tobytes())
        for tile in tiles
    ]
    return _assemble(output, boxes, output["sha256"])


def frames(body: bytes) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Yield the frames of a tensor stream."""
    while body:
        magic, json_length, length = struct.unpack_from("<4sIQ", body)
        assert magic == b"CGG1"
        text, data = body[16 : 16 + json_length], body[16 + json_length : 16 + json_length + length]
        end = 16 + json_length + length
        assert struct.unpack_from("<I", body, end)[0] == zlib.crc32(text + data)
        yield json.loads(text), data
        body = body[end + 4 :]


def read_frames(response: httpx.Response) -> Array:
    """Assemble a tensor stream's tiles; its end must agree with them."""
    found = list(frames(response.content))
    begin, end = found[0][0], found[-1][0]
    assert (begin["type"], end["type"]) == ("begin", "end")
    tiles = [(header, body) for header, body in found if header["type"] == "tile"]
    assert len(tiles) == begin["tiles"] == end["tiles"]
    return _assemble(begin, [(head["offset"], head["shape"], body) for head, body in tiles], end["sha256"])


def _assemble(output: dict[str, Any], boxes: list[tuple[list[int], list[int], bytes]], sha256: str) -> Array:
    kind = DTYPES[output["dtype"]]
    result = np.zeros(output["shape"], kind)
    covered = np.zeros(output["shape"], int)
    for offset, shape, data in boxes:
        at = tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
        result[at] = np.frombuffer(data, kind).reshape(shape)
        covered[at] += 1
    assert (covered == 1).all(), "tiles must be disjoint and cover the output"
    assert hashlib.sha256(result.tobytes()).hexdigest() == sha256
    return result


READERS: dict[str, Callable[[httpx.Response], Array]] = {JSON: read_json, SSE: read_events, FRAMES: read_frames}


def read(response: httpx.Response) -> Array:
    """Return the output of a reply in any form."""
    assert response.status_code == 200, response.text
    media_type = response.headers["content-type"]
    if media_type == NPY:
        return read_npy(response.content, response.headers["x-tensor-dtype"])
    return READERS[media_type](response)


def same_bits(first: Array, second: Array) -> bool:
    """Return whether dtype, shape and bits are the same; NaNs with the same bits are equal."""
    return (first.dtype, first.shape, first.tobytes()) == (second.dtype, second.shape, second.tobytes())


def rpc_request(
    case: Case, inputs: dict[str, Array] | None = None, request_id: Any = 1, **options: Any
) -> dict[str, Any]:
    """Return a request for a case."""
    params = document(case, inputs or case.inputs(), **options)
    return {"jsonrpc": "2.0", "method": case.op, "params": params, "id": request_id}


def problem(response: httpx.Response, status: int, code: str) -> dict[str, Any]:
    """Check that a reply is a complete problem object of the given class; return it."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    found: dict[str, Any] = response.json()
    assert {"type", "title", "status", "detail", "code", "request_id"} <= set(found)
    assert (found["status"], found["code"]) == (status, code)
    assert found["request_id"] == response.headers["x-request-id"]
    assert found["type"].endswith(code)
    return found


def digest(secret: str) -> str:
    """Return the checksum of a key as in its line."""
    return f"sha256:{hashlib.sha256(secret.encode()).hexdigest()}"


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    while not condition():
        os.sched_yield()
