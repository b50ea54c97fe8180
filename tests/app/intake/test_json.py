"""The JSON scanner against the standard library, with bodies split at every position."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import random
import re
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.intake.inline import InlineTensor
from app.intake.json import JsonIntake
from app.intake.lease import Lease
from app.intake.numbers import Numbers
from app.intake.sinks import RawSink, TensorFault
from app.intake.values import TensorValues
from app.pool.buffers import SegmentPool
from convgrad._errors import ConvgradError, Overloaded, ParseError, TooLarge
from tests.app.intake.support import HEAD

MIB = 1 << 20


def scan(body: bytes, sizes: list[int] | None = None, **limits: Any) -> Any:
    """Feed `body` in chunks of the given sizes, the last one repeated; return the document in plain values."""
    pool = SegmentPool(64 * MIB)

    async def run() -> Any:
        with Lease(pool) as lease:
            intake = JsonIntake(TensorValues(lease), **{"length": len(body), "max_skeleton": HEAD} | limits)
            at, turn = 0, 0
            steps = sizes or [len(body) or 1]
            while at < len(body):
                size = max(1, steps[min(turn, len(steps) - 1)])
                await intake.take(body[at : at + size])
                await intake.supply()
                at, turn = at + size, turn + 1
            return plain(await intake.finish_async())

    document = asyncio.run(run())
    assert pool.stats().used == 0
    return document


def plain(value: Any) -> Any:
    """Replace every decoded string by its decoded bytes, or by its fault, and every list of numbers by its fault."""
    if isinstance(value, dict):
        return {key: plain(child) for key, child in value.items()}
    if isinstance(value, list):
        return [plain(child) for child in value]
    if isinstance(value, Numbers):
        return value.fault
    if not isinstance(value, InlineTensor):
        return value
    if value.fault is not None or value.sink is None:
        return value.fault
    return value.sink.content()


def decoded(value: Any) -> Any:
    """Decode the remaining strings under `data`, so that it does not matter which ones were decoded."""
    if isinstance(value, list):
        return [decoded(child) for child in value]
    if not isinstance(value, dict):
        return value
    return {
        key: base64.b64decode(child, validate=True)
        if key == "data" and isinstance(child, str) and len(child) > 100
        else decoded(child)
        for key, child in value.items()
    }


def without_lists(value: Any) -> Any:
    """Return a document in which no list has the name of a tensor's numbers, which the scanner takes out too."""
    if isinstance(value, list):
        return [without_lists(child) for child in value]
    if not isinstance(value, dict):
        return value
    listed = {key for key, child in value.items() if key in ("data", "npy") and isinstance(child, list)}
    return {key: None if key in listed else without_lists(child) for key, child in value.items()}


tensor_text = st.binary(max_size=1500).map(lambda raw: base64.b64encode(raw).decode())
leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
    | st.sampled_from(["data", "npy", "N", "I", 'x"data":"', "\\", '"'])
)
keys = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.sampled_from(["data", "npy", "dat", "N"])
documents = st.recursive(
    leaves | st.fixed_dictionaries({"data": tensor_text}),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=20,
)


@given(
    document=documents,
    indent=st.sampled_from([None, 0, 3]),
    ascii_only=st.booleans(),
    slashes=st.booleans(),
    sizes=st.lists(st.integers(1, 700), min_size=1, max_size=30),
)
def test_any_split_gives_what_the_standard_library_reads(
    document: Any, indent: int | None, ascii_only: bool, slashes: bool, sizes: list[int]
) -> None:
    """A document split anywhere reads as json.loads and base64 read it whole."""
    text = json.dumps(document := without_lists(document), indent=indent, ensure_ascii=ascii_only)
    if slashes:
        text = re.sub(r"(?<!e)[+]", r"\\u002B", text.replace("/", "\\/"))
    assert decoded(scan(text.encode(), sizes)) == decoded(json.loads(text))


@given(st.binary(max_size=600) | st.text(max_size=400).map(str.encode), st.lists(st.integers(1, 99), min_size=1))
def test_rubbish_raises_only_convgrad_errors(body: bytes, sizes: list[int]) -> None:
    """Arbitrary bytes return a document or raise one of our errors, and no memory stays in use."""
    with contextlib.suppress(ConvgradError):
        scan(body, sizes)


@given(st.data(), st.lists(st.integers(1, 300), min_size=1))
def test_damaged_documents_raise_only_convgrad_errors(data: st.DataObject, sizes: list[int]) -> None:
    """A valid document with bytes removed, doubled or changed reads as with json.loads, or raises an error."""
    body = bytearray(json.dumps(data.draw(documents)).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(body)))
        body[at : at + data.draw(st.integers(0, 3))] = data.draw(
            st.sampled_from([b"", b'"', b"\\", b"\\u12", b"{", b"]", b"N", b"\xff", b"=", b"\x00", b'"data":"'])
        )
    with contextlib.suppress(ConvgradError):
        found = scan(bytes(body), sizes)
        assert has_fault(found) or decoded(found) == decoded(without_lists(json.loads(body)))


def has_fault(value: Any) -> bool:
    """Return whether a decoded string of the document has a fault."""
    if isinstance(value, dict | list):
        return any(has_fault(child) for child in (value.values() if isinstance(value, dict) else value))
    return isinstance(value, TensorFault | ConvgradError)


def body_with(data: str, shape: list[int] | None = None, *, key: str = "data") -> bytes:
    """Return a document with one tensor."""
    head = {} if shape is None else {"dtype": "f32", "shape": shape}
    return json.dumps({"id": 7, "t": head | {key: data}}).encode()


def base64_of(nbytes: int) -> str:
    """Return the base64 text of this many bytes."""
    return base64.b64encode(random.Random(nbytes).randbytes(nbytes)).decode()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"   ",
        b"{",
        b'{"a": ',
        b'{"data": "' + b"A" * 600,
        b'{"data": "' + b"A" * 600 + b"\\",
        b'{"data": "' + b"A" * 600 + b"\\x" + b'"}',
        b'{"data": "' + b"A" * 600 + b'"',
        b'{"data": "' + b"A" * 600 + b'"} x',
        b'{"da',
        b'{"data"',
        b'{"data":',
        b'{"a": NaN}',
        b'{"a": -Infinity}',
        b'{"a": Infinity}',
        b'{"a": 1e999}',
        b'{"a": "\\ud800"}',
        b'{"\\udc00": 1}',
        b'{"a": 1, "a": 2}',
        b'{"a": "\n"}',
        b'{"a": "\xff"}',
        b"\xff\xfe{\x00}\x00",
        b"\x93NUMPY",
        b"<html>",
        b"[1,]",
        b"1" * 5000,
        b"[" * 65 + b"]" * 65,
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b"nul",
    ],
)
@pytest.mark.parametrize("step", [1, 7, 10**6])
def test_what_is_not_json_is_a_parse_error(body: bytes, step: int) -> None:
    """Malformed, ambiguous and too deeply nested documents are parse errors, however they are split."""
    if step == 1 and len(body) > 10_000:
        step = 97
    with pytest.raises(ParseError):
        scan(body, [step])


@pytest.mark.parametrize("body", [b"[1, 2]", b'"x"', b"17", b"null", b"[" * 64 + b"]" * 64, b'\xef\xbb\xbf{"a": 1}'])
def test_every_kind_of_document_is_read(body: bytes) -> None:
    """A document may be any value, nested 64 deep, and may start with a byte order mark."""
    assert scan(body, [1]) == json.loads(body.decode("utf-8-sig"))


@pytest.mark.parametrize("body", [b'"' + b"a" * 300_000 + b'"', b" " * 300_000, b'{"dato": "' + b"A" * 300_000 + b'"}'])
def test_a_skeleton_over_the_cap_is_too_large(body: bytes) -> None:
    """Long content that is not a tensor is rejected at the limit, before the rest has arrived."""
    with pytest.raises(TooLarge):
        scan(body + b"!" * MIB, [4096], length=None)


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        ("A" * 600 + "!" + "A" * 603, "base64"),
        ("A" * 600 + "==" + "AA" + "A" * 600, "base64"),
        ("A" * 601, "base64"),
        ("A" * 599 + "-", "base64"),
        ("A" * 600 + "\n" + "A" * 3, "base64"),
        ("A" * 600 + "\u00e9" * 4, "base64"),
        ("A" * 600 + "====", "base64"),
        ("A" * 600 + "AB==", "base64"),
        ("A" * 600 + "AAB=", "base64"),
    ],
)
@pytest.mark.parametrize("step", [1, 5, 10**6])
def test_bad_base64_stays_in_its_place(data: str, kind: str, step: int) -> None:
    """A fault in a tensor's string concerns only that tensor: the rest of the document is read."""
    document = scan(body_with(data), [step])
    assert document["id"] == 7
    assert document["t"]["data"].kind == kind


def test_sizes_are_compared_before_memory_is_taken() -> None:
    """If dtype and shape come first, a string of the wrong size allocates no memory."""
    pool = SegmentPool(64 * MIB)
    with Lease(pool) as lease:
        body = body_with("A" * 1000, [1000, 1000])
        intake = JsonIntake(TensorValues(lease), length=len(body), max_skeleton=HEAD)
        asyncio.run(intake.take(body))
        fault = intake.finish()["t"]["data"].fault
    assert fault.kind == "size"
    assert "4000000 bytes" in fault.message
    assert pool.stats().created == 0


@pytest.mark.parametrize("count", [250, 252])
def test_a_string_of_another_size_is_a_fault(count: int) -> None:
    """Fewer or more bytes than dtype and shape need are a fault that names the needed number."""
    fault = scan(body_with(base64_of(4 * count), [251]), [100])["t"]["data"]
    assert fault.kind == "size"
    assert "1004 bytes" in fault.message


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("shape_first", [True, False])
@pytest.mark.parametrize("nbytes", [400, 100_000, 5_000_000])
def test_large_strings_land_whole(declared: bool, shape_first: bool, nbytes: int) -> None:
    """All bytes arrive, with and without a declared length, and with and without the shape before the data."""
    text = base64_of(nbytes)
    body = body_with(text, [nbytes // 4] if shape_first else None)
    document = scan(body, [65536], length=len(body) if declared else None)
    assert document["t"]["data"] == base64.b64decode(text)


@pytest.mark.parametrize("data", [b"[" + b"1," * 100_000, b'"' + b"A" * 200_000])
def test_a_body_without_a_length_takes_memory_as_it_arrives(data: bytes) -> None:
    """A declared gigabyte of which little has arrived takes little memory, as numbers and as base64."""
    pool = SegmentPool(2048 * MIB)

    async def run() -> int:
        with Lease(pool) as lease:
            intake = JsonIntake(TensorValues(lease, only_lists=data[:1] == b"["), max_skeleton=HEAD)
            await intake.take(b'{"dtype": "f32", "shape": [268435456], "data": ' + data)
            await intake.supply()
            return pool.stats().peak

    assert 0 < asyncio.run(run()) <= 2 * MIB


def test_a_tensor_is_held_once() -> None:
    """Sixteen megabytes of base64 use their decoded size from the pool and less than 1 MiB of the heap."""
    nbytes = 12 * MIB
    body = body_with(base64_of(nbytes), [nbytes // 4])
    pool = SegmentPool(64 * MIB)

    async def run() -> int:
        with Lease(pool) as lease:
            intake = JsonIntake(TensorValues(lease), length=len(body), max_skeleton=HEAD)
            for at in range(0, len(body), 1 << 16):
                await intake.take(body[at : at + (1 << 16)])
                await intake.supply()
            sink = intake.finish()["t"]["data"].sink
            assert isinstance(sink, RawSink)
            assert sink.nbytes == nbytes
            return pool.stats().peak

    tracemalloc.start()
    try:
        peak = asyncio.run(run())
        heap = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak == nbytes
    assert heap < MIB


def test_no_memory_is_a_fault_of_the_tensor() -> None:
    """If the pool is full, the tensor has a fault, and the document's id can still be read."""
    pool = SegmentPool(2 * MIB)
    body = body_with(base64_of(4 * MIB), [MIB])

    async def run() -> Any:
        with Lease(pool) as lease:
            intake = JsonIntake(TensorValues(lease), length=len(body), max_skeleton=HEAD)
            for at in range(0, len(body), 1 << 16):
                await intake.take(body[at : at + (1 << 16)])
                await intake.supply()
            return intake.finish()

    document = asyncio.run(run())
    assert document["id"] == 7
    assert document["t"]["data"].fault.code == "too_large"


def test_an_error_is_placed_in_the_whole_body() -> None:
    """The position in a message includes the characters of decoded strings."""
    body = body_with("A" * 4000)[:-1] + b" oops"
    with pytest.raises(ParseError, match=f"character {len(body) - 4}"):
        scan(body, [100])


@pytest.mark.parametrize("step", [1, 7, 10**6])
@pytest.mark.parametrize("escape", ["\\u{:04x}", "\\u{:04X}"])
def test_base64_may_be_escaped_throughout(step: int, escape: str) -> None:
    """Every character may be written as an escape, with hex digits in either case, split anywhere."""
    text = base64_of(900)
    body = body_with("@").replace(b"@", "".join(escape.format(ord(char)) for char in text).encode())
    assert scan(body, [step])["t"]["data"] == base64.b64decode(text)


@pytest.mark.parametrize("count", [3, 100])
def test_small_tensors_are_counted(count: int) -> None:
    """Small tensors of one call are on the heap; those of many are in segments that they share."""
    texts = [base64_of(48_000 + 3 * number) for number in range(count)]
    body = b"[" + b",".join(map(body_with, texts)) + b"]"
    pool, size = SegmentPool(64 * MIB), 48_000 * count

    async def run() -> None:
        with Lease(pool) as lease:
            intake = JsonIntake(TensorValues(lease), max_skeleton=HEAD)
            await intake.take(body)
            await intake.supply()
            assert size - 300_000 <= pool.stats().used <= (2 * size if count > 3 else 0)
            found = [plain(entry["t"]["data"]) for entry in intake.finish()]
            assert found == [base64.b64decode(text) for text in texts]

    asyncio.run(run())
    assert pool.stats().used == 0


def test_small_tensors_beyond_the_memory_are_refused() -> None:
    """When the memory is full, a small tensor gets the same error as a large one, and the rest is skipped."""
    body = b"[" + b",".join([body_with(base64_of(48_000))] * 60) + b"]"

    async def run() -> list[Any]:
        with Lease(SegmentPool(MIB)) as lease:
            intake = JsonIntake(TensorValues(lease), max_skeleton=HEAD)
            await intake.take(body)
            await intake.supply()
            return [entry["t"]["data"].fault for entry in intake.finish()]

    faults = asyncio.run(run())
    assert faults[0] is None
    assert isinstance(faults[-1], Overloaded)


def test_too_many_long_strings() -> None:
    """A document of thousands of tensors is rejected before they take more memory than their bytes."""
    with pytest.raises(TooLarge, match="4096"):
        scan(b"[" + b",".join([b'{"data":"' + b"A" * 516 + b'"}'] * 4097) + b"]", [10**6])


@pytest.mark.parametrize("item", [b'{"data":"' + b"A" * 600 + b'"},', b'{"data":"' + b"\\u0041" * 4000 + b'"},'])
def test_others_get_a_turn(item: bytes) -> None:
    """A body of many small items, or of escapes, does not block the event loop."""
    count = 1000
    turns = 0

    async def run() -> None:
        async def others() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(others())
        with Lease(SegmentPool(64 * MIB)) as lease:
            intake = JsonIntake(TensorValues(lease), max_skeleton=HEAD)
            await intake.take(b"[" + item * count)
            await intake.supply()
        task.cancel()

    asyncio.run(run())
    assert turns > count / 64
