"""The command against a real HTTP server."""

from __future__ import annotations

import io
import json
import os
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


def bfloat16(handler: Handler, received: Received) -> None:
    """Reply with bfloat16."""
    handler.frames(stream_of(SRC.astype(ml_dtypes.bfloat16)))


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


def test_run_names_the_file_after_the_output(capsys: pytest.CaptureFixture[str]) -> None:
    """Without -o the file is named after the output; --quiet prints nothing."""
    assert main(["run", "Op", "--src", "src.npy", "--quiet"]) == 0
    np.testing.assert_array_equal(np.load("diff_weights.npy"), SRC)
    assert capsys.readouterr() == ("", "")


def test_run_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    """--json prints what was resolved and measured."""
    assert main(["run", "Op", "--src", "src.npy", "--json"]) == 0
    reply = json.loads(capsys.readouterr().out)
    expected = {"output": "diff_weights", "file": "diff_weights.npy", "resolved": {"groups": 1}, "stats": {"tiles": 2}}
    assert reply == expected


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
    assert "diff_weights f32 [2, 3, 4], diff_bias f32 [2, 3, 4] -> all.npz" in capsys.readouterr().err
    for name in ("outputs.npz", "all.npz"):
        with np.load(name) as found:
            assert list(found) == ["diff_weights", "diff_bias"]
            np.testing.assert_array_equal(found["diff_bias"], 2 * SRC)
    assert main([*call, "-o", "all.npy"]) == 2
    assert "need a .npz file" in capsys.readouterr().err


def test_bfloat16_in_and_out(server: Server) -> None:
    """bf16 is read from unsigned 16-bit values if --dtype says so, and written in the way of ml_dtypes."""
    np.save("u2.npy", SRC.astype(ml_dtypes.bfloat16).view(np.uint16))
    server.script.append(bfloat16)
    assert main(["run", "Op", "--src", "u2.npy", "--dtype", "bf16", "-o", "dw.npy"]) == 0
    assert server.received[0].document["inputs"][0]["datatype"] == "BF16"
    np.testing.assert_array_equal(np.load("dw.npy").view(ml_dtypes.bfloat16), SRC.astype(ml_dtypes.bfloat16))


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


def test_a_progress_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal a bar grows in each phase of the call, and is erased before the last line."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert main(["run", "Op", "--src", "src.npy"]) == 0
    drawn = terminal.getvalue().split("\r\x1b[K")
    assert drawn[1].startswith("Op: uploading ░")
    assert drawn[1].endswith("   0 %")
    assert drawn[2].endswith("█ 100 %")
    assert drawn[3] == "Op: queued"
    assert drawn[4].startswith("Op: computing █")
    assert drawn[4].endswith(" 50 %")
    assert drawn[5].endswith("█ 100 %")
    assert drawn[6].startswith("convgrad: diff_weights")


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


def test_ops(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    """The operations are listed with their aliases."""
    server.script += [replying([{"op": "Op", "aliases": ["Op-1", "Old"], "summary": "Compute it."}])] * 2
    assert main(["ops"]) == 0
    assert capsys.readouterr().out == "Op - Compute it.\n    also Op-1, Old\n"
    assert main(["ops", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["op"] == "Op"


def test_describe(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    """The table of an operation is printed as text, or as JSON."""
    server.script += [replying(TABLE)] * 2
    assert main(["describe", "Op"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "src f32/f16 required In." in lines
    assert "strides s64[] required Steps." in lines
    assert "groups s64 = 1 Parts." in lines
    assert "OIX (O, I/g, X)" in lines
    assert main(["describe", "Op", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == TABLE


def test_health(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    """Ready is 0, starting is 4, and --wait waits for ready."""
    starting, ready = replying({"status": "starting", "progress": 0.5}, 503), replying({"status": "ready"})
    server.script += [ready, starting, starting, ready]
    assert main(["health"]) == 0
    assert main(["health"]) == 4
    assert main(["health", "--wait", "5"]) == 0
    assert capsys.readouterr().out.split()[:4] == ["status", "ready", "status", "starting"]


def test_bench(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    """A run of one call prints latency, throughput and the service's own time."""
    server.script += [lambda handler, received: handler.frames(stream_of(received.tensors["src"]))] * 3
    assert main(["bench", "Op", "--src", "f16:1,8,4,4", "--seconds", "0", "--clients", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["calls"] == 2
    assert report["p50_ms"] <= report["p90_ms"] <= report["p99_ms"]
    assert report["calls_per_s"] > 0
    assert {received.tensors["src"].dtype for received in server.received} == {np.dtype(np.float16)}


def test_bench_stops_at_an_error(server: Server) -> None:
    """A call that fails ends the run with its exit code."""
    server.script += [lambda handler, _: handler.frames(stream_of(SRC))] * 2
    server.script += [lambda handler, _: handler.problem(422, "invalid_params")] * 2
    assert main(["bench", "Op", "--src", "f16:1,8", "--seconds", "9", "--clients", "2"]) == 3


@pytest.mark.parametrize(
    ("status", "code", "exit_code"),
    [(422, "invalid_params", 3), (401, "unauthorised", 3), (500, "worker_lost", 4), (504, "deadline_exceeded", 4)],
)
def test_exit_codes(server: Server, capsys: pytest.CaptureFixture[str], status: int, code: str, exit_code: int) -> None:
    """The exit code shows the kind of error; each broken rule is printed once, the first as the message."""
    errors = [
        {"loc": ["attributes", "groups"], "msg": "rule", "type": "range"},
        {"loc": ["attributes", "strides", 0], "msg": "must be positive", "type": "range"},
    ]
    server.script.append(lambda handler, _: handler.problem(status, code, errors=errors))
    assert main(["run", "Op", "--src", "src.npy"]) == exit_code
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "convgrad: rule"
    assert lines[1:] == (["convgrad:   attributes.strides.0: must be positive"] if code == "invalid_params" else [])


def test_no_service(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a service at the address the exit code is 5."""
    assert main(["health", "--url", f"http://127.0.0.1:{free_port()}"]) == 5
    assert "; start one with `convgrad serve`, or use --local of run, verify and check" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "Op", "--src", "missing.npy"],
        ["run", "--src", "src.npy"],
        ["run", "Op", "--src", "f32:1,2"],
        ["run", "--spec", "src.npy"],
        ["health", "--url", "ftp://host"],
    ],
)
def test_unusable_files_are_reported(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    """A missing file, a missing operation or a malformed spec: exit code 2 and the reason, without a call."""
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith("convgrad: ")


@pytest.mark.parametrize("arguments", [[], ["bogus"], ["run", "Op", "--attr", "x"], ["run", "Op", "--dtype", "f64"]])
def test_bad_command_lines(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    """They are rejected with exit code 2 and the reason in one line."""
    assert main(arguments) == 2
    (reason,) = capsys.readouterr().err.splitlines()
    assert reason.startswith("convgrad: ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["rnu", "Op"], "rnu is not a command of convgrad; did you mean run?"),
        (["srve"], "srve is not a command of convgrad; did you mean serve?"),
        (["--versoin"], "--versoin is not a flag of convgrad; did you mean --version?"),
        (["run", "Op", "--atr", "strides=1"], "--atr is not a flag of convgrad run; did you mean --attr?"),
        (["bench", "--dst_shape=1,2"], "--dst_shape is not a flag of convgrad bench; did you mean --dst-shape?"),
        (["verify", "Op", "--reslt", "x"], "--reslt is not a flag of convgrad verify; did you mean --result?"),
        (["ops", "--zzz"], "--zzz is not a flag of convgrad ops (convgrad ops --help lists them)"),
        (["keys", "a", "--fiel", "x"], "--fiel is not a flag of convgrad keys; did you mean --file?"),
    ],
)  # fmt: skip
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


PACKAGE = Path(convgrad.__file__).parent


def python(*arguments: str, path: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run Python with only `path` and the installed packages importable."""
    environment = {**os.environ, "PYTHONPATH": str(path)}
    command = [sys.executable, "-P", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


def test_serve_without_the_service(here: Path) -> None:
    """If only the client is installed, `serve` says where to get the service."""
    shutil.copytree(PACKAGE, here / "convgrad")
    code = (
        "import sys; from pathlib import Path;"
        "sys.path = [p for p in sys.path if not Path(p, 'app').is_dir()];"
        "from convgrad._cli import main; sys.exit(main(['serve']))"
    )
    done = python("-c", code, path=here, cwd=here)
    assert done.returncode == 2, done.stderr
    assert "the service is not installed here" in done.stderr
