"""API keys that can't be sent in a header."""

from __future__ import annotations

import traceback

import pytest

from convgrad import AsyncClient, Client
from convgrad._cli import main

SECRET = "cg_0123456789abcdefghijklmnopqrstuvwxyz"
WRONG = {
    f"{SECRET}\r\n": "a line break",
    f"{SECRET} ": "character 40 of 40 is a space",
    f"é{SECRET}": "character 1 of 40 is not ASCII",
    f"{SECRET[:5]}\0{SECRET[5:]}": "character 6 of 40 is a control character",
    "": "is empty",
}


@pytest.mark.parametrize(("key", "message"), WRONG.items())
def test_a_bad_key_is_rejected(key: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Clients and command say what is wrong and where, and no line of a traceback shows the key."""
    texts = []
    for client in (Client, AsyncClient):
        with pytest.raises(ValueError, match="API key") as caught:
            client(api_key=key)
        texts.append("".join(traceback.format_exception(caught.value)))
    assert main(["health", "--api-key", key]) == 2
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    assert all(message in text for text in (*texts, err))
    assert SECRET[3:] not in "".join((*texts, out, err))


def test_an_empty_variable_is_no_key(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """CONVGRAD_API_KEY without a value counts as unset; with a wrong one it is rejected like the flag."""
    for key, status in (("", 5), (f"{SECRET}\n", 2)):
        monkeypatch.setenv("CONVGRAD_API_KEY", key)
        assert main(["health", "--url", "http://127.0.0.1:1"]) == status
    assert SECRET not in capsys.readouterr().err
