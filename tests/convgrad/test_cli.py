"""The command against a real HTTP server."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import convgrad
from convgrad._cli import main
from tests.convgrad.server import Handler, Received, Server, free_port, stream_of

SRC = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
TABLE = {
    "op": "Op",
    "summary": "Compute it.",
    "formula": "y = x",
    "inputs": [{"name": "src", "dtypes": ["f32", "f16"], "required": True, "description": "In."}],
    "outputs": [{"name": "dst", "dtypes": ["f32", "f16"], "required": True, "description": "Out."}],
    "attributes": [
        {"name": "strides", "type": "s64[]", "required": "yes", "default": None, "description": "Steps."},
        {"name": "groups", "type": "s64", "required": "no", "default": 1, "description": "Parts."},
    ],
    "layouts": {"weights": {"OIX": {"I": "(O, I/g, X)"}}},
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: Server) -> Path:
    """Run in an empty folder that has one tensor, with the service's address in the environment."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CONVGRAD_URL", server.url)
    np.save(tmp_path / "src.npy", SRC)
    return tmp_path


def replying(value: Any, status: int = 200) -> Any:
    """Return a step that replies with JSON."""
    return lambda handler, _: handler.reply(status, json.dumps(value).encode())


def test_run(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    """The command reads files, writes one, and prints one line about it."""
    arguments = ["run", "Op", "--src", "src.npy", "--weights-shape", "3,4", "--attr", "strides=2", "--attr", "groups=1"]
    assert main([*arguments, "--input", "bias=src.npy", "-o", "dw.npy", "--reference", "--deadline", "9"]) == 0
    np.testing.assert_array_equal(np.load("dw.npy"), SRC)
    (received,) = server.received
    assert received.path == "/v2/models/Op/infer"
    options = {"reference": True, "timeout": 9_000_000}
    assert received.document["parameters"] == {"strides": [2], "groups": 1, **options}
    assert received.tensors["weights_shape"].tolist() == [3, 4]
    assert sorted(received.tensors) == ["bias", "src", "weights_shape"]
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("convgrad: diff_weights f32 [2, 3, 4] -> dw.npy (")


def test_the_output_of_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Without -o the file is named after the output; --quiet prints nothing, --json what was resolved and measured."""
    assert main(["run", "Op", "--src", "src.npy", "--quiet"]) == 0
    np.testing.assert_array_equal(np.load("diff_weights.npy"), SRC)
    assert capsys.readouterr() == ("", "")
    assert main(["run", "Op", "--src", "src.npy", "--json"]) == 0
    expected = {"output": "diff_weights", "file": "diff_weights.npy", "resolved": {"groups": 1}, "stats": {"tiles": 2}}
    assert json.loads(capsys.readouterr().out) == expected


def several(handler: Handler, received: Received) -> None:
    """Reply with the outputs asked for, each the double of the one before."""
    names = [output["name"] for output in received.document["outputs"]]
    streams = [stream_of(SRC * 2**i, output=name, outputs=names) for i, name in enumerate(names)]
    handler.frames([frame for frames in streams for frame in frames])


def test_run_several_outputs(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    """--outputs asks for several outputs; they are written to one .npz file."""
    server.script += [several, several]
    call = ["run", "Op", "--src", "src.npy", "--outputs", "diff_weights,diff_bias"]
    assert main([*call, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["outputs"] == ["diff_weights", "diff_bias"]
    assert main([*call, "-o", "all.npz"]) == 0
    for name in ("outputs.npz", "all.npz"):
        with np.load(name) as found:
            assert list(found) == ["diff_weights", "diff_bias"]
            np.testing.assert_array_equal(found["diff_bias"], 2 * SRC)
    assert main([*call, "-o", "all.npy"]) == 2


def test_bfloat16_in_and_out(server: Server) -> None:
    """bf16 is read from unsigned 16-bit values if --dtype says so, and written in the way of ml_dtypes."""
    values = SRC.astype(ml_dtypes.bfloat16)
    np.save("u2.npy", values.view(np.uint16))
    server.script.append(lambda handler, _: handler.frames(stream_of(values)))
    assert main(["run", "Op", "--src", "u2.npy", "--dtype", "bf16", "-o", "dw.npy"]) == 0
    assert server.received[0].document["inputs"][0]["datatype"] == "BF16"
    np.testing.assert_array_equal(np.load("dw.npy").view(ml_dtypes.bfloat16), values)


def test_run_a_spec(here: Path, server: Server) -> None:
    """A spec file defines the call; flags add to it; its paths are relative to it."""
    (here / "specs").mkdir()
    np.save(here / "specs" / "a.npy", SRC + 1)
    spec = {"op": "Op", "attributes": {"groups": 1}, "inputs": {"src": "a.npy"}}
    (here / "specs" / "op.json").write_text(json.dumps(spec))
    assert main(["run", "--spec", "specs/op.json", "--attr", "groups=3"]) == 0
    assert server.received[0].document["parameters"] == {"groups": 3}
    np.testing.assert_array_equal(np.load("diff_weights.npy"), SRC + 1)


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        """Return True."""
        return True


def test_a_progress_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch, server: Server) -> None:
    """On a terminal a bar grows in each phase, while the service starts too, and is erased before the last line."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    server.script += [replying({"status": "starting", "progress": share}, 503) for share in (0.25, 0.5)]
    server.script.append(replying({"status": "ready"}))
    assert main(["run", "Op", "--src", "src.npy", "--wait", "9"]) == 0
    _, *drawn = (" ".join(line.replace("░", "").split()) for line in terminal.getvalue().split("\r\x1b[K"))
    drawn = [re.sub("█+ ", "", line).partition(",")[0] for line in drawn]
    assert drawn[:3] == ["convgrad: starting 25 %", "convgrad: starting 50 %", ""]
    uploading, computing = (
        [f"Op: {phase} {share} %" for share in (0, 50, 100)] for phase in ("uploading", "computing")
    )
    assert drawn[3:-1] == [uploading[0], uploading[2], "Op: queued", *computing[1:]]
    assert drawn[-1].startswith("convgrad: diff_weights")
    assert [received.path for received in server.received] == ["/readyz"] * 3 + ["/v2/models/Op/infer"]


def test_validate(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    """Dtypes and shapes of files and described tensors are checked, and the resulting shapes are printed."""
    server.script += [replying({"op": "Op", "resolved": {"groups": 1}})] * 2
    arguments = ["validate", "Op", "--src", "src.npy", "--diff-dst", "bf16:1,2"]
    assert main(arguments) == 0
    assert server.received[0].document["inputs"] == {
        "src": {"dtype": "f32", "shape": [2, 3, 4]},
        "diff_dst": {"dtype": "bf16", "shape": [1, 2]},
    }
    assert capsys.readouterr().out == 'op        Op\nresolved  {"groups": 1}\n'
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"op": "Op", "resolved": {"groups": 1}}


@pytest.mark.parametrize(
    ("command", "reply", "lines"),
    [
        (["ops"], [{"op": "Op", "aliases": ["Op-1", "Old"], "summary": "Compute it."}],
         ["Op - Compute it.", "also Op-1, Old"]),
        (["describe", "Op"], TABLE,
         ["src f32/f16 required In.", "strides s64[] required Steps.", "groups s64 = 1 Parts.", "OIX (O, I/g, X)"]),
    ],
)  # fmt: skip
def test_lists_and_tables(
    server: Server, capsys: pytest.CaptureFixture[str], command: list[str], reply: Any, lines: list[str]
) -> None:
    """The operations, and the table of one, are printed as text, or as JSON."""
    server.script += [replying(reply)] * 2
    assert main(command) == 0
    assert {*lines} <= {" ".join(line.split()) for line in capsys.readouterr().out.splitlines()}
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == reply


def test_health(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    """Ready is 0, starting is 4, and --wait waits for ready; without a service it ends in time."""
    starting, ready = replying({"status": "starting", "progress": 0.5}, 503), replying({"status": "ready"})
    server.script += [ready, starting, starting, ready]
    assert main(["health"]) == 0
    assert main(["health"]) == 4
    assert main(["health", "--wait", "5"]) == 0
    assert capsys.readouterr().out.split()[:4] == ["status", "ready", "status", "starting"]
    assert main(["health", "--url", f"http://127.0.0.1:{free_port()}", "--wait", "0.2"]) == 5


def test_bench(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    """A run of one call prints latency, throughput and the service's own time; a call that fails ends the run."""
    server.script += [lambda handler, received: handler.frames(stream_of(received.tensors["src"]))] * 3
    assert main(["bench", "Op", "--src", "f16:1,8,4,4", "--seconds", "0", "--clients", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["calls"] == 2
    assert report["p50_ms"] <= report["p90_ms"] <= report["p99_ms"]
    assert report["calls_per_s"] > 0
    assert {received.tensors["src"].dtype for received in server.received} == {np.dtype(np.float16)}
    server.script += [lambda handler, _: handler.frames(stream_of(SRC))] * 2
    server.script += [lambda handler, _: handler.problem(422, "invalid_params")] * 2
    assert main(["bench", "Op", "--src", "f16:1,8", "--seconds", "9", "--clients", "2"]) == 3


def error_of(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Return the error that was printed as the one line on standard error."""
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    found: dict[str, Any] = json.loads(line)["error"]
    return found


@pytest.mark.parametrize(
    ("status", "code", "exit_code"),
    [(422, "invalid_params", 3), (401, "unauthorised", 3), (500, "worker_lost", 4), (504, "deadline_exceeded", 4)],
)
def test_exit_codes(server: Server, capsys: pytest.CaptureFixture[str], status: int, code: str, exit_code: int) -> None:
    """The exit code shows the kind of error; each broken rule is printed once, or all as one line of JSON."""
    errors = [
        {"loc": ["attributes", "groups"], "msg": "rule", "type": "range"},
        {"loc": ["attributes", "strides", 0], "msg": "must be positive", "type": "range"},
    ]
    server.script += [lambda handler, _: handler.problem(status, code, errors=errors)] * 2
    assert main(["run", "Op", "--src", "src.npy"]) == exit_code
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "convgrad: rule"
    assert lines[1:] == (["convgrad:   attributes.strides.0: must be positive"] if code == "invalid_params" else [])
    assert main(["run", "Op", "--src", "src.npy", "--json"]) == exit_code
    error = error_of(capsys)
    assert (error["code"], error["message"], error["exit"]) == (code, "rule", exit_code)
    assert error["data"]["errors"] == errors


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ([], "usage_error"),
        (["bogus"], "usage_error"),
        (["run", "Op", "--attr", "x"], "usage_error"),
        (["run", "Op", "--dtype", "f64"], "usage_error"),
        (["run", "Op", "--src", "missing.npy"], "file_error"),
        (["run", "--src", "src.npy"], "usage_error"),
        (["run", "Op", "--src", "f32:1,2"], "usage_error"),
        (["run", "--spec", "src.npy"], "usage_error"),
        (["health", "--url", "ftp://host"], "usage_error"),
        (["health", "--url", f"http://127.0.0.1:{free_port()}"], "connect_failed"),
    ],
)
def test_commands_that_can_not_be_run(
    capsys: pytest.CaptureFixture[str], server: Server, arguments: list[str], code: str
) -> None:
    """The reason is one line, or JSON; nothing is sent."""
    status = 5 if code == "connect_failed" else 2
    assert main(arguments) == status
    (reason,) = capsys.readouterr().err.splitlines()
    assert reason.startswith("convgrad: ")
    assert "convgrad.local()" not in reason, "a flag takes its place"
    assert main([*arguments, "--json"]) == status
    error = error_of(capsys)
    assert (error["code"], error["exit"]) == (code, status)
    assert error["message"]
    assert not server.received


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["srve"], "srve is not a command of convgrad; did you mean serve?"),
        (["--versoin"], "--versoin is not a flag of convgrad; did you mean --version?"),
        (["bench", "--dst_shape=1,2"], "--dst_shape is not a flag of convgrad bench; did you mean --dst-shape?"),
        (["ops", "--zzz"], "--zzz is not a flag of convgrad ops (convgrad ops --help lists them)"),
        (["keys", "a", "--fiel", "x"], "--fiel is not a flag of convgrad keys; did you mean --file?"),
    ],
)
def test_the_name_that_was_meant(capfd: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    """A misspelt subcommand or flag is answered in one line with the closest one, whatever else is missing."""
    code = "import sys; from convgrad._cli import main; sys.exit(main(sys.argv[1:]))"
    assert subprocess.run([sys.executable, "-c", code, *arguments], check=False).returncode == 2
    assert capfd.readouterr().err == f"convgrad: {said}\n"


def test_an_interrupt_while_the_command_is_imported() -> None:
    """Ctrl-C before the command has begun is one line and exit code 130, without a traceback."""
    code = (
        "import builtins, signal, sys; found = builtins.__import__\n"
        "def interrupted(name, *rest, **more):\n"
        "    if name == 'numpy': builtins.__import__ = found; signal.raise_signal(signal.SIGINT)\n"
        "    return found(name, *rest, **more)\n"
        "from convgrad._cli import main; builtins.__import__ = interrupted; sys.exit(main(['ops']))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "convgrad: interrupted\n")


def test_serve_without_the_service(here: Path) -> None:
    """If only the client is installed, `serve` says where to get the service."""
    shutil.copytree(Path(convgrad.__file__).parent, here / "convgrad")
    code = (
        "import sys; from pathlib import Path;"
        "sys.path = [p for p in sys.path if not Path(p, 'app').is_dir()];"
        "from convgrad._cli import main; sys.exit(main(['serve']))"
    )
    environment = {**os.environ, "PYTHONPATH": str(here)}
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "the service is not installed here" in done.stderr
