"""A cache of the heads of inference requests: training sends the same head with every call, and only new tensors.

A head is the JSON before the tensors' bytes, so no tensor is kept here. But a head of a few hundred bytes may have a
plan of megabytes, so the size of the plans is limited.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from app.api.oip.request import InferRequest, InputTensor
from engine.planning import Prepared
from kernels.cache import measure

__all__ = ["CachedHead", "HeadCache"]

_MOST_HEADS = 256
_LONGEST = 4 << 10
# Calls per head, with different values of their shape input.
_MOST_CALLS = 16
_MOST_PLAN_BYTES = 32 << 20


@dataclass(slots=True)
class CachedHead:
    """A parsed head, and the prepared calls that had it, by the bytes of their shape input.

    `shapes` are the binary tensors that hold a shape, each with the offset of its bytes after the head.
    """

    request: InferRequest
    binary: tuple[InputTensor, ...]
    shapes: tuple[tuple[InputTensor, int], ...]
    nbytes: int
    calls: dict[bytes, Prepared] = field(default_factory=dict)
    plan_bytes: int = 0
    """Size of the plans of `calls`."""
    shape_names: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        self.shape_names = frozenset(tensor.name for tensor, _ in self.shapes)

    def shape_bytes(self, rest: memoryview) -> bytes | None:
        """Return the shapes from the first bytes after the head; None when these are too few."""
        if self.shapes and len(rest) < max(at + tensor.nbytes for tensor, at in self.shapes):
            return None
        return b"".join([rest[at : at + tensor.nbytes] for tensor, at in self.shapes])

    @property
    def last_call(self) -> Prepared | None:
        """The last call that had this head."""
        return next(reversed(self.calls.values()), None)

    def remember(self, shapes: bytes, prepared: Prepared) -> None:
        """Cache a prepared call."""
        if len(self.calls) >= _MOST_CALLS:
            self.calls.clear()
            self.plan_bytes = 0
        self.calls[shapes] = prepared
        self.plan_bytes += sum(measure(computation.plan).total for computation in prepared.computations)


class HeadCache:
    """The heads of calls that passed their checks; the least recently used ones are dropped for new ones.

    There are at most 256, with plans of 32 MiB together.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, bytes], CachedHead] = {}

    def find(self, model: str, text: bytes) -> CachedHead | None:
        """Return a cached head, or None."""
        head = self._known.pop((model, text), None)
        if head is not None:
            self._known[model, text] = head  # a dictionary keeps the order of insertion
        return head

    def keep(self, model: str, text: bytes, head: CachedHead) -> None:
        """Cache a head, unless it contains numbers or is very long."""
        if len(text) <= _LONGEST and all(tensor.source != "json" for tensor in head.request.inputs):
            self._known[model, text] = head
            while len(self._known) > _MOST_HEADS or self.plan_bytes > _MOST_PLAN_BYTES:
                del self._known[next(iter(self._known))]

    @property
    def plan_bytes(self) -> int:
        """Size of the plans of all heads."""
        return sum(head.plan_bytes for head in self._known.values())
