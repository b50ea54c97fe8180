"""Calls with extreme numbers and shapes: every API gives the same answer, and none a server error."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.app.samples import NPY, post, read, same_bits
from tests.hostile.apis import APIS, SECRET, TINY, WrongCall, ask

INPUTS = TINY.inputs()


@pytest.fixture(autouse=True)
def the_next_call_works(http: httpx.Client) -> Iterator[None]:
    """After each of these tests a valid call on the same connections returns the right bits."""
    yield
    assert same_bits(read(post(http, TINY, INPUTS, NPY)), TINY.expected(INPUTS))


def answers(http: httpx.Client, call: WrongCall) -> set[str]:
    """Make a call through every API; return the kind of error, as far as each API tells it."""
    found = {api: ask(http, api, call) for api in APIS}
    if found["oip"] == "refused":
        assert found["json"] != "ok", found
        del found["oip"]
    assert len(set(found.values())) == 1, found
    return set(found.values())


def test_the_right_call(http: httpx.Client) -> None:
    """The call that these tests modify is valid unmodified."""
    assert answers(http, WrongCall()) == {"ok"}


EXTREMES: list[Any] = [
    *(0, -1, 2**31 - 1, 2**31, 2**63 - 1, 2**63, 2**64, -(2**63) - 1, 10**300),
    *(True, False, 1.0, 1.5, -0.0, 1e308, None, {}, [], [[]], {"a": [1]}, "x", SECRET, "\0", "é\U0001f600"),
]


@pytest.mark.parametrize("name", ["strides", "pads_begin", "pads_end", "dilations", "output_padding", "weights_shape"])
@pytest.mark.parametrize("inside", [True, False], ids=["element", "whole"])
def test_extreme_lists(http: httpx.Client, name: str, inside: bool) -> None:
    """A list attribute takes a list of integers in range: no bool, no float, nothing that overflows."""
    for value in EXTREMES:
        if value in (None, []) and not inside:
            continue  # an absent attribute may have a default
        given = [value] * (3 if name == "weights_shape" else 1) if inside else value
        found = answers(http, WrongCall({name: given}))
        right = {"pads_begin": (0,), "pads_end": (0,), "output_padding": (0,)}.get(name, ())
        assert (found == {"ok"}) == (inside and type(value) is int and value in right), (value, found)
        assert found <= {"ok", "invalid_params", "too_large"}


@pytest.mark.parametrize("name", ["groups", "auto_pad", "data_format", "weights_format"])
def test_extreme_scalars(http: httpx.Client, name: str) -> None:
    """Attributes with a single value reject all of these."""
    for value in EXTREMES:
        if value is not None:
            assert answers(http, WrongCall({name: value})) == {"invalid_params"}, value


def test_unknown_and_odd_names(http: httpx.Client) -> None:
    """Names that no operation has are rejected, however they look, and long ones are not repeated."""
    for name in ("", "\0", "é", "\U0001f600", "__proto__", "strides ", "STRIDES", SECRET * 9, "a" * 5000):
        assert answers(http, WrongCall({name: 1})) == {"invalid_params"}, name


SHAPES: list[list[Any]] = [
    *([0, 1, 4], [1, 0, 4], [1, 1, 0], [0, 0, 0]),
    *([2**32, 2**32, 4], [2**62, 4, 1], [2**63 - 1, 2, 1], [2**31, 2**31, 2], [1, 1, 2**61]),
    *([0, 2**63 - 1, 2**63 - 1], [2**63 - 1, 2**63 - 1, 0]),
    *([], [4], [1, 4], [1, 1, 1, 4], [1, 1, 1, 1, 1, 4], [1] * 64, [1] * 65),
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: str(shape)[:40])
def test_odd_shapes(http: httpx.Client, shape: list[int]) -> None:
    """Shapes without elements, with more than 64 bits can count, and of any rank get the same answer from all APIs."""
    data = b"" if 0 in shape or len(shape) == 3 else INPUTS["src"].tobytes()
    found = answers(http, WrongCall(tensors={"src": ("f32", shape, data)}))
    assert found <= {"invalid_params"}, found


def test_an_empty_batch_at_every_api(http: httpx.Client) -> None:
    """An empty batch gets the same answer from every API."""
    none = {"src": ("f32", [0, 1, 4], b""), "diff_dst": ("f32", [0, 1, 6], b"")}
    assert answers(http, WrongCall(tensors=none)) <= {"ok", "invalid_params"}


@pytest.mark.parametrize("size", [2**63, 2**64, -1, True, 1.0, "4", None, [4]], ids=repr)
def test_invalid_sizes(http: httpx.Client, size: Any) -> None:
    """An axis is an integer of 64 bits; with anything else in its header a .npy file is invalid."""
    call = WrongCall(tensors={"src": ("f32", [1, 1, size], INPUTS["src"].tobytes())})
    assert answers(http, call) == {"invalid_params"}


@pytest.mark.parametrize("api", list(APIS))
def test_data_of_the_wrong_length(http: httpx.Client, api: str) -> None:
    """Data with fewer or more bytes than the shape needs is rejected."""
    data = INPUTS["src"].tobytes()
    for wrong in (b"", data[:-1], data + b"\0", data * 100):
        assert ask(http, api, WrongCall(tensors={"src": ("f32", [1, 1, 4], wrong)})) in ("invalid_params", "refused")
