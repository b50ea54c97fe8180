"""The decoder of a reply of events."""

from __future__ import annotations

import json
from typing import Any

import pytest

from convgrad import BrokenStream, InvalidParams, Progress, ProtocolError
from convgrad._messages import MEDIA_TYPE, Messages

PROGRESS = {"jsonrpc": "2.0", "method": "notifications/progress", "params": {"progress": 1, "total": 4}}
RESULT = {"jsonrpc": "2.0", "id": "a", "result": {"passed": True}}


def encoded(*messages: Any) -> bytes:
    """Return messages as events, with a ping after each."""
    return b"".join(b"data: %s\n\n: ping\n\n" % json.dumps(message).encode() for message in messages)


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_pieces(size: int) -> None:
    """However the reply is cut, its events are the same."""
    text, messages = encoded(PROGRESS, RESULT), Messages(f"{MEDIA_TYPE}; charset=utf-8")
    found = [event for at in range(0, len(text), size) for event in messages.feed(text[at : at + size])]
    assert found == [Progress(1, 4)]
    assert messages.close() == {"passed": True}


def test_errors() -> None:
    """An error has its class, message and data."""
    error = {
        "code": -32602,
        "message": "strides[0] must be at least 1",
        "data": {"code": "invalid_params", "errors": []},
    }
    messages = Messages(MEDIA_TYPE)
    assert list(messages.feed(encoded({"jsonrpc": "2.0", "id": "a", "error": error}))) == []
    with pytest.raises(InvalidParams, match="at least 1") as caught:
        messages.close()
    assert caught.value.data == {"errors": []}


def test_broken_replies() -> None:
    """A reply without its end, of another kind or with other contents is an error of its own."""
    messages = Messages(MEDIA_TYPE)
    list(messages.feed(encoded(PROGRESS) + encoded(RESULT)[:-30]))
    with pytest.raises(BrokenStream, match="before its end"):
        messages.close()
    with pytest.raises(ProtocolError, match=MEDIA_TYPE):
        Messages("text/html")
    without_number = PROGRESS | {"params": {"progress": "x"}}
    for message in ([1], 1, None, {"method": "notifications/progress"}, without_number):
        with pytest.raises(ProtocolError, match="JSON-RPC"):
            list(Messages(MEDIA_TYPE).feed(encoded(message)))
    errors: list[Any] = [{}, [], {"data": {}}, {"data": 3, "message": ""}]
    for error in errors:
        messages = Messages(MEDIA_TYPE)
        list(messages.feed(encoded({"error": error})))
        with pytest.raises(ProtocolError, match="a code and a message"):
            messages.close()
