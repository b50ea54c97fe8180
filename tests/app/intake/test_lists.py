"""Any JSON document with lists of numbers, against the standard library, however it is split."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.intake.json import JsonIntake
from app.intake.lease import Lease
from app.intake.numbers import Numbers
from app.intake.sinks import TensorFault
from app.intake.values import TensorValues
from app.pool.buffers import SegmentPool
from convgrad._dtypes import DTYPES
from tests.app.intake.support import HEAD

POOL = SegmentPool(64 << 20)


def scan(body: bytes, sizes: list[int]) -> Any:
    """Feed `body` in chunks of the given sizes, the last one repeated; return the document, its numbers as lists."""

    async def run() -> Any:
        with Lease(POOL) as lease:
            intake = JsonIntake(TensorValues(lease, only_lists=True), length=len(body), max_skeleton=HEAD)
            at, turn = 0, 0
            while at < len(body):
                size = sizes[min(turn, len(sizes) - 1)]
                await intake.take(body[at : at + size])
                at, turn = at + size, turn + 1
            return await plain(await intake.finish_async())

    document = asyncio.run(run())
    assert POOL.stats().used == 0
    return document


async def plain(value: Any) -> Any:
    """Replace the numbers of each list by a flat list."""
    if isinstance(value, dict):
        return {key: await plain(child) for key, child in value.items()}
    if isinstance(value, list):
        return [await plain(child) for child in value]
    if isinstance(value, Numbers):
        try:
            value.check(DTYPES["f32"], (value.count,))
        except TensorFault:  # two rows
            value.check(DTYPES["f32"], (2, value.count // 2))
        return np.frombuffer((await value.collect()).view, np.float32, value.count).tolist()
    return value


def flattened(value: Any) -> Any:
    """Flatten the lists under `data`, as `scan` does."""
    if isinstance(value, list):
        return [flattened(child) for child in value]
    if not isinstance(value, dict):
        return value
    return {
        key: np.array(child, np.float32).ravel().tolist()
        if key == "data" and isinstance(child, list)
        else flattened(child)
        for key, child in value.items()
    }


leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
    | st.sampled_from(["data", "N", "I", 'x"data":[1]', "\\", '"', "["])
)
keys = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.sampled_from(["name", "npy", "dat", "N"])
numbers = st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), max_size=9)
tensors = st.fixed_dictionaries(
    {"data": numbers | numbers.map(lambda row: [row, row] if row else row) | leaves},
    optional={"name": leaves, "shape": leaves, "datatype": leaves},
)
documents = st.recursive(
    leaves | tensors,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=20,
)


@given(
    document=documents,
    indent=st.sampled_from([None, 0, 3]),
    ascii_only=st.booleans(),
    sizes=st.lists(st.integers(1, 99), min_size=1, max_size=30),
)
def test_any_split_gives_what_the_standard_library_reads(
    document: Any, indent: int | None, ascii_only: bool, sizes: list[int]
) -> None:
    """A document split anywhere reads as json.loads reads it whole."""
    text = json.dumps(document, indent=indent, ensure_ascii=ascii_only)
    assert scan(text.encode(), sizes) == flattened(json.loads(text))


@pytest.mark.parametrize("step", [1, 5, 1000])
@pytest.mark.parametrize(
    "rest", ['"a]", [3]]', "{}, 4]", '"\\\\", "\\"]", [[]]]', '{"data": [1]}]', "1e999]", "null, NaN]", '"NaN]"]']
)
def test_the_rest_of_a_faulty_list_is_skipped(rest: str, step: int) -> None:
    """A fault is kept, and the document goes on after the list, whatever else is in it."""
    text = f'{{"data": [1, {rest}, "next": [2]}}'.encode()

    async def run() -> Any:
        with Lease(POOL) as lease:
            intake = JsonIntake(TensorValues(lease, only_lists=True), length=len(text), max_skeleton=HEAD)
            for at in range(0, len(text), step):
                await intake.take(text[at : at + step])
            return await intake.finish_async()

    document = asyncio.run(run())
    assert document["data"].fault is not None
    assert document["next"] == [2]
