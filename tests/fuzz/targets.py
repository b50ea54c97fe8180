"""The fuzz targets: each takes any bytes, and raises when the code under test violates a check."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.fuzz import apis as apis
from tests.fuzz import parsers, seeds

__all__ = ["TARGETS", "Target"]


@dataclass(frozen=True)
class Target:
    """One parser: `take` accepts any bytes; `seeds` are complete inputs, `words` the tokens of its language."""

    take: Callable[[bytes], object]
    seeds: Sequence[bytes]
    words: Sequence[bytes]


TARGETS = {
    "npy": Target(parsers.npy, seeds.npy(), seeds.NPY_WORDS),
    "frames": Target(parsers.frames, seeds.frames(), seeds.FRAME_WORDS),
    "assembly": Target(parsers.assembly, seeds.assembly(), seeds.FRAME_WORDS),
    "json": Target(parsers.json_text, seeds.json_tensors(), seeds.JSON_WORDS),
    "lists": Target(parsers.lists, seeds.lists(), seeds.OIP_WORDS),
    "rpc": Target(apis.rpc, seeds.rpc(), seeds.RPC_WORDS),
    "rest": Target(apis.rest, seeds.rest(), seeds.JSON_WORDS),
    "multipart": Target(apis.multipart, seeds.multipart(), seeds.MULTIPART_WORDS),
    "oip": Target(apis.oip, seeds.oip(), seeds.OIP_WORDS),
    "jobs": Target(apis.jobs, seeds.jobs(), seeds.MULTIPART_WORDS),
    "tensors": Target(apis.tensors, seeds.tensors(), seeds.MULTIPART_WORDS),
    "mcp": Target(apis.mcp, seeds.mcp(), seeds.MCP_WORDS),
    "paths": Target(parsers.paths, seeds.paths(), seeds.PATH_WORDS),
}
