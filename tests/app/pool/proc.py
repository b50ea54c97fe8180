"""What `/proc` says about a process."""

from __future__ import annotations

from pathlib import Path

__all__ = ["descriptors", "target"]


def descriptors(pid: int | str = "self") -> dict[int, str]:
    """Give the open descriptors of a process and what they lead to."""
    found = {}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found[int(entry.name)] = str(entry.readlink())
        except FileNotFoundError:  # the one that lists the folder
            continue
    return found


def target(descriptor: int) -> str:
    """Tell what one of our descriptors leads to."""
    return descriptors()[descriptor]
