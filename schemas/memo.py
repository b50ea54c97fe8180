"""A cache of resolved calls: training repeats the calls of the same few layers.

Keys are exact about types: Python treats True, 1 and 1.0 as equal, but the rules do not. So only calls of plain
strings, integers, lists of integers and `TensorMeta` are cached.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable

from schemas.resolved import ResolvedOp
from schemas.rows import MAX_DIMS
from schemas.tensors import TensorMeta

__all__ = ["Memo", "key_of"]

_MAX_MEMBERS = 16
_MAX_TEXT = 64


def key_of(name: object, attributes: object, inputs: object, outputs: tuple[str, ...] = ()) -> Hashable | None:
    """Return a key that is equal for two calls exactly when they are the same, or None if it can't be cached."""
    if type(name) is not str or type(attributes) is not dict or type(inputs) is not dict:
        return None
    if len(attributes) > _MAX_MEMBERS or len(inputs) > _MAX_MEMBERS:
        return None
    if any(len(output) > _MAX_TEXT for output in outputs):
        return None
    parts: list[Hashable] = [name, outputs, len(attributes)]
    for members in (attributes, inputs):
        for key, value in members.items():
            kind = type(value)
            if kind is list:
                if not _is_plain(value):
                    return None
                parts += (key, tuple(value))
            elif kind is TensorMeta:
                if not _is_plain(value.shape) or type(value.dtype) is not str:
                    return None
                parts += (key, value)
            elif kind is int or (kind is str and len(value) <= _MAX_TEXT):
                parts += (key, value)
            else:
                return None
            if type(key) is not str or len(key) > _MAX_TEXT:
                return None
    return tuple(parts)


def _is_plain(values: list[object] | tuple[object, ...]) -> bool:
    if len(values) > MAX_DIMS:
        return False
    for value in values:  # noqa: SIM110 - a generator costs more than the loop
        if type(value) is not int:
            return False
    return True


class Memo:
    """The last resolved calls by key; when full, the oldest one is dropped."""

    def __init__(self, size: int = 512) -> None:
        self._size = size
        self._known: dict[Hashable, ResolvedOp] = {}
        self._lock = threading.Lock()

    def get(self, key: Hashable | None) -> ResolvedOp | None:
        """Return the cached call of a key, or None."""
        return None if key is None else self._known.get(key)

    def put(self, key: Hashable | None, op: ResolvedOp) -> ResolvedOp:
        """Cache a call under its key, if it has one, and return it."""
        if key is not None:
            with self._lock:  # the iterator fails if another thread adds a call
                if len(self._known) >= self._size:
                    self._known.pop(next(iter(self._known)))
                self._known[key] = op
        return op
