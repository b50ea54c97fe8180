"""Messages between the server and the bridge, pickled on a private socket pair."""

from __future__ import annotations

from typing import NamedTuple

from kernels import Plan

__all__ = [
    *("Beat", "Begin", "ComputeHere", "DoneHere", "Ended", "Message", "Node", "Release", "Released", "Said", "Started"),
    "UnitDone",
]


class Begin(NamedTuple):
    """Server to bridge: compute the first stage of a plan on at most `nodes` machines and `here` workers of the server.

    The descriptors of its inputs, its output and, if it has any, its scratch follow.
    """

    job: int
    owner: str
    plan: Plan
    nodes: int
    here: int


class Release(NamedTuple):
    """Server to bridge: forget a job, whose results are not wanted any more."""

    job: int


class Released(NamedTuple):
    """Bridge to server: the memory of a job is neither read nor written any more."""

    job: int


class Node(NamedTuple):
    """A machine of the cluster as the bridge sees it; `refused` says why it gets no work."""

    name: str
    ready: int
    wanted: int
    refused: str | None = None


class Beat(NamedTuple):
    """Bridge to server, several times a second: it is alive, and this is the cluster."""

    nodes: tuple[Node, ...]


class Started(NamedTuple):
    """Bridge to server: the first unit of a job is on a worker."""

    job: int


class UnitDone(NamedTuple):
    """Bridge to server: a unit is in the job's memory, and took so many seconds; `lost` workers had it before."""

    job: int
    unit: int
    seconds: float
    lost: int


class ComputeHere(NamedTuple):
    """Bridge to server: one of the server's own workers shall compute a unit, which `lost` workers had before."""

    job: int
    unit: int
    lost: int


class DoneHere(NamedTuple):
    """Server to bridge: the worker is free again; the unit is done, or nobody needs it from this worker any more."""

    job: int
    unit: int


class Ended(NamedTuple):
    """Bridge to server: a job has failed; `reason` is ``lost``, ``memory``, ``ray`` or ``kernel``."""

    job: int
    reason: str
    detail: str


class Said(NamedTuple):
    """Bridge to server: a line for the log."""

    level: int
    text: str


Message = Begin | Release | Released | Beat | Started | UnitDone | ComputeHere | DoneHere | Ended | Said
