"""The members of a JSON object that is still arriving."""

from __future__ import annotations

import json
from typing import Any

import pytest

from app.intake.strict_json import leading_members, members_before

WHOLE = {"a": [1, {"b": "}"}], 'c"\\é': None, "d": -1.5e3, "e": {"f": ",", "g": [[]]}, "h": "x"}


@pytest.mark.parametrize("indent", [None, 1])
def test_members_are_found_once_they_are_complete(indent: int | None) -> None:
    """Wherever the text is cut, the result is the first members of the whole object, unchanged."""
    text = json.dumps(WHOLE, indent=indent)
    for end in range(len(text)):
        found = leading_members(text[:end].encode())
        assert list(found.items()) == list(WHOLE.items())[: len(found)]
    assert found == {name: value for name, value in WHOLE.items() if name != "h"}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (b"", {}),
        (b"[1,", {}),
        (b'"a",', {}),
        (b'\xef\xbb\xbf {"a": 1, "b": {"x": 1, "x": 2}, "c": 3,', {"a": 1}),
        (b'{"a": 1, "b": 1e999, ', {"a": 1}),
        (b'{"a": 1, b: 2, ', {"a": 1}),
        (b'{"a": "\xff", ', {}),
        (b'{"a": 1, "b": ' + b"[" * 100_000, {"a": 1}),
        (b'{"a": 1, "b": ' + b"9" * 10_000 + b", ", {"a": 1}),
    ],
)
def test_a_fault_ends_the_search(text: bytes, found: dict[str, Any]) -> None:
    """Anything that is not JSON, or breaks one of our rules, is left to the parser of the whole document."""
    assert leading_members(text) == found


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
