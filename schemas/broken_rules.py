"""Broken rules as data: where, which rule, both numbers, and never the caller's data."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import islice
from typing import Any

from convgrad._errors import InvalidParams, TooLarge, Unsupported
from schemas.shapes import INT64_MAX

__all__ = [
    "MAX_BROKEN_RULES",
    "BrokenRule",
    "broken_rule",
    "dims",
    "invalid_params",
    "members_rule",
    "number",
    "safe_key",
    "safe_text",
    "some",
    "too_large",
    "unsupported",
]

BrokenRule = dict[str, Any]

# Limits that keep the answer to a call with a million unknown names short and fast.
MAX_BROKEN_RULES = 64
MAX_MEMBERS = 64
_MOST_NAMES = 16


def broken_rule(loc: Iterable[str | int], msg: str, kind: str) -> BrokenRule:
    """Return one broken rule; `loc` is the path to the value and `kind` a stable name for programs."""
    return {"loc": list(loc), "msg": msg, "type": kind}


def members_rule(given: object, loc: list[str | int]) -> BrokenRule | None:
    """Return the rule that a part of a call breaks by not being an object or by having too many members, or None."""
    name = loc[-1]
    if not isinstance(given, Mapping):
        return broken_rule(loc, f"{name} must be an object", "object_type")
    if len(given) > MAX_MEMBERS:
        return broken_rule(loc, f"{name} must have at most {MAX_MEMBERS} members, but has {len(given)}", "too_long")
    return None


def number(value: int) -> str:
    """Format an integer; beyond 64 bits only its sign, because a caller may send a million digits."""
    if -INT64_MAX - 1 <= value <= INT64_MAX:
        return str(int(value))
    return "a number above 2^63 - 1" if value > 0 else "a number below -2^63"


def dims(shape: Iterable[int]) -> str:
    """Format a shape: `(8, 64, 28, 28)`."""
    return "(" + ", ".join(number(size) for size in shape) + ")"


def safe_key(key: object) -> str:
    """Return a name chosen by the caller if it is short printable ASCII, which `loc` may contain, otherwise `?`."""
    return key if isinstance(key, str) and len(key) <= 64 and key.isascii() and key.isprintable() else "?"


def safe_text(name: object) -> str:
    """Return the printable ASCII of the beginning of a name chosen by the caller, with `..` if it is cut."""
    if not isinstance(name, str):
        return ""
    shown = "".join(each for each in name[:64] if each.isascii() and each.isprintable()).strip()
    return f"{shown}.." if len(name) > 64 else shown


def some(names: Collection[object]) -> str:
    """Format names, of many the first and how many more there are: `2, 5, 8 and 1,997 more`."""
    more = len(names) - _MOST_NAMES
    return ", ".join(map(str, islice(names, _MOST_NAMES))) + (f" and {more:,} more" if more > 0 else "")


def invalid_params(what: str, broken: list[BrokenRule], *, stopped: bool = False) -> InvalidParams:
    """Return the error for these broken rules, with the first one as its message.

    It lists the first `MAX_BROKEN_RULES` and has the number of the others, or with `stopped`, when checking ended
    early, at least how many there are.
    """
    more, listed = len(broken) - 1, ""
    if more >= MAX_BROKEN_RULES:
        listed = f", {MAX_BROKEN_RULES - 1} of which are listed"
    least = "at least " if stopped else ""
    others = f" (and {least}{more:,} more broken rule{'s' if more > 1 else ''}{listed})" if more else ""
    return InvalidParams(f"{what}: {broken[0]['msg']}{others}", data=_listed(broken))


def unsupported(message: str, broken: list[BrokenRule]) -> Unsupported:
    """Return the error for a dtype that is not supported, with the broken rules as `invalid_params` lists them."""
    return Unsupported(message, data=_listed(broken))


def _listed(broken: list[BrokenRule]) -> dict[str, Any]:
    omitted = len(broken) - MAX_BROKEN_RULES
    return {"errors": broken[:MAX_BROKEN_RULES]} | ({"omitted": omitted} if omitted > 0 else {})


def too_large(error: TooLarge, loc: Iterable[str | int], name: str) -> TooLarge:
    """Return the same error with the name of the tensor or attribute that is too large."""
    return TooLarge(f"{name}: {error.message}", data={**error.data, "loc": list(loc)})
