"""What a decoder yields while the body of a request arrives, whatever its format: `Begun`, `Known` and `Arrived`.

A decoder is an async iterator over these. It knows nothing of calls: whoever iterates checks what it yields, and goes
on only if that is acceptable.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from app.intake.requests import RequestedCall
from app.pool.buffers import Segment

__all__ = ["Arrived", "Begun", "Known", "News"]


@dataclass(frozen=True, slots=True)
class Begun:
    """Some members of the request object have arrived (see `partial_document`)."""

    document: Mapping[str, Any]


@dataclass(slots=True)
class Known:
    """Dtype and shape of every tensor are known; the last one that a decoder yields has all of their data.

    `prepared` is what an earlier request was prepared to that is the same but for the data of its tensors, or what this
    one is prepared to. `likely` is the same for a request that differs at most in a shape that has not arrived.
    """

    call: RequestedCall
    prepared: Any = None
    likely: Any = None


@dataclass(frozen=True, slots=True)
class Arrived:
    """Bytes of tensors have arrived: their segments, and the bytes `received`, by canonical name."""

    segments: Mapping[str, Segment]
    received: Mapping[str, int]


News = Begun | Known | Arrived
