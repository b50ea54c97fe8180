"""Remember the heads of inference requests: who trains sends the same head with every call, and only new tensors.

A head is what stands before the tensors' bytes, so no tensor is ever kept here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from app.api.oip.request import InferRequest, InputTensor
from app.calls.call import Prepared

__all__ = ["Head", "Heads"]

_MOST_HEADS = 256
_LONGEST = 4 << 10
# The same head with other values of its `weights_shape`.
_MOST_CALLS = 16


@dataclass(slots=True)
class Head:
    """Hold what a head says, and what calls it was found to be: by the bytes of its `weights_shape` input.

    `shapes` are the tensors behind the head that hold a shape, each with the place where its bytes begin.
    `passed` tells that it was checked as far as it can be without those.
    """

    request: InferRequest
    binary: tuple[InputTensor, ...]
    shapes: tuple[tuple[InputTensor, int], ...]
    nbytes: int
    passed: bool = False
    calls: dict[bytes, Prepared] = field(default_factory=dict)

    def shape_bytes(self, rest: memoryview) -> bytes | None:
        """Take the shapes out of the first bytes behind the head; None when those are too few."""
        if self.shapes and len(rest) < max(at + tensor.nbytes for tensor, at in self.shapes):
            return None
        return b"".join([rest[at : at + tensor.nbytes] for tensor, at in self.shapes])

    @property
    def last_call(self) -> Prepared | None:
        """The call that this head was the last time."""
        return next(reversed(self.calls.values()), None)

    def remember(self, shapes: bytes, prepared: Prepared) -> None:
        """Keep what the call was found to be."""
        if len(self.calls) >= _MOST_CALLS:
            self.calls.clear()
        self.calls[shapes] = prepared


class Heads:
    """Hold the heads of calls that passed their checks; when it is full the one longest unused goes."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, bytes], Head] = {}

    def find(self, model: str, text: bytes) -> Head | None:
        """Return a known head."""
        head = self._known.pop((model, text), None)
        if head is not None:
            self._known[model, text] = head  # a dictionary keeps the order of insertion
        return head

    def keep(self, model: str, text: bytes, head: Head) -> None:
        """Remember a head, unless it holds numbers or is very long."""
        if len(text) <= _LONGEST and all(tensor.source != "json" for tensor in head.request.inputs):
            if len(self._known) >= _MOST_HEADS:
                del self._known[next(iter(self._known))]
            self._known[model, text] = head
