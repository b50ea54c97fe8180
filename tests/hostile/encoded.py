"""Tensors in base64 whose text has the right length."""

from __future__ import annotations

from typing import Any

__all__ = ["in_base64"]


def in_base64(letters: str, text: str) -> dict[str, Any]:
    """Return a tensor whose data ends with this text, of the shape that its length is right for, if any is."""
    while (size := (len(letters) + len(text)) // 4 * 3 - text[-2:].count("=")) % 4:
        letters += "AAAA"
    return {"data": letters + text, "shape": [1, 1, max(size // 4, 1)]}
