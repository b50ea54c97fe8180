"""Standard input and output: pipes, terminals, and readers that end."""

from __future__ import annotations

import io
import json
import os
import pty
from pathlib import Path

import numpy as np
import pytest

from tests.convgrad.command.conftest import SRC, Shell
from tests.convgrad.server import Server


def test_a_pipeline(shell: Shell) -> None:
    """The command reads a tensor from a pipe and writes one to a pipe."""
    done = shell("convgrad run Op --src - -o - <src.npy | convgrad run Op --src - -o - -q | cat")
    np.testing.assert_array_equal(np.load(io.BytesIO(done.stdout)), SRC)
    assert done.stderr.startswith(b"convgrad: diff_weights f32 [4, 65536] -> - (")


def test_a_spec_and_a_graph_from_a_pipe(shell: Shell, server: Server) -> None:
    """A spec is read from standard input, with paths relative to the folder; so is a graph."""
    spec = json.dumps({"op": "Op", "attributes": {"groups": 2}, "inputs": {"src": "src.npy"}})
    assert shell(f"echo '{spec}' | convgrad run --spec - -q").returncode == 0
    assert server.received[0].document["parameters"] == {"groups": 2}
    server.script.append(lambda handler, received: handler.reply(200, json.dumps(received.document).encode()))
    done = shell("""echo '{"graph": [{"id": 1}]}' | convgrad validate --graph - --json""")
    assert json.loads(done.stdout)["graph"] == {"graph": [{"id": 1}]}


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("echo hello | convgrad run Op --src -", b"must be a complete .npy file"),
        ("head -c 200000 src.npy | convgrad run Op --src -", b"must be a complete .npy file"),
        ("convgrad run Op --src - --weights - <src.npy", b"only one file can be read from standard input"),
        ("echo 1 | convgrad run --spec -", b"standard input must be a JSON object"),
        ("echo '{' | convgrad validate --graph -", b"standard input must be JSON"),
    ],
)
def test_unusable_input(shell: Shell, server: Server, line: str, reason: bytes) -> None:
    """What can't be read from standard input is named, and no call is made."""
    done = shell(line)
    assert done.returncode in (2, 3)
    assert reason in done.stderr
    assert not server.received


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_ends(shell: Shell, unbuffered: str) -> None:
    """When the reader of a pipe ends early, the status is that of SIGPIPE, and nothing is printed."""
    call = f"PYTHONUNBUFFERED={unbuffered} convgrad run Op --src src.npy -q -o -"
    done = shell(f"{call} | head -c 1 >/dev/null; echo ${{PIPESTATUS[0]}}")
    assert (done.stdout, done.stderr) == (b"141\n", b"")
    done = shell("convgrad run --help | true; echo ${PIPESTATUS[0]}")
    assert done.stdout in (b"0\n", b"141\n")  # the help may be written before `true` ends
    assert done.stderr == b""


def test_nothing_binary_on_a_terminal(tmp_path: Path, server: Server, shell: Shell) -> None:
    """`-o -` on a terminal, and a tensor from one, are refused before a call is made."""
    ours, theirs = pty.openpty()
    terminal = os.ttyname(theirs)
    try:
        done = shell(f"convgrad run Op --src src.npy -o - >{terminal}")
        assert (done.returncode, done.stderr) == (
            2,
            b"convgrad: -o - writes binary data, but standard output is a terminal: use a pipe or a file\n",
        )
        done = shell(f"convgrad run Op --src - <{terminal}")
        assert done.returncode == 2
        assert b"which is a terminal" in done.stderr
    finally:
        os.close(ours)
        os.close(theirs)
    assert not server.received
