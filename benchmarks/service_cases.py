"""The calls sent to the services, and how each API expresses them."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from convgrad._assembly import Assembly
from convgrad._core import multipart_call
from kernels import ConvProblem, compute

__all__ = ["APIS", "CASES", "Api", "Case", "Reply", "Wire", "post"]

OP: Literal["ConvolutionBackwardWeights"] = "ConvolutionBackwardWeights"
ATTRIBUTES = {
    "strides": [1, 1],
    "pads_begin": [1, 1],
    "pads_end": [1, 1],
    "dilations": [1, 1],
    "data_format": "NCX",
    "weights_format": "OIX",
}

Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Case:
    """One 3x3 f32 weight gradient: batch, channels in, height and width, channels out."""

    name: str
    n: int
    c: int
    h: int
    o: int

    @property
    def weights_shape(self) -> list[int]:
        """Return the shape of the result."""
        return [self.o, self.c, 3, 3]

    @property
    def nbytes(self) -> int:
        """Return the size of all tensors of the call, including the result."""
        return 4 * (self.n * (self.c + self.o) * self.h * self.h + 9 * self.c * self.o)

    def inputs(self) -> dict[str, Array]:
        """Return the two inputs, the same every time."""
        numbers = np.random.default_rng(0)
        shapes = {"src": (self.n, self.c, self.h, self.h), "diff_dst": (self.n, self.o, self.h, self.h)}
        return {name: numbers.standard_normal(shape, np.float32) for name, shape in shapes.items()}

    def problem(self) -> ConvProblem:
        """Return the problem as the kernels describe it."""
        return ConvProblem(
            op=OP, dtype="f32", n=self.n, src_channels=self.c, dst_channels=self.o, groups=1,
            src_spatial=(self.h, self.h), dst_spatial=(self.h, self.h), kernel=(3, 3), strides=(1, 1),
            dilations=(1, 1), pads_begin=(1, 1), data_format="NCX", weights_format="OIX", groups_axis="O", bias=False,
        )  # fmt: skip

    def expected(self) -> Array:
        """Return the result of the slow kernel that accumulates in float64."""
        found: Array = compute(self.problem(), *self.inputs().values(), reference=True)
        return found


CASES = (Case("tiny", 1, 16, 14, 16), Case("medium", 8, 64, 28, 64), Case("large", 16, 64, 56, 64))


@dataclass(frozen=True)
class Wire:
    """One request as sent to the socket, in pieces."""

    pieces: list[bytes]


@dataclass(frozen=True)
class Reply:
    """A reply: its headers by lower-case name, its body without transfer coding."""

    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True)
class Api:
    """A way to have a server compute a case; `read` is None if the reply has no tensor."""

    name: str
    server: str
    build: Callable[[Case], Wire]
    read: Callable[[Reply, Case], Array] | None


def post(path: str, headers: Mapping[str, str], body: list[bytes]) -> Wire:
    """Return a POST request."""
    fields = {"host": "127.0.0.1", **headers, "content-length": str(sum(map(len, body)))}
    head = f"POST {path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in fields.items()) + "\r\n"
    # Small bodies are sent with the head, as a good client does.
    whole = [head.encode(), *body]
    return Wire([b"".join(whole)] if sum(map(len, whole)) < 1 << 16 else whole)


def _multipart(accept: str) -> Callable[[Case], Wire]:
    def build(case: Case) -> Wire:
        inputs: dict[str, Any] = {**case.inputs(), "weights_shape": case.weights_shape}
        request = multipart_call(OP, inputs, ATTRIBUTES, options={})
        assert request.body is not None
        pieces = [bytes(piece) for piece in request.body.pieces()]
        return post(request.path, {"accept": accept, "content-type": request.body.content_type}, pieces)

    return build


def _document(case: Case) -> dict[str, Any]:
    tensors: dict[str, Any] = {
        name: {"dtype": "f32", "shape": array.shape, "data": base64.b64encode(array.tobytes()).decode()}
        for name, array in case.inputs().items()
    }
    return {"attributes": ATTRIBUTES, "inputs": {**tensors, "weights_shape": case.weights_shape}}


def _json(case: Case) -> Wire:
    body = json.dumps(_document(case)).encode()
    return post(f"/v1/ops/{OP}", {"content-type": "application/json"}, [body])


def _rpc(case: Case) -> Wire:
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": OP, "params": _document(case)}).encode()
    return post("/rpc", {"content-type": "application/json"}, [body])


def _oip(path: str, *, ours: bool) -> Callable[[Case], Wire]:
    def build(case: Case) -> Wire:
        inputs: dict[str, tuple[str, npt.NDArray[Any]]] = {k: ("FP32", v) for k, v in case.inputs().items()}
        if ours:
            inputs["weights_shape"] = "INT64", np.array(case.weights_shape)
        described = [
            {"name": name, "datatype": kind, "shape": array.shape, "parameters": {"binary_data_size": array.nbytes}}
            for name, (kind, array) in inputs.items()
        ]
        document = {
            "inputs": described,
            "outputs": [{"name": "diff_weights", "parameters": {"binary_data": True}}],
        } | (
            {"parameters": {k: json.dumps(v) if isinstance(v, list) else v for k, v in ATTRIBUTES.items()}}
            if ours
            else {}
        )
        head = json.dumps(document).encode()
        headers = {"content-type": "application/octet-stream", "inference-header-content-length": str(len(head))}
        return post(path, headers, [head, *(array.tobytes() for _, array in inputs.values())])

    return build


def _raw(case: Case) -> Wire:
    body = [array.tobytes() for array in case.inputs().values()]
    path = f"/gradient?n={case.n}&c={case.c}&h={case.h}&o={case.o}"
    return post(path, {"content-type": "application/octet-stream"}, body)


def _from_bytes(body: bytes, case: Case) -> Array:
    return np.frombuffer(body, np.float32).reshape(case.weights_shape)


def _from_frames(reply: Reply, _: Case) -> Array:
    assembly = Assembly()
    for _event in assembly.feed(reply.body):
        pass
    return np.asarray(assembly.close().array, np.float32)


def _from_npy(reply: Reply, _: Case) -> Array:
    return np.asarray(np.load(io.BytesIO(reply.body)), np.float32)


def _from_oip(reply: Reply, case: Case) -> Array:
    return _from_bytes(reply.body[int(reply.headers["inference-header-content-length"]) :], case)


def _from_json(reply: Reply, case: Case) -> Array:
    found = json.loads(reply.body)
    outputs = found.get("result", found)["outputs"]
    return _from_bytes(base64.b64decode(outputs["diff_weights"]["data"]), case)


APIS = (
    Api("multipart to frames", "convgrad", _multipart("application/x-tensor-stream"), _from_frames),
    Api("multipart to npy", "convgrad", _multipart("application/x-npy"), _from_npy),
    Api("/v2 binary", "convgrad", _oip(f"/v2/models/{OP}/infer", ours=True), _from_oip),
    Api("/v1 JSON", "convgrad", _json, _from_json),
    Api("/rpc JSON", "convgrad", _rpc, _from_json),
    Api("hand-written", "handwritten", _raw, lambda reply, case: _from_bytes(reply.body, case)),
    Api("PyTriton", "pytriton", _oip("/v2/models/gradient/infer", ours=False), _from_oip),
    Api("reads the body", "body_only", _raw, None),
)
