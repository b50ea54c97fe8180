"""The blocking client against a real HTTP server."""

from __future__ import annotations

import json
import math
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import convgrad
from convgrad import Client, Progress, Tile
from tests.convgrad.conftest import QUICK
from tests.convgrad.server import (
    SRC,
    Handler,
    Received,
    Server,
    UnixServer,
    busy,
    cut,
    frame,
    free_port,
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


def test_stream_gives_events_and_then_the_result(client: Client) -> None:
    """Tiles arrive with their place and data as the service finishes them; together they are the result."""
    seen = np.zeros_like(SRC)
    with client.stream("Op", {"src": SRC}) as stream:
        progress = []
        for event in stream:
            if isinstance(event, Progress):
                progress.append(event.share)
                continue
            assert isinstance(event, Tile)
            assert not event.data.flags.writeable
            box = tuple(slice(at, at + size) for at, size in zip(event.offset, event.shape, strict=True))
            seen[box] = event.data
        result = stream.result()
    assert progress == [0.5, 1.0]
    np.testing.assert_array_equal(seen, SRC)
    np.testing.assert_array_equal(result, SRC)
    assert result.flags.writeable


def test_stream_result_reads_the_rest_of_the_stream(client: Client) -> None:
    """Leaving the loop early loses nothing: `result` reads the rest."""
    with client.stream("Op", {"src": SRC}) as stream:
        first = next(iter(stream))
        assert first == Progress(1, 2)
        np.testing.assert_array_equal(stream.result(), SRC)
        assert list(stream) == []
        assert stream.details().op == "Op"


def test_operations_are_methods(client: Client, server: Server) -> None:
    """Each operation has a method named as on its page, with attributes as keywords."""
    src, weights, bias = SRC, SRC[:1], SRC[0, 0, 0]
    client.conv_transpose_backward_weights(src, weights, weights_shape=(3, 2, 1, 1), strides=(2, 2), dilations=(1, 1))
    client.convolution_backward_weights(src, weights, weights_shape=[3], strides=[1], dilations=[1], groups=3)
    client.conv_transpose(src, weights, strides=[1], dilations=[1], output_padding=[1])
    client.conv_transpose(src, weights, bias, strides=[1], dilations=[1], reference=True)
    paths = [received.path.split("/")[3] for received in server.received]
    assert paths == ["ConvTransposeBackwardWeights", "ConvolutionBackwardWeights", *["ConvTranspose"] * 2]
    assert [list(received.tensors) for received in server.received] == [
        ["weights_shape", "src", "diff_dst"],
        ["weights_shape", "src", "diff_dst"],
        ["src", "weights"],
        ["src", "weights", "bias"],
    ]
    first, *_, last = server.received
    assert first.document["parameters"] == {"strides": [2, 2], "dilations": [1, 1]}
    assert first.tensors["weights_shape"].tolist() == [3, 2, 1, 1]
    assert last.document["parameters"] == {"strides": [1], "dilations": [1], "reference": True}


def test_calls_the_binary_api_cannot_represent_are_sent_as_multipart(
    client: Client, server: Server, tmp_path: Path
) -> None:
    """Dumped ops, attributes whose name the protocol uses, odd inputs and other memory orders are sent in full."""
    np.save(tmp_path / "odd.npy", np.asfortranarray(SRC))
    np.save(tmp_path / "swapped.npy", SRC.astype(">f4"))
    odd: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"src": SRC}, {"kind": "Op", "attrs": {"groups": 1}}),
        ({"src": SRC}, {"timeout": 5}),
        ({"src": SRC}, {"sequence_id": 5}),
        ({"src": SRC, "weights_shape": [1.5]}, {}),
        ({"src": SRC, "weights_shape": [2**63]}, {}),
        ({"src": tmp_path / "odd.npy"}, {}),
        ({"src": tmp_path / "swapped.npy"}, {}),
    ]
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


def test_pages(client: Client, server: Server) -> None:
    """The client returns the service's lists and tables as data."""
    server.script += [
        lambda handler, _: handler.reply(200, b'[{"op": "Op"}]'),
        lambda handler, _: handler.reply(200, b'{"name": "Op"}'),
        lambda handler, _: handler.reply(200, b'{"resolved": {}}'),
    ]
    assert client.operations() == [{"op": "Op"}]
    assert client.describe("Op-1") == {"name": "Op"}
    assert client.validate("Op", {"src": SRC, "w": {"dtype": "f32", "shape": [1]}, "weights_shape": [1]}, ATTRIBUTES)
    assert [received.path for received in server.received] == ["/v1/ops", "/v1/ops/Op-1", "/v1/ops/Op/validate"]
    assert server.received[2].document["inputs"] == {
        "src": {"dtype": "f32", "shape": [2, 3, 40, 50]},
        "w": {"dtype": "f32", "shape": [1]},
        "weights_shape": [1],
    }


def test_health(client: Client, server: Server) -> None:
    """Ready, starting and draining are answers; waiting ends with the first ready one."""
    starting = json.dumps({"status": "starting", "progress": 0.5}).encode()
    server.script += [
        lambda handler, _: handler.reply(200, b'{"status": "ready"}'),
        lambda handler, _: handler.reply(503, starting),
        lambda handler, _: handler.problem(503, "shutting_down"),
        lambda handler, _: handler.reply(503, starting),
        lambda handler, _: handler.reply(200, b'{"status": "ready"}'),
    ]
    assert client.health() == convgrad.Health(True, {"status": "ready"})
    health = client.health()
    assert not health.ready
    assert health.detail["status"] == "starting"
    assert health.detail["progress"] == 0.5
    assert not client.health().ready
    assert client.wait_until_ready(5).ready


def test_waiting_for_a_service_ends() -> None:
    """Waiting for a service that never becomes ready ends with a timeout."""
    with Client(f"http://127.0.0.1:{free_port()}") as client, pytest.raises(convgrad.TimedOut, match=r"0\.05 s"):
        client.wait_until_ready(0.05)


ERRORS: list[tuple[int, str, type[convgrad.ConvgradError]]] = [
    (400, "parse_error", convgrad.ParseError),
    (401, "unauthorised", convgrad.Unauthorised),
    (404, "unknown_operation", convgrad.UnknownOperation),
    (413, "too_large", convgrad.TooLarge),
    (422, "invalid_params", convgrad.InvalidParams),
    (422, "unsupported", convgrad.Unsupported),
    (500, "worker_lost", convgrad.WorkerLost),
    (504, "deadline_exceeded", convgrad.DeadlineExceeded),
    (500, "a_code_of_the_future", convgrad.ServiceError),
]


@pytest.mark.parametrize(("status", "code", "cls"), ERRORS)
def test_problems_become_typed_errors(
    client: Client, server: Server, status: int, code: str, cls: type[convgrad.ConvgradError]
) -> None:
    """A problem+json reply raises the class of its code, with message and data, without a retry."""
    errors = [{"loc": ["attributes", "strides", 0], "msg": "must be positive", "type": "range"}]
    server.script.append(lambda handler, _: handler.problem(status, code, errors=errors, request_id="r1"))
    with pytest.raises(cls, match="rule") as caught:
        client.run("Op", {"src": SRC})
    assert type(caught.value) is cls
    assert caught.value.data == {"errors": errors, "request_id": "r1"}
    assert len(server.received) == 1


def test_an_error_in_the_stream_is_raised(client: Client, server: Server) -> None:
    """An error after the first tile raises the class of its code, and is not retried."""
    fault = frame({"type": "error", "code": "deadline_exceeded", "message": "over", "data": {"limit": 3}})
    server.script.append(lambda handler, _: handler.frames([*stream_of(SRC)[:3], fault]))
    with pytest.raises(convgrad.DeadlineExceeded, match="over") as caught:
        client.run("Op", {"src": SRC})
    assert caught.value.data == {"limit": 3}
    assert len(server.received) == 1


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


def test_no_wait_exceeds_the_budget(client: Client, server: Server) -> None:
    """A Retry-After beyond the budget raises at once, with the time to wait."""
    server.script.append(lambda handler, _: handler.reply(503, b"{}", Retry_After="3600"))
    with pytest.raises(convgrad.Overloaded) as caught:
        client.run("Op", {"src": SRC})
    assert caught.value.retry_after == 3600
    assert len(server.received) == 1


def test_run_retries_a_reply_that_broke_off(client: Client, server: Server) -> None:
    """No part of the broken reply has reached the caller, so `run` sends the call again."""
    server.script += [cut, cut]
    np.testing.assert_array_equal(client.run("Op", {"src": SRC}), SRC)
    assert len(server.received) == 3


def test_run_retries_an_output_that_broke_off(client: Client, server: Server) -> None:
    """The same holds for an output without frames, cut off by the connection or by the service."""

    def cut_off(handler: Handler, received: Received) -> None:
        head, tensor = whole_of(received.tensors["src"])
        handler.whole(head, tensor[:-1])

    def hang_up(handler: Handler, _: Received) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "application/octet-stream")
        handler.send_header("Content-Length", "1000")
        handler.send_header("Inference-Header-Content-Length", "100")
        handler.end_headers()
        handler.close_connection = True

    server.script += [cut_off, hang_up]
    np.testing.assert_array_equal(client.run("Op", {"src": SRC}), SRC)
    assert len(server.received) == 3


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


def test_no_service_is_connect_failed() -> None:
    """A refused connection is `ConnectFailed`, after all attempts."""
    with Client(f"http://127.0.0.1:{free_port()}", retry=QUICK) as client, pytest.raises(convgrad.ConnectFailed):
        client.run("Op", {"src": SRC})


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
