"""Stream a `.npy` file while it is computed: leading rows are sent as soon as they are final."""

from __future__ import annotations

from contextlib import aclosing
from math import prod

import numpy as np
from starlette.types import Send

from app.calls.call import Call
from app.calls.events import TileReady
from app.replies.body import send_bytes, send_head, send_piece
from convgrad._dtypes import dtype
from convgrad._npy import write_header

__all__ = ["MEDIA_TYPE", "Frontier", "send_npy"]

MEDIA_TYPE = "application/x-npy"

# Bytes written to the socket at a time.
_SLICE = 1 << 20
# A file up to this size is sent in one piece: copying it is cheaper than another write to the socket.
_WHOLE = 1 << 16


class Frontier:
    """Count the final leading rows of a tensor, given disjoint boxes as they become final."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._row = prod(shape[1:])
        self._missing = np.full(shape[0], self._row, np.int64)
        self.rows = 0

    def add(self, offset: tuple[int, ...], shape: tuple[int, ...]) -> int:
        """Add a final box and return the number of final leading rows."""
        first, count = offset[0], shape[0]
        self._missing[first : first + count] -= prod(shape[1:])
        open_rows = np.flatnonzero(self._missing[self.rows :])
        self.rows = self.rows + int(open_rows[0]) if len(open_rows) else len(self._missing)
        return self.rows


async def send_npy(call: Call, send: Send) -> None:
    """Run the call and send its output as a `.npy` file, row by row as it becomes final.

    Errors are raised; after the first row the body then stays shorter than its Content-Length.
    """
    spec = call.prepared.op.output
    kind = dtype(spec.dtype)
    header = write_header(kind, spec.shape)
    row_bytes = prod(spec.shape[1:]) * kind.itemsize
    if call.nbytes <= _WHOLE:
        await call.finish()
        with call.timings.measure("encode"):
            body = b"".join((header, call.output))
        await send_bytes(send, body, MEDIA_TYPE, headers={"x-tensor-dtype": spec.dtype})
        return
    frontier, sent = Frontier(spec.shape), 0

    async def head() -> None:
        headers = {"x-tensor-dtype": spec.dtype}
        await send_head(send, MEDIA_TYPE, length=len(header) + call.nbytes, headers=headers)
        await send_piece(send, header)

    async with aclosing(call.events()) as events:
        async for event in events:
            if not isinstance(event, TileReady):
                continue
            with call.timings.measure("encode"):
                final = frontier.add(event.offset, event.shape) * row_bytes
            if final and not sent:
                await head()
            while sent < final:
                stop = min(final, sent + _SLICE)
                await send_piece(send, call.output[sent:stop])
                sent = stop
    if not sent:  # an output without elements
        await head()
    await send_piece(send, b"", last=True)
