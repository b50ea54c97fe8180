"""The flags of `convgrad keys`, which the service parses: here they serve help and completion."""

from __future__ import annotations

import argparse

__all__ = ["add_key_flags"]


def add_key_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `convgrad keys`."""
    add = parser.add_argument
    add("name", metavar="NAME", help="the key's id in logs and metrics: letters, digits, '.', '_' and '-'")
    add("--file", metavar="FILE", help="add the line to this key file instead of printing it")
    add("--calls", type=int, metavar="N", help="most calls of the key at a time")
    add("--stdin", action="store_true", help="read the key from standard input instead of creating one")
