"""Validation of API keys, without ever showing them, and the flags of `convgrad keys`."""

from __future__ import annotations

import argparse

__all__ = ["add_key_flags", "checked_key"]


def add_key_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `convgrad keys`, which the service parses: here they serve help and completion."""
    add = parser.add_argument
    add("name", metavar="NAME", help="the key's id in logs and metrics: letters, digits, '.', '_' and '-'")
    add("--file", metavar="FILE", help="add the line to this key file instead of printing it")
    add("--calls", type=int, metavar="N", help="most calls of the key at a time")
    add("--stdin", action="store_true", help="read the key from standard input instead of creating one")


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
