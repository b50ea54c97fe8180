"""Exchanges against bare ASGI, without a server."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.http.exchange import BodyLimits, Exchange, Exchanges
from app.replies.body import send_body, send_head, send_piece
from convgrad import Cancelled

ANY = BodyLimits(1 << 40)


def scope(**headers: str) -> Scope:
    """Return the scope of a POST."""
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http", "method": "POST", "path": "/x", "headers": raw}


def call(app: ASGIApp, *body: bytes, **headers: str) -> list[Message]:
    """Call an app with a body in pieces, after which the client waits; return the messages sent."""
    sent: list[Message] = []
    pieces = [{"type": "http.request", "body": piece, "more_body": True} for piece in body]
    if pieces:
        pieces[-1]["more_body"] = False

    async def receive() -> Message:
        if pieces:
            return pieces.pop(0)
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        sent.append(message)

    async def run() -> None:
        await asyncio.wait_for(app(scope(**headers), receive, send), 20)

    asyncio.run(run())
    return sent


def headers_of(message: Message) -> dict[str, str]:
    """Return the headers of a reply's start."""
    return {name.decode(): value.decode() for name, value in message["headers"]}


async def _echo(inner: Scope, receive: Receive, send: Send) -> None:
    more = True
    while more:
        more = (await receive()).get("more_body", False)
    await send_body(send, [b"ok"], "text/plain", 2)


async def _nothing(*_: object) -> Any:
    """Receive and send nothing."""


def test_an_unexpected_error_is_a_500_without_details() -> None:
    """An unexpected exception becomes a problem object without details."""

    async def broken(*_: Any) -> None:
        raise ZeroDivisionError("secret")

    start, body = call(Exchanges(broken, ANY))
    assert start["status"] == 500
    assert json.loads(body["body"])["code"] == "internal_error"
    assert b"secret" not in body["body"]


def test_a_long_path_is_cut_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """A line of the log repeats the beginning of the path only."""
    caplog.set_level(logging.INFO)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send_body(send, [], "text/plain", 0)

    given = {**scope(), "path": "/" + "x" * 60_000}
    asyncio.run(Exchanges(app, ANY)(given, asyncio.Event().wait, _ignored))  # type: ignore[arg-type]
    (line,) = [record.getMessage() for record in caplog.records if record.name == "convgrad.request"]
    assert line.startswith("POST /xxx")
    assert len(line) < 300


async def _ignored(message: Message) -> None:
    """Send nothing."""


def test_an_error_after_the_first_byte_leaves_the_reply_unfinished() -> None:
    """Nothing is added to an incomplete reply: the server closes the connection."""

    async def half(_: Scope, __: Receive, send: Send) -> None:
        await send_head(send, "text/plain", length=10)
        await send_piece(send, b"half")
        raise ValueError

    sent = call(Exchanges(half, ANY))
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    assert sent[-1]["more_body"]


@pytest.mark.parametrize("headers", [{"content_length": "11"}, {"transfer_encoding": "chunked"}])
def test_a_body_over_the_limit_is_refused(headers: dict[str, str]) -> None:
    """It is rejected by its declared length, or when it passes the limit; the rest is read before closing."""
    app = Exchanges(_echo, BodyLimits(10))
    sent = call(app, b"123456", b"78901", b"rest", **headers)
    assert sent[0]["status"] == 413
    assert json.loads(sent[1]["body"])["reason"] == "body"
    assert not sent[-1]["more_body"]


def test_a_body_within_the_limit_passes() -> None:
    """A body of exactly the limit is accepted."""
    app = Exchanges(_echo, BodyLimits(10))
    assert call(app, b"12345", b"67890", transfer_encoding="chunked")[0]["status"] == 200


def test_a_large_unread_body_closes_the_connection() -> None:
    """A reply before the end of a long body announces that the connection will close, and is sent in full first."""

    async def early(_: Scope, __: Receive, send: Send) -> None:
        await send_body(send, [b"no"], "text/plain", 2, status=422)

    sent = call(Exchanges(early, ANY), b"a", b"b", content_length=str(1 << 30))
    assert headers_of(sent[0])["connection"] == "close"
    assert [message.get("body") for message in sent[1:]] == [b"no", b""]
    waiting = call(Exchanges(early, ANY), b"a", content_length=str(1 << 30), expect="100-continue")
    assert headers_of(waiting[0])["connection"] == "close"
    assert len(waiting) == 2


def test_the_rest_is_dropped_when_the_request_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request's resources are released before its unread body has arrived, of which a bounded part is read."""
    monkeypatch.setattr("app.http.exchange.LINGER_BYTES", 20)
    held, came = False, 0

    async def early(_: Scope, __: Receive, send: Send) -> None:
        nonlocal held
        held = True
        await send_body(send, [b"no"], "text/plain", 2, status=422)
        held = False

    async def receive() -> Message:
        nonlocal came
        assert not held
        came += 1
        return {"type": "http.request", "body": bytes(8), "more_body": True}

    async def send(message: Message) -> None:
        ends.append(not message.get("more_body", message["type"] == "http.response.start"))

    ends: list[bool] = []
    asyncio.run(Exchanges(early, ANY)(scope(content_length=str(1 << 30)), receive, send))
    assert ends == [False, False, True]
    assert came == 3


def test_a_client_that_leaves_cancels_the_block() -> None:
    """`http.disconnect` ends the block with `Cancelled`, and the task is not left in a cancelled state."""

    async def scenario() -> None:
        gone = asyncio.Event()

        async def receive() -> Message:
            await gone.wait()
            return {"type": "http.disconnect"}

        asyncio.get_running_loop().call_soon(gone.set)
        with pytest.raises(Cancelled), Exchange(scope(), receive, _ignored, ANY).watched():
            await asyncio.Event().wait()
        await asyncio.sleep(0)
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0

    asyncio.run(scenario())


def test_a_cancellation_is_not_lost_when_the_client_leaves_too() -> None:
    """A task that is cancelled while its client disconnects ends as cancelled."""

    async def scenario() -> None:
        async def receive() -> Message:
            task.cancel()
            return {"type": "http.disconnect"}

        async def wait() -> None:
            with Exchange(scope(), receive, _ignored, ANY).watched():
                await asyncio.Event().wait()

        task = asyncio.create_task(wait())
        with pytest.raises(asyncio.CancelledError):
            await task
        assert task.cancelled()

    asyncio.run(scenario())


def test_a_cancelled_request_is_answered_and_cancelled() -> None:
    """Whoever cancels a request, such as a server that stops, has the client told and the task end as cancelled."""
    sent: list[Message] = []
    begun = asyncio.Event()

    async def waits(*_: Any) -> None:
        begun.set()
        await asyncio.Event().wait()

    async def send(message: Message) -> None:
        sent.append(message)

    async def scenario() -> None:
        task = asyncio.create_task(Exchanges(waits, ANY)(scope(), _nothing, send))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())
    assert sent[0]["status"] == 503
    assert json.loads(sent[1]["body"])["code"] == "shutting_down"
    assert not sent[-1]["more_body"]
