"""A small real HTTP server that follows the contract, written without the code under test.

It answers a call with its `src` as the output, in as many tiles as the test sets, and keeps what it received.
`script` lists what it does instead for the next requests.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import socket
import socketserver
import struct
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, Any]
OIP = {"FP32": "<f4", "FP16": "<f2", "BF16": ml_dtypes.bfloat16, "FP64": "<f8", "INT64": "<i8"}
NAMES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "float64": "f64"}

SRC = np.arange(2 * 3 * 40 * 50, dtype=np.float32).reshape(2, 3, 40, 50)


@dataclass
class Received:
    """One request as it was received."""

    method: str
    path: str
    headers: dict[str, str]
    document: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Array] = field(default_factory=dict)


def frame(header: dict[str, Any], body: bytes = b"") -> bytes:
    """Return one frame of the contract."""
    text = json.dumps(header).encode()
    return (
        struct.pack("<4sIQ", b"CGG1", len(text), len(body)) + text + body + struct.pack("<I", zlib.crc32(text + body))
    )


def boxes(shape: tuple[int, ...], tiles: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yield boxes that split a shape along its last axis, so that they are not contiguous; last box first."""
    edges = np.linspace(0, shape[-1], tiles + 1).astype(int).tolist()
    for begin, end in reversed(list(pairwise(edges))):
        yield [0] * (len(shape) - 1) + [begin], [*shape[:-1], end - begin]


def stream_of(array: Array, *, tiles: int = 2, **begin: Any) -> list[bytes]:
    """Return the frames of a complete reply."""
    whole = {"op": "Op", "output": "diff_weights", "dtype": NAMES[array.dtype.name], "shape": list(array.shape)}
    frames = [frame({"type": "begin", "tiles": tiles, "resolved": {"groups": 1}, **whole, **begin})]
    for seq, (offset, shape) in enumerate(boxes(array.shape, tiles)):
        box = array[tuple(slice(at, at + size) for at, size in zip(offset, shape, strict=True))]
        frames.append(frame({"type": "progress", "done": seq + 1, "total": tiles}))
        frames.append(frame({"type": "tile", "seq": seq, "offset": offset, "shape": shape}, box.tobytes()))
    digest = hashlib.sha256(array.tobytes()).hexdigest()
    frames.append(frame({"type": "end", "tiles": tiles, "sha256": digest, "stats": {"tiles": tiles}}))
    return frames


def whole_of(array: Array, **output: Any) -> tuple[bytes, bytes]:
    """Return the head and the tensor of a binary API reply."""
    (kind,) = (kind for kind, dtype in OIP.items() if array.dtype == np.dtype(dtype))
    about: dict[str, Any] = {"name": "diff_weights", "datatype": kind, "shape": list(array.shape)}
    about |= {"parameters": {"binary_data_size": array.nbytes}, **output}
    return json.dumps({"model_name": "Op", "model_version": "1", "outputs": [about]}).encode(), array.tobytes()


class Handler(BaseHTTPRequestHandler):
    """Answer one connection's requests."""

    protocol_version = "HTTP/1.1"
    server: Server | UnixServer

    def do_GET(self) -> None:
        """Answer a GET request."""
        self._answer(Received("GET", self.path, self._fields()))

    def do_POST(self) -> None:
        """Answer a call."""
        received = Received("POST", self.path, self._fields())
        body = self.rfile.read(int(self.headers["Content-Length"]))
        kind = self.headers["Content-Type"]
        if kind.startswith("multipart/form-data"):
            read_multipart(body, kind.partition("boundary=")[2], received)
        elif (length := self.headers["Inference-Header-Content-Length"]) is not None:
            read_inference(body, int(length), received)
        else:
            received.document = json.loads(body)
        self._answer(received)

    def reply(self, status: int, body: bytes, kind: str = "application/json", **headers: str) -> None:
        """Send a complete reply."""
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def problem(self, status: int, code: str, **members: Any) -> None:
        """Send an error in the form of the contract."""
        body = {"type": "urn:x", "title": "Title", "status": status, "detail": "rule", "code": code, **members}
        self.reply(status, json.dumps(body).encode(), "application/problem+json")

    def frames(self, frames: list[bytes], *, whole: bool = True) -> None:
        """Send frames as HTTP chunks; if not `whole`, cut off before the last chunk."""
        self.send_response(200)
        self.send_header("Content-Type", "application/x-tensor-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for data in frames:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        if whole:
            self.wfile.write(b"0\r\n\r\n")
        else:
            self.close_connection = True

    def whole(self, head: bytes, tensor: bytes) -> None:
        """Send a reply of the binary API."""
        length = {"Inference_Header_Content_Length": str(len(head))}
        self.reply(200, head + tensor, "application/octet-stream", **length)

    def log_message(self, *_: object) -> None:
        """Log nothing."""

    def _fields(self) -> dict[str, str]:
        return {name.lower(): value for name, value in self.headers.items()}

    def _answer(self, received: Received) -> None:
        self.server.received.append(received)
        if self.server.script:
            self.server.script.popleft()(self, received)
        elif "application/x-tensor-stream" in received.headers.get("accept", ""):
            self.frames(stream_of(received.tensors["src"]))
        else:
            assert received.document["parameters"].pop("binary_data_output") is True
            self.whole(*whole_of(received.tensors["src"]))


Step = Callable[[Handler, Received], None]


class Server(ThreadingHTTPServer):
    """An HTTP server on a free port of the loopback interface."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.received: list[Received] = []
        self.script: deque[Step] = deque()

    @property
    def url(self) -> str:
        """Return the address."""
        return f"http://127.0.0.1:{self.server_port}"


class UnixServer(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """An HTTP server on a Unix socket."""

    daemon_threads = True
    url: ClassVar[str] = "http://any-name"

    def __init__(self, path: Path) -> None:
        super().__init__(str(path), Handler)
        self.received: list[Received] = []
        self.script: deque[Step] = deque()

    def get_request(self) -> tuple[Any, Any]:
        """Return the connection with an address that the handler can print."""
        request, _ = super().get_request()
        return request, ("unix", 0)


@contextmanager
def running(server: Server | UnixServer) -> Iterator[None]:
    """Serve in a thread while the block runs."""
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def read_multipart(body: bytes, boundary: str, into: Received) -> None:
    """Parse a multipart body; the `request` part must come first."""
    start, *parts, end = (b"\r\n" + body).split(b"\r\n--" + boundary.encode())
    assert (start, end) == (b"", b"--\r\n")
    for number, part in enumerate(parts):
        head, _, content = part.partition(b"\r\n\r\n")
        found = re.search(rb'; name="(\w+)"', head)
        assert found is not None
        name = found[1].decode()
        assert (name == "request") == (number == 0)
        if name == "request":
            into.document = json.loads(content)
        else:
            into.tensors[name] = load(content, into.document["inputs"].get(name, {}))


def read_inference(body: bytes, length: int, into: Received) -> None:
    """Parse the binary form of the Open Inference Protocol; the tensors follow the head in its order."""
    into.document = json.loads(body[:length])
    for entry in into.document["inputs"]:
        assert entry.keys() == {"name", "datatype", "shape", "parameters"}
        (size,) = entry["parameters"].values()
        data, length = body[length : length + size], length + size
        into.tensors[entry["name"]] = np.frombuffer(data, OIP[entry["datatype"]]).reshape(entry["shape"])
    assert length == len(body)


def load(content: bytes, stated: dict[str, Any]) -> Array:
    """Read a `.npy` part with NumPy."""
    array: Array = np.load(io.BytesIO(content), allow_pickle=False)
    return array.view(ml_dtypes.bfloat16) if stated.get("dtype") == "bf16" else array


def busy(handler: Handler, _: Received) -> None:
    """Reject the request for now."""
    handler.problem(503, "overloaded")


def hang_up(handler: Handler, _: Received) -> None:
    """Close the connection without a reply."""
    handler.close_connection = True


def cut(handler: Handler, _: Received) -> None:
    """Send a reply that breaks off after its first tile."""
    handler.frames(stream_of(SRC)[:3], whole=False)


def free_port() -> int:
    """Return a port that is not in use."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
