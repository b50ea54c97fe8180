"""Events of a running call: for each output `Begin`, then any number of `Progress` and `TileReady`, then `End`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from app.calls.outputs import CallOutput

__all__ = ["Begin", "End", "Event", "Progress", "TileReady"]


@dataclass(frozen=True, slots=True)
class Begin:
    """An output's tiles follow; names are in the dialect of the operation's name."""

    output: CallOutput


@dataclass(frozen=True, slots=True)
class Progress:
    """`done` of `total` units of work are done."""

    done: int
    total: int


@dataclass(frozen=True, slots=True, eq=False)
class TileReady:
    """A box of an output is final; `array` views it, in storage dtype. `seq` counts the boxes of the output."""

    output: CallOutput
    seq: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    array: npt.NDArray[Any]

    def body(self) -> memoryview:
        """Return the box's bytes in C order: a view if the box is contiguous in the output, else a copy."""
        return as_bytes(self.array)


@dataclass(frozen=True, slots=True)
class End:
    """The whole output is final; `stats`: the whole call's with the last output, before that this output's."""

    output: CallOutput
    stats: dict[str, Any]
    last: bool


Event = Begin | Progress | TileReady | End


def as_bytes(array: npt.NDArray[Any]) -> memoryview:
    """Return the elements as bytes in C order, copied only if they are not contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
