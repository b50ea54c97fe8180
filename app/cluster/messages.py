"""Messages between the server and the bridge, pickled on a private socket pair."""

from __future__ import annotations

from typing import NamedTuple

from kernels import Plan

__all__ = ["Beat", "Begin", "Ended", "Message", "Node", "Release", "Released", "Started", "UnitDone"]


class Begin(NamedTuple):
    """Server to bridge: compute the first stage of a plan on at most `nodes` machines.

    The descriptors of its inputs follow, one for each.
    """

    job: int
    owner: str
    plan: Plan
    nodes: int


class Release(NamedTuple):
    """Server to bridge: forget a job, whose results are not wanted any more."""

    job: int


class Released(NamedTuple):
    """Bridge to server: the memory of a job's inputs is not read any more."""

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
    """Bridge to server: the bytes that a unit wrote, and the seconds it took; `lost` workers had it before."""

    job: int
    unit: int
    data: bytes
    seconds: float
    lost: int


class Ended(NamedTuple):
    """Bridge to server: a job has failed; `reason` is ``lost``, ``memory`` or ``kernel``."""

    job: int
    reason: str
    detail: str


Message = Begin | Release | Released | Beat | Started | UnitDone | Ended
