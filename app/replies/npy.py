"""Stream a `.npy` file while it is computed: leading rows are sent as soon as they are final."""

from __future__ import annotations

from contextlib import aclosing
from math import prod

import numpy as np
from starlette.types import Send

from app.calls.work import TileReady, Work, finish
from app.replies.body import SMALL, send_body, send_data, send_head, send_piece
from convgrad._dtypes import dtype
from convgrad._frames import Bytes
from convgrad._npy import write_header

__all__ = ["MEDIA_TYPE", "ReadyRows", "send_npy"]

MEDIA_TYPE = "application/x-npy"


class ReadyRows:
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


async def send_npy(work: Work, send: Send) -> None:
    """Run work and send its one output as a `.npy` file, one with tiles row by row as it becomes final.

    Errors are raised; after the first row the body then stays shorter than its Content-Length.
    """
    (output,) = work.result().outputs
    spec = output.spec
    kind = dtype(spec.dtype)
    header = write_header(kind, spec.shape)
    headers, length = {"x-tensor-dtype": spec.dtype}, len(header) + output.nbytes
    row_bytes = prod(spec.shape[1:]) * kind.itemsize
    if work.streams != "tiles" or output.nbytes <= SMALL:
        await finish(work)
        pieces = work.context.timings.each("encode", list[Bytes]((header, output.data)))
        await send_body(send, pieces, MEDIA_TYPE, length, headers=headers)
        return
    ready, sent = ReadyRows(spec.shape), 0
    async with aclosing(work.events()) as events:
        async for event in events:
            if not isinstance(event, TileReady):
                continue
            with work.context.timings.measure("encode"):
                final = ready.add(event.offset, event.shape) * row_bytes
            if final and not sent:
                await send_head(send, MEDIA_TYPE, length=length, headers=headers)
                await send_piece(send, header)
            await send_data(send, output.data[sent:final])
            sent = final
    await send_piece(send, b"", last=True)
