"""The blocking client against a real HTTP server."""

from __future__ import annotations

import math
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import convgrad
from convgrad import Client, Progress
from tests.convgrad.server import (
    SRC,
    Handler,
    Received,
    Server,
    UnixServer,
    busy,
    cut,
    frame,
    hang_up,
    running,
    stream_of,
    whole_of,
)

ATTRIBUTES = {"strides": [1, 1], "dilations": (1, 1)}
ATTRIBUTES_SENT = {"strides": [1, 1], "dilations": [1, 1]}


def test_the_request_is_the_contract(client: Client, server: Server) -> None:
    """A call is sent as a binary inference request of known length: JSON, shapes, then each tensor's bytes."""
    bias = SRC[0, 0, 0]
    client.run("Op", {"src": SRC, "weights_shape": (4, 3), "bias": bias}, ATTRIBUTES, reference=True, deadline=1.5)
    (received,) = server.received
    assert (received.method, received.path) == ("POST", "/v2/models/Op/infer")
    assert received.headers["accept"] == "application/octet-stream, application/problem+json"
    assert received.headers["content-type"] == "application/octet-stream"
    assert received.headers["user-agent"] == f"convgrad/{convgrad.__version__}"
    assert "transfer-encoding" not in received.headers
    assert "authorization" not in received.headers
    assert list(received.document) == ["inputs", "parameters"]
    assert received.document["parameters"] == ATTRIBUTES_SENT | {"reference": True, "timeout": 1_500_000}
    assert list(received.tensors) == ["weights_shape", "src", "bias"]
    np.testing.assert_array_equal(received.tensors["weights_shape"], [4, 3])
    np.testing.assert_array_equal(received.tensors["src"], SRC)
    np.testing.assert_array_equal(received.tensors["bias"], bias)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_the_result_is_a_writeable_array(client: Client, server: Server, dtype: Any) -> None:
    """The result has the dtype, shape and bits that the service sent, and is writeable."""
    src = SRC.astype(dtype)
    result = client.run("Op", {"src": src})
    assert (result.dtype, result.shape) == (src.dtype, src.shape)
    assert result.tobytes() == src.tobytes()
    result[...] = 0
    (stated,) = server.received[0].document["inputs"]
    assert stated["datatype"] == {"float32": "FP32", "float16": "FP16", "bfloat16": "BF16"}[src.dtype.name]


def test_run_detailed_gives_the_whole_reply(client: Client, server: Server) -> None:
    """The result has outputs by name, resolved attributes, statistics and warnings."""
    server.script.append(lambda handler, _: handler.frames(stream_of(SRC, warnings=["both shapes given"])))
    result = client.run_detailed("Op", {"src": SRC})
    assert result.op == "Op"
    assert list(result.outputs) == ["diff_weights"]
    assert result.array is result.outputs["diff_weights"]
    assert result.resolved == {"groups": 1}
    assert result.stats == {"tiles": 2}
    assert result.warnings == ("both shapes given",)


def test_stream_result_reads_the_rest_of_the_stream(client: Client) -> None:
    """Leaving the loop early loses nothing: `result` reads the rest."""
    with client.stream("Op", {"src": SRC}) as stream:
        first = next(iter(stream))
        assert first == Progress(1, 2)
        np.testing.assert_array_equal(stream.result(), SRC)
        assert list(stream) == []
        assert stream.details().op == "Op"


def test_calls_the_binary_api_cannot_represent_are_sent_as_multipart(
    client: Client, server: Server, tmp_path: Path
) -> None:
    """Dumped ops, attributes whose name the protocol uses, odd inputs and other memory orders are sent in full."""
    np.save(tmp_path / "odd.npy", np.asfortranarray(SRC))
    np.save(tmp_path / "swapped.npy", SRC.astype(">f4"))
    odd: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"src": SRC}, {"kind": "Op", "attrs": {"groups": 1}}), ({"src": SRC}, {"timeout": 5}),
        ({"src": SRC}, {"sequence_id": 5}), ({"src": SRC, "weights_shape": [1.5]}, {}),
        ({"src": SRC, "weights_shape": [2**63]}, {}), ({"src": tmp_path / "odd.npy"}, {}),
        ({"src": tmp_path / "swapped.npy"}, {}),
    ]  # fmt: skip
    for inputs, attributes in odd:
        client.run("Op", inputs, attributes)
        received = server.received[-1]
        assert received.path == "/v1/ops/Op"
        assert received.document["attributes"] == attributes
        assert received.document["inputs"] == {name: value for name, value in inputs.items() if type(value) is list}
        np.testing.assert_array_equal(received.tensors["src"], SRC)


def test_a_plain_file_is_sent_without_its_header(client: Client, server: Server, tmp_path: Path) -> None:
    """Only the elements of a `.npy` file are sent if they are in the usual order."""
    np.save(tmp_path / "plain.npy", SRC)
    client.run("Op", {"src": tmp_path / "plain.npy", "weights_shape": np.array([4, 3])}, {"groups": np.int64(2)})
    (received,) = server.received
    assert received.path == "/v2/models/Op/infer"
    assert received.document["parameters"] == {"groups": 2}
    assert received.tensors["weights_shape"].tolist() == [4, 3]
    np.testing.assert_array_equal(received.tensors["src"], SRC)


def test_errors_are_typed_and_not_retried(client: Client, server: Server) -> None:
    """A problem, also one after the first tile, raises the class of its code, with message and data."""
    errors = [{"loc": ["attributes", "strides", 0], "msg": "must be positive", "type": "range"}]
    fault = frame({"type": "error", "code": "deadline_exceeded", "message": "over", "data": {"limit": 3}})
    server.script += [
        lambda handler, _: handler.problem(422, "invalid_params", errors=errors, request_id="r1"),
        lambda handler, _: handler.frames([*stream_of(SRC)[:3], fault]),
    ]
    with pytest.raises(convgrad.InvalidParams, match="rule") as caught:
        client.run("Op", {"src": SRC})
    assert caught.value.data == {"errors": errors, "request_id": "r1"}
    with pytest.raises(convgrad.DeadlineExceeded, match="over") as late:
        client.run("Op", {"src": SRC})
    assert late.value.data == {"limit": 3}
    assert len(server.received) == 2


def test_health(client: Client, server: Server) -> None:
    """Ready, starting and draining are answers; waiting ends with the first ready one."""
    starting = b'{"status": "starting", "progress": 0.5}'
    server.script += [
        lambda handler, _: handler.reply(503, starting),
        lambda handler, _: handler.problem(503, "shutting_down"),
        lambda handler, _: handler.reply(503, starting),
        lambda handler, _: handler.reply(200, b'{"status": "ready"}'),
    ]
    health = client.health()
    assert (health.ready, health.detail["status"], health.detail["progress"]) == (False, "starting", 0.5)
    assert not client.health().ready
    assert client.wait_until_ready(5) == convgrad.Health(True, {"status": "ready"})


def limited(handler: Handler, _: Received) -> None:
    """Reject the request for now, with a proxy's bare status."""
    handler.reply(429, b"", Retry_After="0")


def lost(handler: Handler, _: Received) -> None:
    """Say, as a proxy, that the service behind it was lost."""
    handler.reply(502, b"<html>", "text/html")


@pytest.mark.parametrize("step", [busy, hang_up, limited, lost])
def test_transient_errors_are_retried(client: Client, server: Server, step: Any) -> None:
    """429, 502, 503 and a connection that breaks before the reply are retried, with the complete body."""
    server.script += [step, step]
    np.testing.assert_array_equal(client.run("Op", {"src": SRC}), SRC)
    assert len(server.received) == 3
    for received in server.received:
        np.testing.assert_array_equal(received.tensors["src"], SRC)


def test_run_retries_a_reply_that_broke_off(client: Client, server: Server) -> None:
    """No part of a broken reply has reached the caller, so `run` sends the call again, with frames or without."""

    def cut_off(handler: Handler, received: Received) -> None:
        head, tensor = whole_of(received.tensors["src"])
        handler.whole(head, tensor[:-1])

    def leave(handler: Handler, _: Received) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "application/octet-stream")
        handler.send_header("Content-Length", "1000")
        handler.send_header("Inference-Header-Content-Length", "100")
        handler.end_headers()
        handler.close_connection = True

    for broken in ([cut, cut], [cut_off, leave]):
        server.script += broken
        np.testing.assert_array_equal(client.run("Op", {"src": SRC}), SRC)
    assert len(server.received) == 6


def test_a_check_is_not_begun_twice(client: Client, server: Server) -> None:
    """If the connection breaks once the request was sent, a check may have begun; only other requests are repeated."""
    server.script.append(hang_up)
    with pytest.raises(convgrad.BrokenStream):
        client.begin_check()
    assert len(server.received) == 1
    server.script += [hang_up, lambda handler, _: handler.reply(200, b"{}")]
    client.finish_check("a")
    assert len(server.received) == 3


def test_large_calls_and_details_come_as_frames(client: Client, server: Server) -> None:
    """Frames keep a long call alive and carry more than the output: only a small `run` works without them."""
    client.run("Op", {"src": np.zeros((3, 1 << 20), np.float32)})
    client.run_detailed("Op", {"src": SRC})
    for received in server.received:
        assert received.headers["accept"] == "application/x-tensor-stream, application/problem+json"
        assert received.document["parameters"] == {}


def test_a_stream_that_breaks_off_raises(client: Client, server: Server) -> None:
    """A stream that breaks off raises, in the loop and in `result`, and is not retried."""
    server.script.append(cut)
    with client.stream("Op", {"src": SRC}) as stream:
        with pytest.raises(convgrad.BrokenStream):
            list(stream)
        with pytest.raises(convgrad.BrokenStream):
            stream.result()
    assert len(server.received) == 1


def test_a_silent_service_times_out() -> None:
    """If the service accepts the call and sends nothing, `TimedOut` is raised."""
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with listener, Client(url, timeout=0.05) as client, pytest.raises(convgrad.TimedOut):
        client.run("Op", {"src": SRC})


def test_unix_socket(tmp_path: Path) -> None:
    """`uds` reaches a service behind a Unix socket."""
    server = UnixServer(tmp_path / "s")
    with running(server), Client(server.url, uds=tmp_path / "s") as client:
        np.testing.assert_array_equal(client.run("Op", {"src": SRC}), SRC)


def test_a_base_path_is_kept(server: Server) -> None:
    """A service under a path of a proxy is called at that path."""
    with Client(server.url + "/gradients/") as client:
        client.run("Op", {"src": SRC})
    assert server.received[0].path == "/gradients/v2/models/Op/infer"


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", ""])
def test_an_address_without_http_is_refused(url: str) -> None:
    """An address that can't be called is a programming error, reported at once."""
    with pytest.raises(ValueError, match="must begin with http"):
        Client(url)


@pytest.mark.parametrize(("deadline", "expected"), [(1e-9, 1), (0.0015, 2), (math.inf, None), (1e308, None)])
def test_a_deadline_is_whole_milliseconds(client: Client, server: Server, deadline: float, expected: Any) -> None:
    """A deadline is rounded up, and a very distant one is not sent."""
    with suppress(convgrad.DeadlineExceeded):
        client.run("Op", {"src": SRC}, deadline=deadline)
    sent = server.received[0].document["parameters"].get("timeout")
    assert sent == (None if expected is None else expected * 1000)
