"""The tensors of a JSON document in either form: base64, or lists of numbers."""

from __future__ import annotations

from app.intake.json import ValueReader
from app.intake.lists import NumberLists
from app.intake.sinks import Lease
from app.intake.strings import TensorStrings
from convgrad._errors import ConvgradError
from schemas.tensors import MAX_NUMBERS

__all__ = ["TensorValues"]


class TensorValues:
    """Decode tensors into segments while they arrive; in the document each becomes an `InlineTensor` or a `Numbers`.

    With a `refusal` no tensor is received: each is skipped and has that fault.
    """

    names = TensorStrings.names
    openings = TensorStrings.openings + NumberLists.openings
    plural = "its tensors' data and npy"

    def __init__(self, lease: Lease, refusal: ConvgradError | None = None) -> None:
        self._strings = TensorStrings(lease, refusal)
        self._lists = NumberLists(lease, most=MAX_NUMBERS, refusal=refusal)

    def open(self, name: str, opening: int, skeleton: bytearray, bound: int | None) -> ValueReader:
        """Begin a string or a list."""
        values = self._lists if opening in NumberLists.openings else self._strings
        return values.open(name, opening, skeleton, bound)
