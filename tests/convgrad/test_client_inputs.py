"""What the client takes from its caller, its environment and the network; every failure is one that it documents."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import convgrad
from convgrad import Client, ConvgradError
from tests.convgrad.server import SRC, Handler, Received, Server, free_port


def test_the_environment_has_address_and_key(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without arguments the client reads the variables that the command reads."""
    monkeypatch.setenv("CONVGRAD_URL", server.url)
    monkeypatch.setenv("CONVGRAD_API_KEY", "from-the-environment")
    with convgrad.Client() as client:
        client.run("Op", {"src": SRC})
    assert server.received[0].headers["authorization"] == "Bearer from-the-environment"


def test_no_connection_names_the_address() -> None:
    """The error says where nobody answered, without a password in the address."""
    port = free_port()
    with (
        convgrad.Client(f"http://user:secret@127.0.0.1:{port}", retry=None) as client,
        pytest.raises(
            convgrad.ConnectFailed, match=f"can't connect to the service at http://127.0.0.1:{port}"
        ) as caught,
    ):
        client.run("Op", {"src": SRC})
    assert str(caught.value).endswith("; start one with `convgrad serve`, or use convgrad.local()")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"text", "a .npy file must begin with"),
        (b"", "the file ends within its .npy header"),
        (b"\x93NUMPY\x09\x00", "the .npy format version must be"),
    ],
)
def test_a_file_of_another_format_is_named(
    client: Client, server: Server, tmp_path: Path, content: bytes, reason: str
) -> None:
    """The error names the file that is no .npy file."""
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with pytest.raises(convgrad.ParseError, match=f"^{re.escape(f'{path}: {reason}')}"):
        client.run("Op", {"src": path})
    np.save(path.with_suffix(".npy"), np.ones(3, np.complex64))
    with pytest.raises(convgrad.Unsupported, match=r"^src: .*notes.npy: the descr"):
        client.run("Op", {"src": path.with_suffix(".npy")})
    assert not server.received


def test_lists_of_numbers(client: Client, server: Server) -> None:
    """A list is a float32 tensor, also one of integers; only shapes are lists in the request."""
    client.run_detailed("Op", {"src": SRC.tolist(), "bias": [1, 2], "weights_shape": [4, 3]})
    received = server.received[-1]
    np.testing.assert_array_equal(received.tensors["src"], SRC)
    assert received.tensors["src"].dtype == received.tensors["bias"].dtype == np.float32
    assert received.tensors["bias"].tolist() == [1, 2]
    assert received.tensors["weights_shape"].tolist() == [4, 3]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "an array, not NoneType"), (object(), "an array, not object"), ([[1], [2, 3]], "an array, not list"),
        (SRC.astype(np.int64), "int64 is not computed: convert it"), (SRC > 0, "the dtype must be one of"),
        (SRC.astype(np.longdouble), f"but is {np.dtype(np.longdouble)}: convert it, .*astype"),
        (SRC.astype(np.float64), "float64 is computed only with reference=True.*astype"),
    ],
)  # fmt: skip
def test_what_is_no_tensor(client: Client, server: Server, value: Any, message: str) -> None:
    """The error names the input and what it is; nothing is sent."""
    with pytest.raises(convgrad.Unsupported, match=f"^src: .*{message}"):
        client.run("Op", {"src": value})
    assert not server.received


def test_float64_is_sent_for_the_reference(client: Client, server: Server) -> None:
    """With `reference` a call takes float64 as it is."""
    sent = SRC.astype(np.float64) + 2.0**-40
    client.run_detailed("Op", {"src": sent}, reference=True)
    received = server.received[-1]
    assert received.document["inputs"][0]["datatype"] == "FP64"
    np.testing.assert_array_equal(received.tensors["src"], sent)


def test_tensors_of_pytorch(client: Client, server: Server) -> None:
    """A tensor of PyTorch is sent as it is: with gradients, as bfloat16, and with other strides."""
    torch = pytest.importorskip("torch")
    plain = torch.from_numpy(SRC.copy())
    for tensor, datatype in (
        (plain.clone().requires_grad_(), "FP32"), (plain.bfloat16(), "BF16"), (plain.half(), "FP16"),
        (plain.transpose(0, 1), "FP32"),
    ):  # fmt: skip
        client.run_detailed("Op", {"src": tensor})
        received = server.received[-1]
        assert received.document["inputs"][0]["datatype"] == datatype
        np.testing.assert_array_equal(received.tensors["src"].astype(np.float32), tensor.detach().float().numpy())


GRAPH: dict[str, Any] = {"graph": []}

CALLS: dict[str, Callable[[Client], object]] = {
    "run": lambda client: client.run("Op", {"src": SRC}),
    "run_detailed": lambda client: client.run_detailed("Op", {"src": SRC}),
    "run_outputs": lambda client: client.run_outputs("Op", {"src": SRC}, outputs=["a", "b"]),
    "validate": lambda client: client.validate("Op", {"src": SRC}),
    "verify": lambda client: client.verify("Op", {"src": SRC}, SRC),
    "tolerance": lambda client: client.tolerance("Op", {"src": SRC}),
    "run_graph": lambda client: client.run_graph(GRAPH, {1: SRC}),
    "validate_graph": lambda client: client.validate_graph(GRAPH),
    "verify_graph": lambda client: client.verify_graph(GRAPH, {1: SRC}, {2: SRC}),
    "operations": lambda client: client.operations(),
    "describe": lambda client: client.describe("Op"),
    "health": lambda client: client.health(),
}
NODES: list[Any] = [
    None, 1, [1], {"nodes": 1}, {"nodes": [1]}, {"nodes": [{"output": 2}]}, {"nodes": [{"output": []}]},
    {"nodes": [{"output": 2, "op": "Op", "inputs": {"src": []}, "resolved": {}}]},
    {"nodes": [{"output": 2, "op": 7, "inputs": {}, "resolved": {}}]},
]  # fmt: skip
OPERATIONS: list[Any] = [
    [1], [{"op": 1}], [{"op": "Op"}], [{"op": "Op", "outputs": 1}], [{"aliases": 1}], [{"outputs": []}],
]  # fmt: skip
BODIES = [b"", b"\xff", b"[" * 100_000, *(json.dumps(value).encode() for value in [*NODES, *OPERATIONS])]


def replying(body: bytes, kind: str) -> Callable[[Handler, Received], None]:
    """Return a step that replies with a body."""
    return lambda handler, _: handler.reply(200, body, kind)


@pytest.mark.parametrize("name", CALLS)
def test_replies_of_something_else(client: Client, server: Server, name: str) -> None:
    """Whatever answers at the address, a call returns or raises a `ConvgradError`."""
    for body in BODIES:
        server.script.clear()
        server.script += [replying(body, "application/json")] * 5
        with suppress(ConvgradError):
            CALLS[name](client)


@pytest.mark.parametrize(
    "parts",
    [
        [], [("", b"{}")], [("reply", b"{")], [("reply", b"[]")], [("reply", b'{"outputs": 1}')],
        [("reply", b'{"outputs": {"x": {"dtype": "f32"}}}'), ("x", b"\x93NUMPY")],
        [("reply", b'{"outputs": {"1": 3}}'), ("1", b"")],
    ],
)  # fmt: skip
def test_replies_to_a_graph(client: Client, server: Server, parts: list[tuple[str, bytes]]) -> None:
    """A reply to a graph whose parts are not what they should be is a `ConvgradError`."""
    text = b"".join(
        b'--b\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n' % (n.encode(), t) for n, t in parts
    )
    server.script += [replying(text + b"--b--\r\n", "multipart/form-data; boundary=b")] * 5
    if not parts:  # a reply without outputs is complete
        assert client.run_graph(GRAPH, {}) == {}
        return
    with pytest.raises(ConvgradError):
        client.run_graph(GRAPH, {})


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.run(7, {"src": SRC}),
        lambda client: client.run("Op/..", {"src": SRC}),
        lambda client: client.run("Op", {"a b": SRC}),
        lambda client: client.run("Op", {"src": SRC}, {"strides": object()}),
        lambda client: client.run("Op", {"src": SRC}, {"strides": float("nan")}),
        lambda client: client.run("Op", {"src": SRC}, deadline=0),
        lambda client: client.run("Op", {"src": SRC}, deadline=-math.inf),
        lambda client: client.run("Op", {"src": SRC}, deadline=math.nan),
        lambda client: client.run_graph(GRAPH, {"a b": SRC}),
    ],
)
def test_calls_that_are_wrong(client: Client, server: Server, call: Callable[[Client], object]) -> None:
    """A call that can't be sent is a `ConvgradError`, and nothing is sent."""
    with pytest.raises(ConvgradError):
        call(client)
    assert not server.received


def test_the_exceptions_of_the_docstring(client: Client, tmp_path: Path) -> None:
    """Files, types and a closed client raise Python's own exceptions, as the docstring of `Client` says."""
    (tmp_path / "graph.json").write_text("{", encoding="utf-8")
    cases: list[tuple[type[Exception], Callable[[], object]]] = [
        (OSError, lambda: client.run("Op", {"src": "missing.npy"})),
        (OSError, lambda: client.run_graph("missing.json", {})),
        (ValueError, lambda: client.run_graph(tmp_path / "graph.json", {})),
        (TypeError, lambda: client.run("Op", {"src": SRC}, deadline="soon")),  # type: ignore[arg-type]
        (ValueError, lambda: Client("http://host:port")),
        (ValueError, lambda: Client("ftp://host")),
    ]
    for kind, call in cases:
        assert Client.__doc__ is not None
        assert f"`{kind.__name__}`" in Client.__doc__
        with pytest.raises(kind):
            call()
    client.close()
    with pytest.raises(RuntimeError):
        client.operations()
