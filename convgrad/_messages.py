"""Decode a reply of server-sent events: JSON-RPC notifications of progress, then the response."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from convgrad._errors import BrokenStream, ConvgradError, ProtocolError, error_from_code
from convgrad._events import Progress

__all__ = ["MEDIA_TYPE", "Messages"]

MEDIA_TYPE = "text/event-stream"


class Messages:
    """Decode one reply from bytes in pieces of any size."""

    def __init__(self, content_type: str) -> None:
        """Raise `ProtocolError` unless the reply consists of events."""
        if content_type.partition(";")[0].strip() != MEDIA_TYPE:
            raise ProtocolError(f"the reply must be {MEDIA_TYPE}: is this a convgrad service?")
        self._rest = bytearray()
        self._response: dict[str, Any] | None = None

    def feed(self, data: bytes) -> Iterator[Progress]:
        """Decode the next bytes and yield the progress that they report; exhaust the iterator."""
        self._rest += data
        *lines, rest = self._rest.split(b"\n")
        self._rest = bytearray(rest)
        for line in lines:
            if line.startswith(b"data: "):
                yield from self._message(bytes(line[6:]))

    def close(self) -> Any:
        """End the reply and return its result; raises the error in the response, or `BrokenStream` if there is none."""
        if self._response is None:
            raise BrokenStream("the reply stopped before its end")
        error = self._response.get("error")
        return self._response.get("result") if error is None else _raise(error)

    def _message(self, text: bytes) -> Iterator[Progress]:
        try:
            message = dict(json.loads(text))
            if "method" not in message:
                self._response = message
            elif message["method"] == "notifications/progress":
                yield Progress(int(message["params"]["progress"]), int(message["params"]["total"]))
        except (AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
            raise ProtocolError("every event of the reply must be a JSON-RPC message") from error


def _raise(error: Any) -> ConvgradError:
    """Raise the error of a JSON-RPC response."""
    try:
        data = dict(error["data"])
        made = error_from_code(str(data.pop("code")), str(error["message"]), data=data)
    except (LookupError, TypeError, ValueError) as caught:
        raise ProtocolError("an error in the reply must have a code and a message") from caught
    raise made
