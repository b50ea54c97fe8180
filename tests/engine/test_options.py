"""The options of a call."""

from __future__ import annotations

from typing import Any

import pytest

from convgrad import InvalidParams
from engine.options import Options, parse_options


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, Options()),
        ({}, Options()),
        ({"encoding": None, "deadline_ms": None, "reference": None}, Options()),
        ({"encoding": "npy", "deadline_ms": 5, "reference": True}, Options("npy", 5, True)),
        ({"encoding": "list"}, Options("list")),
        ({"algorithm": "auto", "reference": True}, Options(reference=True, algorithm="auto")),
    ],
)
def test_options_have_defaults(given: Any, expected: Options) -> None:
    """Absent and null options get their defaults."""
    assert parse_options(given) == expected


def test_every_wrong_option_is_listed() -> None:
    """All errors are reported together, each with its place; values are not repeated and a long name is cut."""
    with pytest.raises(InvalidParams) as caught:
        parse_options({"encoding": "s3cret", "x" * 500: 1, "deadline_ms": 86_400_001, "algorithm": ["s3cret"]})
    assert [entry["loc"][1][:3] for entry in caught.value.errors] == ["xxx", "enc", "dea", "alg"]
    assert caught.value.errors[2]["msg"].endswith("but is 86400001")
    assert "s3cret" not in str(caught.value.errors)
    assert len(str(caught.value.errors)) < 1000
