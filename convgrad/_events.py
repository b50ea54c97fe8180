"""Events of a running call, its result, and the service's health."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

__all__ = ["Array", "Event", "Health", "Progress", "Result", "Tile"]

Array = np.ndarray[tuple[Any, ...], np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of the computation: `done` of `total` units of work."""

    done: int
    total: int

    @property
    def share(self) -> float:
        """The fraction that is done, from 0 to 1."""
        return self.done / self.total if self.total else 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Tile:
    """A final box of an output; `data` is a read-only view of the result at `offset`, of `shape`."""

    output: str
    seq: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    data: Array = field(repr=False)


Event = Progress | Tile


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """A complete reply.

    `outputs` are writeable arrays by name, in the dialect of the operation's name. `resolved` has every attribute after
    defaults and `auto_pad`, `stats` the service's measurements (`kernel`, `gmac`, `compute_ms`, `tiles`), and
    `warnings` what may be unexpected.
    """

    op: str
    outputs: Mapping[str, Array]
    resolved: Mapping[str, Any] = field(default_factory=dict)
    stats: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def array(self) -> Array:
        """The first output, and the only one unless the call requested several."""
        return next(iter(self.outputs.values()))


@dataclass(frozen=True, slots=True)
class Health:
    """Whether the service accepts calls; `detail` is its own report: status, progress, cause of a failure."""

    ready: bool
    detail: Mapping[str, Any] = field(default_factory=dict)
