"""Every failure of the client is a `ConvgradError`, or one of the exceptions that its docstring names."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from convgrad import Client, ConvgradError
from tests.convgrad.server import Handler, Received, Server

SRC = np.ones((2, 3), np.float32)
GRAPH: dict[str, Any] = {"graph": []}

CALLS: dict[str, Callable[[Client], object]] = {
    "run": lambda client: client.run("Op", {"src": SRC}),
    "run_detailed": lambda client: client.run_detailed("Op", {"src": SRC}),
    "run_outputs": lambda client: client.run_outputs("Op", {"src": SRC}, outputs=["a", "b"]),
    "validate": lambda client: client.validate("Op", {"src": SRC}),
    "verify": lambda client: client.verify("Op", {"src": SRC}, SRC),
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
