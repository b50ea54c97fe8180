"""The members of a JSON object that is still arriving."""

from __future__ import annotations

import json
from typing import Any

import pytest

from app.intake.strict_json import Partial, members_before, partial_document

WHOLE = {"a": [1, {"b": "}"}], 'c"\\é': None, "d": -1.5e3, "e": {"f": ",", "g": [[]]}, "h": "x"}


@pytest.mark.parametrize("indent", [None, 1])
def test_members_are_found_once_they_are_complete(indent: int | None) -> None:
    """Wherever the text is cut, the result is the first members of the whole object, unchanged."""
    text = json.dumps(WHOLE, indent=indent)
    for end in range(1, len(text)):
        found = partial_document(text[:end].encode())
        assert isinstance(found, Partial)
        for (name, value), (expected, whole) in zip(found.items(), WHOLE.items(), strict=False):
            assert name == expected
            assert begins(value, whole)
    assert found == WHOLE
    assert partial_document(text.encode()) == WHOLE


def begins(part: Any, whole: Any) -> bool:
    """Return whether an object or list holds the first members or entries of another, or a value is the same."""
    if isinstance(part, dict) and isinstance(whole, dict):
        pairs = zip(part.items(), whole.items(), strict=False)
        return all(name == other and begins(value, rest) for (name, value), (other, rest) in pairs)
    if isinstance(part, list) and isinstance(whole, list):
        return all(begins(value, rest) for value, rest in zip(part, whole, strict=False))
    return bool(part == whole)


def test_a_value_that_was_taken_out_is_the_object_in_its_place() -> None:
    """Tensors stand where their bytes were, the one that is still arriving too."""
    text = b'{"inputs": {"src": {"data": NaN, "shape": [2]}, "weights": {"dtype": "f32", "data":'
    found = partial_document(text, ["first", "second"])
    assert found == {"inputs": {"src": {"data": "first", "shape": [2]}, "weights": {"dtype": "f32", "data": "second"}}}
    assert isinstance(found["inputs"], Partial)
    assert not isinstance(found["inputs"]["src"], Partial)


@pytest.mark.parametrize("text", [b'{"a": 1', b'{"a": tru', b'{"a": "x', b'{"a": -', b'{"a"', b'{"a":'])
def test_a_value_that_may_go_on_is_left_out(text: bytes) -> None:
    """A number is known once something follows it, and a word or a string once it is complete."""
    assert partial_document(text) == {}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (b"", None),
        (b"[1,", [1]),
        (b'"a",', "a"),
        (b'\xef\xbb\xbf {"a": 1, "b": {"x": 1, "x": 2}, "c": 3,', {"a": 1, "b": {"x": 1}}),
        (b'{"a": 1, "b": 1e999, ', {"a": 1}),
        (b'{"a": 1, b: 2, ', {"a": 1}),
        (b'{"a": "\\ud83d", "b": ', None),
        (b'{"a": "\xff", ', None),
        (b'{"a": 1, "b": ' + b"[" * 100_000, {"a": 1, "b": [[[[]]]]}),
        (b'{"a": 1, "b": ' + b"9" * 10_000 + b", ", {"a": 1}),
    ],
)
def test_a_fault_ends_the_search(text: bytes, found: Any) -> None:
    """Anything that is not JSON, or breaks one of our rules, is left to the parser of the whole document."""
    assert partial_document(text) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (b'{"data":', {}),
        (b'{"shape": [2, 3], "dtype": "f32", "data": ', {"shape": [2, 3], "dtype": "f32"}),
        (b'[{"a": 1}, {"b": 2 , \n "npy" :\t', {"b": 2}),
        (b'{"a": {"b": 1}, "data":', {}),
        (b'{"a": "{", "b": 1, "data":', {}),
        (b'["data":', {}),
        (b'{"long": "' + b" " * 5000 + b'", "data":', {}),
        (b'{"a": ' + b"[" * 4000 + b', "data":', {}),
    ],
)
def test_the_members_beside_a_value(text: bytes, found: dict[str, Any]) -> None:
    """Only earlier members of the same object are returned, none of an object inside or around it."""
    assert members_before(text) == found
