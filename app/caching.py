"""A cache of what is found in the texts of clients, such as headers: most send the same few, short ones."""

from __future__ import annotations

from collections.abc import Callable, Sized
from functools import lru_cache, wraps
from typing import ParamSpec, TypeVar, cast

__all__ = ["cached_if_short"]

P = ParamSpec("P")
T = TypeVar("T")

# Long texts, or many different ones, must not fill the memory.
_LONGEST, _MOST = 256, 256


def cached_if_short(find: Callable[P, T]) -> Callable[P, T]:
    """Cache the last results of a function of texts, those for at most 256 characters in all."""
    usual = cast("Callable[P, T]", lru_cache(_MOST)(find))

    @wraps(find)
    def found(*texts: P.args, **named: P.kwargs) -> T:
        is_short = sum(map(len, cast("tuple[Sized, ...]", texts))) <= _LONGEST
        return (usual if is_short else find)(*texts, **named)

    return found
