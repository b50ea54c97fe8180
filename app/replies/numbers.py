"""Tensors as JSON numbers: nested lists like their shape, in pieces of text.

Each number is the shortest that float32, or float64 for f64, reads back as the same value; so do f16 and bf16, whose
values are float32's too. JSON has no NaN and no infinity: these are the strings that `app.intake.elements` reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["NUMBERS", "list_pieces"]

NUMBERS = 2048
"""Elements that are formatted at a time: about a millisecond."""

_WORDS = {b"nan": b'"NaN"', b"inf": b'"Infinity"', b"-inf": b'"-Infinity"'}


def list_pieces(values: npt.NDArray[Any], before: bytes = b"") -> Iterator[bytes]:
    """Yield an array of at least one dimension as nested JSON lists, in pieces, the first after `before`."""
    inner = prod(values.shape[1:])
    step = max(1, NUMBERS // max(1, inner))
    before += b"["
    for start in range(0, len(values), step):
        if inner <= NUMBERS:
            yield before + _text(values[start : start + step])
        else:
            yield from list_pieces(values[start], before)
        before = b","
    yield b"]" if len(values) else before + b"]"


def _text(values: npt.NDArray[Any]) -> bytes:
    """Return the entries of an array, without the brackets around them all."""
    flat = values.reshape(-1).astype(np.float64 if values.dtype == np.float64 else np.float32, copy=False)
    items: list[bytes] = flat.astype("S").tolist()
    if not np.isfinite(flat).all():
        items = [_WORDS.get(item, item) for item in items]
    for axis in range(values.ndim - 1, 0, -1):
        size, lists = values.shape[axis], range(prod(values.shape[:axis]))
        items = [b"[%b]" % b",".join(items[at * size : (at + 1) * size]) for at in lists]
    return b",".join(items)
