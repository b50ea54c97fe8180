"""Where a worker of the stand-in runs."""

from __future__ import annotations

from typing import NamedTuple


class NodeAffinitySchedulingStrategy(NamedTuple):
    """On this machine."""

    node_id: str
    soft: bool
