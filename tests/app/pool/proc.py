"""Descriptors of a process, read from `/proc`."""

from __future__ import annotations

from pathlib import Path

__all__ = ["descriptors", "opened_since", "target"]


def descriptors(pid: int | str = "self") -> dict[int, str]:
    """Return the open descriptors of a process and their targets."""
    found = {}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found[int(entry.name)] = str(entry.readlink())
        except FileNotFoundError:  # the descriptor used to list the folder
            continue
    return found


def opened_since(before: dict[int, str]) -> dict[int, str]:
    """Return our descriptors that are new since `before`; ones closed by the garbage collector don't matter."""
    return dict(descriptors().items() - before.items())


def target(descriptor: int) -> str:
    """Return the target of one of our descriptors."""
    return descriptors()[descriptor]
