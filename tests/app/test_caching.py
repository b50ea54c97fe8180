"""Caches of what is found in clients' texts."""

from __future__ import annotations

import pytest

from app.caching import cached_if_short


def test_short_texts_are_cached_and_long_ones_are_not() -> None:
    """A function of texts is called once for the same short ones, and each time for more than 256 characters."""
    calls = []

    @cached_if_short
    def joined(one: str, two: str) -> str:
        calls.append((one, two))
        return one + two

    short, long = ("a" * 255, "b"), ("a" * 256, "b")
    for texts in (short, long, short, long):
        assert joined(*texts) == "".join(texts)
    assert calls == [short, long, long]


def test_errors_are_not_cached() -> None:
    """A text that is refused is refused again."""

    @cached_if_short
    def refuse(text: str) -> str:
        raise ValueError(text)

    for _ in range(2):
        with pytest.raises(ValueError, match="x"):
            refuse("x")
