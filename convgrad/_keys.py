"""API keys as they are given: whether one can be sent, and never what it is."""

from __future__ import annotations

__all__ = ["checked_key"]


def checked_key(key: str) -> str:
    """Return `key`; raises `ValueError`, which does not show it, when it can't stand in an HTTP header."""
    if not key:
        raise ValueError("the API key is empty")
    at = next((at for at, letter in enumerate(key) if not "!" <= letter <= "~"), None)
    if at is not None:
        where = f"character {at + 1} of {len(key)} is {_kind(key[at])}"
        raise ValueError(f"an API key has ASCII letters, digits and punctuation only, and {where}")
    return key


def _kind(letter: str) -> str:
    if letter in "\r\n":
        return "a line break"
    if letter in " \t":
        return "a space"
    return "a control character" if letter.isascii() else "not ASCII"
