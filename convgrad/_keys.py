"""Validation of API keys, which never shows them."""

from __future__ import annotations

__all__ = ["checked_key"]


def checked_key(key: str) -> str:
    """Return `key`; raises `ValueError`, without showing it, when an HTTP header can't contain it."""
    if not key:
        raise ValueError("the API key is empty")
    at = next((at for at, letter in enumerate(key) if not "!" <= letter <= "~"), None)
    if at is not None:
        where = f"character {at + 1} of {len(key)} is {_kind(key[at])}"
        raise ValueError(f"an API key must have ASCII letters, digits and punctuation only, but {where}")
    return key


def _kind(letter: str) -> str:
    if letter in "\r\n":
        return "a line break"
    if letter in " \t":
        return "a space"
    return "a control character" if letter.isascii() else "not ASCII"
