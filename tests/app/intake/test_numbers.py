"""Numbers in JSON lists, split anywhere: the same elements as from a whole parser, directly in segments."""

from __future__ import annotations

import asyncio
import json
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from app.intake.json import JsonIntake
from app.intake.lease import Lease
from app.intake.numbers import Numbers
from app.intake.sinks import TensorFault
from app.intake.values import TensorValues
from app.pool.buffers import SegmentPool
from convgrad._dtypes import DTYPES
from convgrad._errors import ConvgradError, ParseError, TooLarge
from tests.app.intake.support import HEAD

POOL = SegmentPool(64 << 20)


def read(text: bytes, cuts: list[int], *, head: int = 1 << 16) -> tuple[Any, Lease]:
    """Read a document that arrives in pieces; return it and its lease."""
    lease = Lease(POOL)

    async def run() -> Any:
        intake = JsonIntake(TensorValues(lease, only_lists=True), length=len(text), max_skeleton=head)
        edges = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
        for start, stop in pairwise(edges):
            await intake.take(text[start:stop])
        return await intake.finish_async()

    document = asyncio.run(run())
    for numbers in _numbers(document):
        if numbers.fault is not None:
            lease.close()
            raise numbers.fault
    return document, lease


def _numbers(value: Any) -> list[Numbers]:
    if isinstance(value, Numbers):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [found for entry in inner for found in _numbers(entry)]


def elements(numbers: Numbers, dtype: str, shape: tuple[int, ...]) -> Any:
    """Return a list's elements as a tensor."""
    numbers.check(DTYPES[dtype], shape)
    segment = asyncio.run(numbers.collect())
    count = int(np.prod(shape))
    return np.frombuffer(bytes(segment.view[: count * DTYPES[dtype].itemsize]), DTYPES[dtype].numpy).reshape(shape)


def request(array: Any, datatype: str, *, first: bool, nested: bool, **dumping: Any) -> bytes:
    """Return a document with one tensor, its data before or after its description."""
    values = array.astype(np.float64) if nested else array.astype(np.float64).ravel()
    about = {"name": "a", "shape": list(array.shape), "datatype": datatype}
    entry = {"data": values.tolist()} | about if first else about | {"data": values.tolist()}
    return json.dumps({"inputs": [entry], "text": 'NaN "data": [1] I\\'}, **dumping).encode()


@given(
    data=st.data(),
    dtype=st.sampled_from(["f32", "f16", "bf16"]),
    shape=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    first=st.booleans(),
    nested=st.booleans(),
    indent=st.sampled_from([None, 1]),
)
def test_any_tensor_cut_anywhere(
    data: st.DataObject, dtype: str, shape: list[int], first: bool, nested: bool, indent: int | None
) -> None:
    """In any order of the members, nesting and chunks, the tensor's bits are those of the numbers."""
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 16)))
    array = rng.standard_normal(shape).astype(DTYPES[dtype].numpy)
    text = request(array, DTYPES[dtype].oip, first=first, nested=nested, indent=indent)
    document, lease = read(text, data.draw(st.lists(st.integers(0, 1 << 16), max_size=40)))
    with lease:
        assert document["text"] == 'NaN "data": [1] I\\'
        got = elements(document["inputs"][0]["data"], dtype, tuple(shape))
        assert got.tobytes() == array.tobytes()
    assert POOL.stats().used == 0


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_a_large_list(dtype: str, nested: bool, first: bool) -> None:
    """A list of many slices arrives completely; the memory that buffered it is released."""
    array = np.random.default_rng(3).standard_normal((300, 7, 211)).astype(DTYPES[dtype].numpy)
    text = request(array, DTYPES[dtype].oip, first=first, nested=nested)
    document, lease = read(text, list(range(0, len(text), 99_991)))
    with lease:
        assert elements(document["inputs"][0]["data"], dtype, array.shape).tobytes() == array.tobytes()
        assert POOL.stats().used <= 2 * array.nbytes


TOKENS = ["[", "]", ",", "1", "-2.5", "1e3", " ", "\n", "x", '"', "[]", "[1]", "[1,2],", '"NaN"', '"-Infinity"', '"]"']


@given(
    tokens=st.lists(st.sampled_from(TOKENS), max_size=14),
    cuts=st.lists(st.integers(0, 99), max_size=12),
    declared=st.booleans(),
)
@example(tokens=["[1,2],", "[1,2],", "[1]"], cuts=[], declared=True)
@example(tokens=["[1]", ",", "1"], cuts=[], declared=False)
@example(tokens=["[]", ",", "[]"], cuts=[11], declared=False)
@example(tokens=['"NaN"', "[1]"], cuts=[], declared=False)
def test_what_is_accepted_are_the_lists_of_a_tensor(tokens: list[str], cuts: list[int], *, declared: bool) -> None:
    """Text is accepted if, and only if, the standard parser reads a tensor's nested lists; the numbers are the same."""
    text = "".join(tokens)
    shape = _shape(text)
    about = f'"dtype":"f32","shape":{list(shape or (1,))},' if declared else ""
    try:
        document, lease = read(f'{{{about}"data":[{text}]}}'.encode(), cuts)
        with lease:
            got = elements(document["data"], "f32", shape or _first_lengths(json.loads(f"[{text}]")))
    except (ConvgradError, TensorFault, json.JSONDecodeError):
        assert shape is None
        return
    assert shape is not None
    np.testing.assert_array_equal(got, np.array(json.loads(f"[{text}]"), np.float32).reshape(shape))


def _shape(text: str) -> tuple[int, ...] | None:
    """Return the shape of the nested lists in a text, or None if they are no tensor's."""
    try:
        value = json.loads(f"[{text}]")
    except json.JSONDecodeError:
        return None
    shape = _first_lengths(value)
    leaves = _leaves(value, len(shape))
    try:
        return shape if leaves is not None and np.shape(value) == shape else None
    except ValueError:  # ragged
        return None


def _first_lengths(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list):
        return ()
    return len(value), *(_first_lengths(value[0]) if value else ())


def _leaves(value: Any, depth: int) -> list[Any] | None:
    if not depth:
        return (
            [value] if (isinstance(value, int | float) and abs(value) < 1e38) or value in ("NaN", "-Infinity") else None
        )
    if not isinstance(value, list):
        return None
    inner = [_leaves(entry, depth - 1) for entry in value]
    return None if None in inner else [leaf for found in inner for leaf in found or ()]


@pytest.mark.parametrize("text", [b'{"data":[,,,[]]}', b'{"data":[ , ]}', b'{"data":[,1]}', b'{"data":[[],,[]]}'])
def test_a_comma_before_any_number_is_refused(text: bytes) -> None:
    """Wherever the text is split, commas without a number between them are rejected."""
    for width in range(1, len(text)):
        with pytest.raises(ParseError):
            read(text, list(range(width, len(text), width)))


def test_a_comma_after_the_last_number_is_refused() -> None:
    """A comma that ends a piece is no number too many of its list: what follows may not be JSON."""
    text = b'{"shape":[1,1,3],"datatype":"FP32","data":[[[1, 2, 3,]]]}'
    for cut in range(1, len(text)):
        with pytest.raises(ParseError):
            read(text, [cut])


def test_integers_are_whole() -> None:
    """The values of a shape must be integers, but may be written as floats."""
    document, lease = read(b'{"data": [3, 2.0, 1e1]}', [])
    with lease:
        document["data"].check(DTYPES["s64"], (3,))
        assert np.frombuffer(document["data"].content(), "<i8").tolist() == [3, 2, 10]
    for wrong in ("[3, 2.5]", '[3, "NaN"]', '["Infinity", 3]', "[3, 1e30]"):
        document, lease = read(b'{"data": %s}' % wrong.encode(), [])
        with lease, pytest.raises(TensorFault, match=r"integers|range"):
            document["data"].check(DTYPES["s64"], (2,))


def test_rounding_to_bf16() -> None:
    """Numbers between two bf16 values are rounded once, to the nearest one, not to float32 before."""
    array = [1.0 + 2**-9, 1.0 + 3 * 2**-8, -3.14159, 1.0 + 2**-8 + 2**-40, -1.0 - 2**-8 - 2**-40, 1.0 + 2**-8, 1e-45]
    right = [1.0, 1.015625, -3.140625, 1.0078125, -1.0078125, 1.0, 0.0]
    text = json.dumps({"inputs": [{"shape": [7], "datatype": "BF16", "data": array}]}).encode()
    document, lease = read(text, [])
    with lease:
        got = elements(document["inputs"][0]["data"], "bf16", (7,))
        assert got.tobytes() == np.array(right, ml_dtypes.bfloat16).tobytes()


@pytest.mark.parametrize(
    ("dtype", "most", "over"),
    [
        ("f16", "65519.99", "65520"),
        ("bf16", "3.3961775e38", "3.3961776e38"),
        ("f32", "3.402823567797336e38", "3.4028235677973367e38"),
        ("f64", "1.7976931348623158e308", "1.7976931348623159e308"),
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_the_range_of_a_dtype(dtype: str, most: str, over: str, first: bool) -> None:
    """A number that would round to infinity is refused, whether the dtype comes before it or after; others are not."""
    for text, fits in (
        (most, True),
        (over, False),
        (f"-{over}", False),
        ('"-Infinity"', True),
        ("9007199254740993", dtype != "f16"),
    ):
        about, data = f'"dtype": "{dtype}", "shape": [1]', f'"data": [{text}]'
        body = f"{{{data}, {about}}}" if first else f"{{{about}, {data}}}"
        with nullcontext() if fits else pytest.raises(TensorFault, match=f"outside the range of {dtype}"):
            document, lease = read(body.encode(), [])
            with lease:
                elements(document["data"], dtype, (1,))


def test_memory_is_bounded_by_what_can_come() -> None:
    """A shape with more elements than the body has characters is rejected before memory is allocated."""
    text = b'{"shape": [1000000], "datatype": "FP32", "data": [1, 2]}'
    with pytest.raises(TensorFault, match="more than the body can contain"):
        read(text, [])


def test_the_rest_is_capped() -> None:
    """The length of everything but lists of numbers is limited, and so is the number of lists."""
    with pytest.raises(TooLarge):
        read(b'{"a": "' + b"x" * 5000 + b'"}', [], head=4096)
    with pytest.raises(TooLarge, match="4096 tensors"):
        read(b"[" + b",".join([b'{"data":[]}'] * 4097) + b"]", [])
    document, lease = read(b'{"data":[' + b" " * 50_000 + b"1" + b" " * 50_000 + b"]}", [], head=64)
    with lease:
        assert document["data"].count == 1


@pytest.mark.parametrize("text", [b'{"data": [1', b'{"data": ', b'{"data', b'{"data": [1]', b'{"a": NaN}', b'{"a": I}'])
def test_documents_that_end_too_early(text: bytes) -> None:
    """A document that is truncated, or not JSON, is a parse error."""
    with pytest.raises(ParseError):
        read(text, [])


def test_a_full_pool_is_a_fault_of_the_list() -> None:
    """A list for which there is no memory is skipped to its end, from within any depth."""
    text = json.dumps({"data": np.ones((40, 3, 3000)).tolist(), "next": 1}).encode()

    async def run() -> Any:
        with Lease(SegmentPool(1 << 20)) as lease:
            intake = JsonIntake(TensorValues(lease, only_lists=True), length=len(text), max_skeleton=HEAD)
            for at in range(0, len(text), 5000):
                await intake.take(text[at : at + 5000])
            return await intake.finish_async()

    document = asyncio.run(run())
    assert isinstance(document["data"].fault, TooLarge)
    assert document["next"] == 1
