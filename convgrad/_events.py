"""What a call gives back: events while it runs, and the result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

__all__ = ["Array", "Event", "Health", "Progress", "Result", "Tile"]

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class Progress:
    """Say how far the computation is: `done` of `total` tiles."""

    done: int
    total: int

    @property
    def share(self) -> float:
        """The part that is done, from 0 to 1."""
        return self.done / self.total if self.total else 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Tile:
    """Hold one final piece of an output; `data` is a read-only view of `offset` and `shape` in the result."""

    output: str
    seq: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    data: Array = field(repr=False)


Event = Progress | Tile


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """Hold a whole reply.

    `outputs` are writeable arrays by the names of the dialect that was called, `resolved` every attribute
    after defaults and `auto_pad`, `stats` what the service measured (`kernel`, `gmac`, `compute_ms`,
    `tiles`), `warnings` what it did with the call that may surprise.
    """

    op: str
    outputs: Mapping[str, Array]
    resolved: Mapping[str, Any] = field(default_factory=dict)
    stats: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def array(self) -> Array:
        """The first output, which for all operations of today is the only one."""
        return next(iter(self.outputs.values()))


@dataclass(frozen=True, slots=True)
class Health:
    """Say whether the service takes calls; `detail` is what it says about its warm-up or its draining."""

    ready: bool
    detail: Mapping[str, Any] = field(default_factory=dict)
