"""Work that may not grow with the length of a bad request, in calls of Python functions instead of seconds."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from app.intake.requests import read_graph_request, read_request_object
from app.intake.tensors import read_inputs
from convgrad._errors import InvalidParams
from schemas.broken_rules import MAX_BROKEN_RULES
from schemas.graphs import resolve_graph
from tests.app.intake.support import OPERATION


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
SEARCHES: dict[str, Callable[[], object]] = {
    "members of a call": lambda: read_request_object(OPERATION, MEMBERS),
    "members of a graph": lambda: read_graph_request(MEMBERS),
    "attributes": lambda: resolve_graph(
        read_graph_request(graph(200, attrs={f"data_format{k}": 1 for k in range(8)})).call.graph
    ),
    "kinds": lambda: read_graph_request(graph(500, kind="BiasAd")),
    "tensors": lambda: read_inputs(read_graph_request(graph(50)).rows, TENSORS),
}


@pytest.mark.parametrize("names", SEARCHES)
def test_similar_names_are_searched_for_what_is_listed(names: str) -> None:
    """Of thousands of misspelt names, only those in the reply are compared with the right ones."""
    with counted() as calls, pytest.raises(InvalidParams) as caught:
        SEARCHES[names]()
    assert len(caught.value.errors) == MAX_BROKEN_RULES
    assert MAX_BROKEN_RULES // 2 < calls["get_close_matches"] <= MAX_BROKEN_RULES + 8
