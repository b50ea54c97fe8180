"""The formats of replies to `/v1`: one record each. `/rpc` and `/v2` have some of them besides their own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from starlette.types import Send

from app.calls.work import Work
from app.replies import frames, multipart, npy, sse
from app.replies.result import send_result
from convgrad._errors import NotAcceptable
from engine.options import Options

__all__ = ["EVENTS", "FORMATS", "FRAMES", "JSON", "MULTIPART", "NPY", "Format"]


@dataclass(frozen=True, slots=True)
class Format:
    """A media type, and what runs the work and sends its reply; `data` of `one` output, of `many`, or of `none`."""

    media_type: str
    send: Callable[[Work, Send], Awaitable[None]]
    data: str = "many"

    def check(self, options: Options) -> None:
        """Raise `NotAcceptable` for a call with several outputs if the format holds one."""
        if self.data == "one" and len(options.outputs) > 1:
            raise NotAcceptable(
                f"{self.media_type} can hold one output, but the call requests {len(options.outputs)}",
                data={"supported": [each.media_type for each in FORMATS if each.data == "many"]},
            )


JSON = Format("application/json", send_result)
NPY = Format(npy.MEDIA_TYPE, npy.send_npy, "one")
EVENTS = Format(sse.MEDIA_TYPE, sse.send_events, "none")
FRAMES = Format(frames.MEDIA_TYPE, frames.send_frames)
MULTIPART = Format(multipart.MEDIA_TYPE, multipart.send_multipart)

FORMATS = (JSON, NPY, EVENTS, FRAMES, MULTIPART)
"""Those of an operation; the first one is the default."""
