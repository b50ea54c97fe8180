"""Work that may not grow with the length of a bad request, in calls of Python functions instead of seconds."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from app.intake.graphs import read_graph_request
from app.intake.lease import Lease
from app.intake.multipart import MultipartIntake
from app.intake.requests import read_request_object
from app.pool.buffers import SegmentPool
from convgrad._errors import InvalidParams
from schemas.broken_rules import MAX_BROKEN_RULES
from schemas.graphs import resolve_graph
from tests.app.intake.support import CONTENT_TYPE, HEAD, MIB, OPERATION, multipart, npy, read_events, reading


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count the calls of Python functions by name."""
    calls = Counter[str]()
    sys.setprofile(lambda frame, event, _: calls.update([frame.f_code.co_name]) if event == "call" else None)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def bias(number: int, **members: Any) -> dict[str, Any]:
    """Return an op with two inputs of its own."""
    ids = [3 * number + at for at in range(3)]
    shapes: list[Any] = [[1, 1], [1], []]
    src, bias, dst = ({"id": at, "dtype": "f32", "shape": shape} for at, shape in zip(ids, shapes, strict=True))
    return {"id": number, "kind": "BiasAdd", "inputs": [src, bias], "outputs": [dst]} | members


def graph(count: int, **members: Any) -> dict[str, Any]:
    """Return a request for a graph of that many ops."""
    return {"graph": {"graph": [bias(number, **members) for number in range(count)]}}


MEMBERS = {f"attributes{number}": 1 for number in range(1000)}
TENSORS = {str(number): {f"shape{k}": 1 for k in range(20)} for number in range(150) if number % 3 < 2}
SEARCHES: dict[str, Callable[[Lease], object]] = {
    "members of a call": lambda _: read_request_object(OPERATION, MEMBERS),
    "members of a graph": lambda _: read_graph_request(MEMBERS),
    "attributes": lambda _: resolve_graph(
        read_graph_request(graph(200, attrs={f"data_format{k}": 1 for k in range(8)})).call.graph
    ),
    "kinds": lambda _: read_graph_request(graph(500, kind="BiasAd")),
    "tensors": lambda lease: asyncio.run(read_graph_request(graph(50) | {"inputs": TENSORS}).read(lease)),
}


@pytest.mark.parametrize("names", SEARCHES)
def test_similar_names_are_searched_for_what_is_listed(names: str) -> None:
    """Of thousands of misspelt names, only those in the reply are compared with the right ones."""
    with Lease(SegmentPool(MIB)) as lease, counted() as calls, pytest.raises(InvalidParams) as caught:
        SEARCHES[names](lease)
    assert len(caught.value.errors) == MAX_BROKEN_RULES
    assert MAX_BROKEN_RULES // 2 < calls["get_close_matches"] <= MAX_BROKEN_RULES + 8


def test_each_chunk_of_a_body_with_many_parts() -> None:
    """A chunk costs as much after a thousand parts as after the first."""
    tensors = {str(3 * number + at): np.zeros((1, 1)[at:], "f4") for number in range(500) for at in (0, 1)}
    *before, last = tensors.items()
    head = [("request", json.dumps(graph(500)).encode()), *((name, npy(array)) for name, array in before)]
    rest = multipart([(last[0], npy(last[1]))])

    async def run() -> Counter[str]:
        with Lease(SegmentPool(64 * MIB)) as lease:
            calls = Counter[str]()

            async def body() -> AsyncIterator[bytes]:
                yield multipart(head, end=b"\r\n")[: -len(rest.split(b"\r\n")[0]) - 2]
                with counted() as found:
                    for byte in rest:
                        yield bytes([byte])
                calls.update(found)

            intake = MultipartIntake(CONTENT_TYPE, reading(read_graph_request), lease, max_request=HEAD)
            assert len((await read_events(intake.events(body()))).inputs) == len(tensors)
        return calls

    assert asyncio.run(run()).total() < 40 * len(rest) + 10 * len(tensors)  # which are read once, when all are known
