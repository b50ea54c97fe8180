"""Exit codes and errors as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from convgrad._cli import main
from tests.convgrad.server import Server, free_port


def error_of(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    """Return the error that was printed as the one line on standard error."""
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    found: dict[str, object] = json.loads(line)["error"]
    return found


def test_an_error_of_the_service_as_json(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    """With --json an error is one line of JSON, with its code, its data and the exit code."""
    errors = [{"loc": ["attributes", "strides", 0], "msg": "must be positive", "type": "range"}]
    server.script.append(lambda handler, _: handler.problem(422, "invalid_params", errors=errors))
    assert main(["describe", "Op", "--url", server.url, "--json"]) == 3
    error = error_of(capsys)
    assert (error["code"], error["message"], error["exit"]) == ("invalid_params", "rule", 3)
    assert isinstance(error["data"], dict)
    assert error["data"]["errors"] == errors


@pytest.mark.parametrize(
    ("arguments", "code", "status"),
    [
        (["run", "Op", "--bogus"], "usage_error", 2),
        (["run", "Op", "--attr", "x"], "usage_error", 2),
        (["run", "Op", "--src", "missing.npy"], "file_error", 2),
        (["health", "--url", "ftp://host"], "usage_error", 2),
        (["health", "--url", f"http://127.0.0.1:{free_port()}"], "connect_failed", 5),
    ],
)
def test_any_error_as_json(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    arguments: list[str], code: str, status: int,
) -> None:  # fmt: skip
    """Errors of the command line, of files and of the connection have the same form."""
    monkeypatch.chdir(tmp_path)
    assert main([*arguments, "--json"]) == status
    error = error_of(capsys)
    assert (error["code"], error["exit"]) == (code, status)
    assert error["message"]
