"""Messages between the server and the bridge."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["Away", "KernelFailed", "Lost", "Node", "Nodes", "Reply", "Request"]


class Request(NamedTuple):
    """To the bridge: call its `method`; without one, cancel the request of that number."""

    number: int
    method: str | None = None
    arguments: tuple[Any, ...] = ()


class Reply(NamedTuple):
    """From the bridge: what a method has returned, or the exception that it has raised."""

    number: int
    result: Any


class Node(NamedTuple):
    """A machine: workers that are ready and wanted, and why it gets no work, if so."""

    name: str
    ready: int
    wanted: int
    refused: str | None = None


class Nodes(NamedTuple):
    """From the bridge, ten times a second: the machines of the cluster, and the number of abandoned tasks."""

    nodes: tuple[Node, ...]
    abandoned: int


class Away(Exception):  # noqa: N818 - as the other two, no error of ours
    """The cluster can't finish a job, for the reason in the message."""


class Lost(Exception):  # noqa: N818
    """The worker died during a unit."""


class KernelFailed(Exception):  # noqa: N818
    """A unit raised an exception."""
