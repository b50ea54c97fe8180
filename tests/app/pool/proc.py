"""What `/proc` says about a process."""

from __future__ import annotations

from pathlib import Path

__all__ = ["descriptors", "opened_since", "target"]


def descriptors(pid: int | str = "self") -> dict[int, str]:
    """Give the open descriptors of a process and what they lead to."""
    found = {}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found[int(entry.name)] = str(entry.readlink())
        except FileNotFoundError:  # the one that lists the folder
            continue
    return found


def opened_since(before: dict[int, str]) -> dict[int, str]:
    """Give our descriptors that were not there before; what the collector closed is no matter."""
    return dict(descriptors().items() - before.items())


def target(descriptor: int) -> str:
    """Tell what one of our descriptors leads to."""
    return descriptors()[descriptor]
