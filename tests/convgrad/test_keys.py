"""API keys that can't be sent in a header."""

from __future__ import annotations

import traceback

import pytest

from convgrad import AsyncClient, Client
from convgrad._cli import main

SECRET = "cg_0123456789abcdefghijklmnopqrstuvwxyz"
WRONG = {
    f"{SECRET}\n": "character 40 of 40 is a line break",
    f"{SECRET} ": "character 40 of 40 is a space",
    f"{SECRET}\r\n": "a line break",
    f"é{SECRET}": "character 1 of 40 is not ASCII",
    f"{SECRET[:5]}\0{SECRET[5:]}": "character 6 of 40 is a control character",
    "": "is empty",
}


@pytest.mark.parametrize("client", [Client, AsyncClient])
@pytest.mark.parametrize(("key", "message"), WRONG.items())
def test_a_client_rejects_a_bad_key(client: type, key: str, message: str) -> None:
    """The error says what is wrong and where, and no line of the traceback shows the key."""
    with pytest.raises(ValueError, match="API key") as caught:
        client(api_key=key)
    text = "".join(traceback.format_exception(caught.value))
    assert message in text
    assert SECRET[3:] not in text


@pytest.mark.parametrize(("key", "message"), WRONG.items())
def test_the_command_rejects_a_bad_key(key: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The command prints the same error without a traceback, with the exit status for a wrong flag."""
    assert main(["health", "--api-key", key]) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert SECRET[3:] not in said.err + said.out
    assert "Traceback" not in said.err


def test_an_empty_variable_is_no_key(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """CONVGRAD_API_KEY without a value counts as unset; with a wrong one it is rejected like the flag."""
    monkeypatch.setenv("CONVGRAD_API_KEY", "")
    assert main(["health", "--url", "http://127.0.0.1:1"]) == 5
    monkeypatch.setenv("CONVGRAD_API_KEY", f"{SECRET}\n")
    assert main(["health", "--url", "http://127.0.0.1:1"]) == 2
    assert SECRET not in capsys.readouterr().err
