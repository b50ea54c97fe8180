"""Multipart bodies: split anywhere, tensors in any byte and memory order, and every way to get them wrong."""

from __future__ import annotations

import asyncio
import contextlib
import json
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.intake.lease import Lease
from app.intake.multipart import MultipartBody
from app.intake.requests import read_request_object
from app.pool.buffers import SegmentPool
from app.telemetry.context import RequestContext
from convgrad._errors import ConvgradError, InvalidParams, TooLarge
from schemas.tables import find_operation
from tests.app.intake.support import (
    ATTRIBUTES,
    CONTENT_TYPE,
    HEAD,
    MIB,
    OPERATION,
    arrays,
    check_head,
    chunks,
    multipart,
    npy,
    read_parts,
    reading,
    request,
)


def parts(**others: bytes) -> list[tuple[str, bytes]]:
    """Return the parts of a valid call, some of them replaced."""
    made = {"request": request()} | {name: npy(array) for name, array in arrays().items()}
    return list((made | others).items())


def expected(dtype: str = "f4") -> dict[str, bytes]:
    """Return the bytes that the kernels should get."""
    return {name: array.tobytes() for name, array in arrays(dtype).items()}


@given(st.integers(1, 3000), st.booleans())
def test_any_cut_gives_the_same_tensors(step: int, declared: bool) -> None:
    """The tensors are the same wherever the body is split, with and without a declared length."""
    assert read_parts(multipart(parts()), step=step, declared=declared) == expected()


@pytest.mark.parametrize("kind", [">f4", "<f4", ">f2", "<f2"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_every_order_of_bytes_and_axes_arrives_in_one(kind: str, order: Any) -> None:
    """Big-endian and Fortran-ordered files are converted to little-endian bytes in C order."""
    given = {name: npy(np.asarray(array, order=order)) for name, array in arrays(kind).items()}
    assert read_parts(multipart(parts(**given))) == expected("<" + kind[1:])


@pytest.mark.parametrize("written_as", ["V2", "u2"])
def test_bf16_is_two_bytes_with_a_declared_dtype(written_as: str) -> None:
    """Two void bytes and a u2 are bf16 if the request says so."""
    made = {name: array.astype(ml_dtypes.bfloat16) for name, array in arrays().items()}
    files = {name: npy(array.view(written_as)) for name, array in made.items()}
    head = request({"src": {"dtype": "bf16"}, "diff_dst": {"dtype": "bf16"}})
    found = read_parts(multipart(parts(request=head, **files)))
    assert found == {name: array.tobytes() for name, array in made.items()}


@pytest.mark.parametrize("kind", ["<i4", "<i8", ">i8"])
@pytest.mark.parametrize("last", [True, False])
def test_the_weights_shape_may_be_a_part(kind: str, last: bool) -> None:
    """A shape tensor of 32 or 64 bits is accepted in any position."""
    head = json.loads(request())
    del head["inputs"]
    shape = ("weights_shape", npy(np.array([2, 2, 3], kind)))
    made = parts(request=json.dumps(head).encode())
    made.insert(len(made) if last else 1, shape)
    assert read_parts(multipart(made)) == expected()


def test_old_names_are_parts_too() -> None:
    """The old names of inputs are accepted as parts."""
    made = arrays()
    body = multipart(
        [("request", request()), ("input_forward", npy(made["src"])), ("output_delta", npy(made["diff_dst"]))]
    )
    assert read_parts(body, called=find_operation("ConvolutionBackpropFilters-1")) == expected()


@pytest.mark.parametrize("step", [1, 10**6])
def test_a_described_optional_input_is_waited_for(step: int) -> None:
    """An optional input that the request describes only by its dtype may be the last part, wherever the body is cut."""
    called = find_operation("ConvTranspose")
    given = {name: {"dtype": "f32"} for name in ("src", "weights", "bias")}
    head = {"attributes": ATTRIBUTES | {"weights_format": "IOX"}, "inputs": given}
    files = {"src": np.ones((1, 2, 3), "f4"), "weights": np.ones((2, 1, 2), "f4"), "bias": np.ones(1, "f4")}
    body = multipart([("request", json.dumps(head).encode()), *((name, npy(array)) for name, array in files.items())])
    assert read_parts(body, step=step, called=called) == {name: array.tobytes() for name, array in files.items()}


def test_a_request_part_has_a_limit() -> None:
    """A longer one is rejected, wherever the body is split."""
    for step in (61, 10**6):
        with pytest.raises(TooLarge, match=str(HEAD)):
            read_parts(multipart(parts(request=b'"' + b"x" * 270_000 + b'"')), step=step)


def test_a_call_is_refused_before_its_data_is_taken() -> None:
    """Shapes that don't match are rejected at the last header, before memory is allocated or data arrives."""
    wrong = npy(np.zeros((2, 2, 7), "f4"))
    head = multipart(parts(diff_dst=wrong))
    head = head[: head.rindex(b"\n", 0, head.rindex(b"\r\n--")) + 1]
    pool = SegmentPool(64 * MIB)
    with Lease(pool, RequestContext("id")) as lease:
        read = reading(partial(read_request_object, OPERATION))
        body = MultipartBody(CONTENT_TYPE, lease, read, check_head, length=10**9, limit=HEAD)
        with pytest.raises(InvalidParams, match="diff_dst"):
            asyncio.run(body.request(chunks(head, 10**6)))
    assert pool.stats().created == 0


def test_a_header_that_promises_more_than_the_body_has_is_refused() -> None:
    """A file that claims a gigabyte in a body of a kilobyte is rejected before memory is allocated."""
    huge = npy(np.zeros((1, 1, 1), "f4")).replace(b"(1, 1, 1)", b"(8, 1, 33554432)"[:16]).replace(b" " * 7, b"", 1)
    with pytest.raises(InvalidParams, match="can still arrive"):
        read_parts(multipart(parts(src=huge)))


@given(st.data())
def test_damaged_bodies_raise_only_convgrad_errors(data: st.DataObject) -> None:
    """A body with bytes removed, doubled or changed returns a call or raises one of our errors."""
    body = bytearray(multipart(parts()))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(body)))
        body[at : at + data.draw(st.integers(0, 4))] = data.draw(
            st.sampled_from([b"", b"\r\n", b"--a-boundary", b"--", b"\x00", b'"', b"(", b"9", b"\x93NUMPY"])
        )
    with contextlib.suppress(ConvgradError):
        read_parts(bytes(body), step=data.draw(st.integers(1, 2000)))
