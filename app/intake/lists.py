"""The tensors of a JSON document that are lists of numbers, in members named `data`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from app.intake.numbers import Numbers
from app.intake.sinks import Lease, TensorFault
from app.intake.strict_json import members_before
from convgrad._dtypes import DType, dtype_of_oip
from convgrad._errors import InvalidParams, InvalidRequest, Unsupported
from schemas.problems import problem, safe_key
from schemas.rows import MAX_DIMS

__all__ = ["NumberLists"]

_MOST_LISTS = 64


class NumberLists:
    """Parse lists into segments while they arrive; a `Numbers` stands for each in the document.

    Raises `InvalidParams` for a list that holds anything but numbers, or more than its shape says, and
    `InvalidRequest` for too many lists.
    """

    names: tuple[str, ...] = ("data",)
    opening = b"["
    plural = "the lists of its tensors' data"

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        self._count = 0

    def open(self, name: str, skeleton: bytearray, bound: int | None) -> _List:  # noqa: ARG002 - there is one name
        """Begin a list."""
        self._count += 1
        if self._count > _MOST_LISTS:
            raise InvalidRequest(f"the document has more than {_MOST_LISTS} data lists")
        members = members_before(skeleton)
        with _named(members):
            return _List(members, Numbers(self._lease, _declared(members), bound=bound))


class _List:
    """Reads one list after its opening bracket; a fault in it is the call's error."""

    slow = True  # it reads a slice at a time

    def __init__(self, members: Mapping[str, Any], numbers: Numbers) -> None:
        self._members = members
        self._numbers = numbers

    def result(self) -> Numbers:
        """Return the numbers."""
        return self._numbers

    async def supply(self) -> None:
        """Allocate the memory that the numbers so far need."""
        await self._numbers.supply()

    def write(self, chunk: bytes, start: int) -> tuple[int, bool]:
        """Read the next slice of the list."""
        with _named(self._members):
            return self._numbers.write(chunk, start)


@contextmanager
def _named(members: Mapping[str, Any]) -> Iterator[None]:
    """Turn a fault of a list into the call's error, with the tensor's name if that came before the list."""
    try:
        yield
    except TensorFault as fault:
        given = members.get("name")
        name = safe_key(given) if isinstance(given, str) else "an input"
        message = f"data of {name} {fault.message}"
        raise InvalidParams(message, errors=[problem(["inputs", name], message, fault.kind)]) from None


def _declared(members: Mapping[str, Any]) -> tuple[DType, int] | None:
    datatype, shape = members.get("datatype"), members.get("shape")
    if not isinstance(datatype, str) or not isinstance(shape, list) or len(shape) > MAX_DIMS:
        return None
    if not all(type(size) is int and 0 <= size < 2**63 for size in shape):
        return None
    try:
        return dtype_of_oip(datatype), math.prod(shape)
    except Unsupported:
        return None
