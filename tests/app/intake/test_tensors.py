"""Tensors in JSON objects: raw bytes, files, shapes, dumps, and the errors in each."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from app.intake.body import _count, read_json
from app.intake.elements import Base64, TensorFault
from app.intake.lease import Lease
from app.intake.requests import read_request_object
from app.intake.tensors import collect_tensors, read_inputs
from app.pool.buffers import SegmentPool
from app.telemetry.context import RequestContext
from convgrad._errors import InvalidParams, TooLarge
from tests.app.graph import wrapped
from tests.app.intake.support import ATTRIBUTES, MIB, OPERATION, Array, arrays, chunks, npy, read_object, text


def raw(array: Array, dtype: str = "f32") -> dict[str, Any]:
    """Return a tensor as raw bytes in base64."""
    return {"dtype": dtype, "shape": list(array.shape), "data": text(array.tobytes())}


def call(**inputs: Any) -> dict[str, Any]:
    """Return a valid request object with some inputs replaced."""
    made = {name: raw(array) for name, array in arrays().items()}
    return {"attributes": ATTRIBUTES, "inputs": {"weights_shape": [2, 2, 3]} | made | inputs}


def expected(dtype: str = "f4") -> dict[str, bytes]:
    """Return the bytes that the kernels should get."""
    return {name: array.tobytes() for name, array in arrays(dtype).items()}


@pytest.mark.parametrize("kind", ["<f4", ">f4"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_a_file_in_base64_is_a_tensor(kind: str, order: Any) -> None:
    """A .npy file is converted to little-endian bytes in C order."""
    files = {name: {"npy": text(npy(np.asarray(array, order=order)))} for name, array in arrays(kind).items()}
    assert read_object(call(**files)) == expected()


def test_bf16_has_two_forms() -> None:
    """bf16 may be raw bytes, or a file with its dtype beside it."""
    made = {name: array.astype(ml_dtypes.bfloat16) for name, array in arrays().items()}
    files = {name: {"npy": text(npy(array)), "dtype": "bf16"} for name, array in made.items()}
    bits = {name: raw(array, "bf16") for name, array in made.items()}
    right = {name: array.tobytes() for name, array in made.items()}
    assert read_object(call(**files)) == read_object(call(**bits)) == right


@pytest.mark.parametrize("end", ["AB==", "AAB=", "A-==", "A ==", "A\n==", "A\u00c1==", "=A==", "A===", "AA=A", "A"])
def test_base64_has_one_form(end: str) -> None:
    """Bits after the last byte are zero, and nothing is skipped."""
    assert Base64("AAAAAAA=").content() == bytes(5)
    with pytest.raises(TensorFault) as caught:
        Base64("AAAA" + end).content()
    assert caught.value.kind == "base64"


@pytest.mark.parametrize(
    "shape",
    [
        {"dtype": "s32", "shape": [3], "data": text(np.array([2, 2, 3], "<i4").tobytes())},
        {"npy": text(npy(np.array([2, 2, 3], "<i4")))},
        {"npy": text(npy(np.array([2, 2, 3], "<i8")))},
        {"npy": text(npy(np.array([2, 2, 3], ">i4"))), "dtype": "s32"},
    ],
)
def test_the_weights_shape_may_be_a_tensor(shape: dict[str, Any]) -> None:
    """A shape is a list or a tensor of integers."""
    assert read_object(call(weights_shape=shape)) == expected()


def test_a_dumped_op_with_data_is_a_call() -> None:
    """An op object as dumped by oneDNN Graph, with data added to its inputs, is a complete call."""
    given = [raw(array) | {"id": number, "stride": [1]} for number, array in enumerate(arrays().values())]
    dump = {
        "id": 0, "name": "CONV_0", "kind": "ConvolutionBackwardWeights", "attrs": wrapped(ATTRIBUTES), "inputs": given,
        "outputs": [{"id": 2, "dtype": "f32", "shape": [2, 2, 3]}],
    }  # fmt: skip
    assert read_object(dump) == expected()
    assert read_object(dump | {"options": {}}) == expected()
    assert read_object({"attributes": dump, "inputs": call()["inputs"]}) == expected()


def test_all_faults_are_found_in_one_pass() -> None:
    """Two bad tensors are two errors."""
    with pytest.raises(InvalidParams) as caught:
        read_object(call(src=5, diff_dst=raw(arrays()["src"]) | {"dtype": "f99"}))
    assert [error["loc"][1] for error in caught.value.errors] == ["src", "diff_dst"]


@pytest.mark.parametrize(
    "request_object",
    [
        {"attributes": {"data": "x" * 600}},
        {"graph": []},
        *(
            {"kind": "ConvolutionBackwardWeights", **members}
            for members in ({"attrs": 5}, {"inputs": 5}, {"inputs": [1, 2, 3, 4]})
        ),
    ],
)
def test_a_request_of_another_form_is_refused(request_object: Any) -> None:
    """Whatever is given as the request object, the error says what is wrong with it."""
    with pytest.raises(InvalidParams) as caught:
        read_object(request_object)
    assert caught.value.errors


@pytest.mark.parametrize("form", ["C", "F", ">f4", "data first"])
def test_large_tensors_are_put_in_order(form: str) -> None:
    """Tensors of megabytes, in any memory and byte order, arrive completely, and all their memory is released."""
    array = np.random.default_rng(7).random((3, 500_000, 1), "f4")
    if form == "data first":
        tensor = {"data": text(array.tobytes()), "dtype": "f32", "shape": list(array.shape)}
    else:
        kind = form if len(form) > 1 else "<f4"
        tensor = {"npy": text(npy(np.asarray(array.astype(kind), order="F" if form == "F" else "C")))}
    body = json.dumps({"attributes": {}, "inputs": {"src": tensor}}).encode()
    pool = SegmentPool(64 * MIB)

    async def run() -> bytes:
        with Lease(pool, RequestContext("id")) as lease:
            document = await read_json(chunks(body, 1 << 17), lease, length=len(body), limit=len(body))
            call = await read_request_object(OPERATION, document).read()
            return bytes((await collect_tensors(call.inputs, lease))["src"].view)

    assert asyncio.run(run()) == array.tobytes()
    assert pool.stats().used == 0


def test_a_full_pool_is_reported_as_such() -> None:
    """A body, and a tensor, over the memory limit raise `TooLarge`, not an error about their form."""
    big = {"dtype": "f32", "shape": [1 << 20], "data": text(bytes(4 * MIB))}
    with Lease(SegmentPool(MIB), RequestContext("id")) as lease:
        with pytest.raises(TooLarge):
            asyncio.run(read_json(chunks(b" " * 2 * MIB, MIB), lease, length=None, limit=8 * MIB))
        with pytest.raises(TooLarge):
            asyncio.run(read_json(chunks(b"", 1), lease, length=2 * MIB, limit=8 * MIB))
        inputs = read_inputs(OPERATION.operation, {"src": big})
        with pytest.raises(TooLarge):
            asyncio.run(collect_tensors(inputs, lease))


@pytest.mark.parametrize("count", [0, 1, 1023, 1024, 1025, 5000])
def test_values_are_counted_however_rare_they_are(count: int) -> None:
    """The bound on values needs an exact count, of few commas in long base64 and of a comma after each number."""
    assert _count(b"A" * 100 + b",0" * count + b"A" * 100, b",") == count
