"""The subcommands ops, describe and health."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from convgrad._command.connection import connected, opened, wait
from convgrad._command.exits import NOT_READY
from convgrad._command.streams import show

__all__ = ["describe", "health", "ops"]


def ops(options: argparse.Namespace) -> int:
    """List the operations."""
    with connected(options) as client:
        listed = client.operations()
    if options.json:
        show(listed, options)
        return 0
    for entry in listed:
        print(entry["op"], "-", entry["summary"])
        print("   ", "also", ", ".join(entry["aliases"]))
    return 0


def describe(options: argparse.Namespace) -> int:
    """Show the table of an operation."""
    with connected(options) as client:
        table = client.describe(options.op)
    if options.json:
        show(table, options)
    else:
        print("\n".join(_page(table)))
    return 0


def health(options: argparse.Namespace) -> int:
    """Show whether the service accepts calls."""
    with opened(options) as client:
        found = client.health() if options.wait is None else wait(client, options)
    show(dict(found.detail), options)
    return 0 if found.ready else NOT_READY


def _page(table: Mapping[str, Any]) -> list[str]:
    """Return the lines of an operation's description."""
    lines = [table["op"], "  " + table["summary"], "  " + table["formula"]]
    for title in ("inputs", "outputs", "attributes"):
        lines += ["", title]
        lines += [f"  {row['name']:16} {_facts(row):28} {row['description']}" for row in table[title]]
    lines += ["", "weights layouts"]
    lines += [f"  {name:16} {', '.join(axes.values())}" for name, axes in table["layouts"]["weights"].items()]
    return lines


def _facts(row: Mapping[str, Any]) -> str:
    kind = row.get("type") or "/".join(row["dtypes"])
    default = "" if row.get("default") is None else f"= {row['default']}"
    return f"{kind} {'required' if row['required'] in (True, 'yes') else default}".strip()
