"""The tensors of a JSON document that are lists of numbers, in members named `data`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.intake.numbers import Numbers
from app.intake.sinks import Lease
from app.intake.strict_json import members_before
from convgrad._dtypes import DTYPES, DType
from convgrad._errors import ConvgradError, InvalidRequest
from schemas.rows import MAX_DIMS

__all__ = ["NumberLists"]

# More than a batch of JSON-RPC needs; each takes one or two kilobytes.
_MOST_LISTS = 4096
_DTYPES = DTYPES | {entry.oip: entry for entry in DTYPES.values()}


class NumberLists:
    """Parse lists into segments while they arrive; in the document each becomes a `Numbers`.

    A fault inside a list is kept in its `Numbers`, so that it affects only the call that the tensor belongs to. A list
    may have `most` numbers. With a `refusal` no tensor is received: each is skipped and has that fault. Raises
    `InvalidRequest` for too many lists.
    """

    names: tuple[str, ...] = ("data",)
    openings = b"["
    plural = "the lists of its tensors' data"

    def __init__(self, lease: Lease, *, most: int | None = None, refusal: ConvgradError | None = None) -> None:
        self._lease = lease
        self._most = most
        self._refusal = refusal
        self._count = 0

    def open(self, name: str, opening: int, skeleton: bytearray, bound: int | None) -> Numbers:  # noqa: ARG002
        """Begin a list."""
        self._count += 1
        if self._count > _MOST_LISTS:
            raise InvalidRequest(f"the document has more than {_MOST_LISTS} data lists")
        declared = _declared(members_before(skeleton))
        return Numbers(self._lease, declared, bound=bound, most=self._most, refusal=self._refusal)


def _declared(members: Mapping[str, Any]) -> tuple[DType, tuple[int, ...]] | None:
    name, shape = members.get("dtype", members.get("datatype")), members.get("shape")
    dtype = _DTYPES.get(name) if isinstance(name, str) else None
    if dtype is None or not isinstance(shape, list) or len(shape) > MAX_DIMS:
        return None
    return (dtype, tuple(shape)) if all(type(size) is int and 0 <= size < 2**63 for size in shape) else None
