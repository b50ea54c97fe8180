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

    `prepared` is the plan of this request, perhaps made for an earlier one that differed only in its data. `likely` is
    that of an earlier request that may differ in a shape, too, which has not arrived.
    """

    call: RequestedCall
    prepared: Any = None
    likely: Any = None
    whole: bool = True
    """Whether no more inputs will come, but for data of these."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """Bytes of tensors have arrived: their segments, and the bytes `received`, by canonical name."""

    segments: Mapping[str, Segment]
    received: Mapping[str, int]


News = Begun | Known | Arrived
