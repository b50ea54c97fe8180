"""Messages between the server and the bridge; they travel in `Foreign` messages of a `Channel`."""

from __future__ import annotations

from typing import Literal, NamedTuple

from kernels import Plan

__all__ = ["Answer", "Begin", "Compute", "Node", "Nodes", "Outcome", "Recall", "Release", "Released"]

Outcome = Literal["done", "recalled", "lost", "failed", "away"]
"""A unit is in the job's memory, comes back on request, or was lost with its worker; its kernel, or Ray, has failed."""


class Begin(NamedTuple):
    """To the bridge: take a job for at most `nodes` machines; descriptors: inputs, output, scratch if there is one."""

    job: int
    plan: Plan
    nodes: int


class Compute(NamedTuple):
    """To the bridge: run a unit of the first stage on the cluster."""

    job: int
    unit: int


class Recall(NamedTuple):
    """To the bridge: stop waiting for a unit. Its memory may be written to until the `Answer`."""

    job: int
    unit: int


class Release(NamedTuple):
    """To the bridge: forget a job. Its memory may be used until it is `Released`."""

    job: int


class Released(NamedTuple):
    """From the bridge: the memory of a job is not used any more."""

    job: int


class Answer(NamedTuple):
    """From the bridge: what became of a unit, its seconds if it is done, and a line for the log if something failed."""

    job: int
    unit: int
    outcome: Outcome
    seconds: float = 0.0
    detail: str = ""


class Node(NamedTuple):
    """A machine: workers that are ready and wanted; why it is refused, or why its check failed for now."""

    name: str
    ready: int
    wanted: int
    refused: str | None = None
    failure: str | None = None


class Nodes(NamedTuple):
    """From the bridge, ten times a second: the machines of the cluster, and how many run a unit that was abandoned."""

    nodes: tuple[Node, ...]
    abandoned: int
