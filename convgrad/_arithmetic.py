"""What a kernel may declare of its arithmetic, and which of that means something for a problem.

The service refuses a declaration with members that mean nothing for a call. A check has problems of many kinds: there,
each is judged by the members that do.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

__all__ = [
    "LARGEST_TILE",
    "MEMBERS",
    "PRODUCTS",
    "SUMS",
    "Broken",
    "Declaring",
    "broken",
    "described",
    "fitting",
    "meaningless",
    "parsed",
]

MEMBERS = ("products", "sum", "segments", "segment_sum", "algorithm")
PRODUCTS = ("f32", "tf32", "bf16", "f16", "3xtf32", "bf16x3", "bf16x6")
SEGMENT_SUMS = ("f64", "f32", "f16", "bf16")
SUMS = (*SEGMENT_SUMS, "f32 truncated")
LARGEST_TILE = 10
"""Most points of a tile of Winograd's along an axis."""

_WINOGRAD = re.compile(r"winograd F\((\d{1,2}), ?(\d{1,2})\)")
_MOST_SEGMENTS = 1 << 12


class Declaring(Protocol):
    """A problem whose kernel declares its arithmetic."""

    @property
    def op(self) -> str:
        """The operation."""

    @property
    def dtype(self) -> Any:
        """The dtype."""

    @property
    def kernel(self) -> Sequence[int]:
        """Taps along each axis."""

    @property
    def strides(self) -> Sequence[int]:
        """Strides."""

    @property
    def dilations(self) -> Sequence[int]:
        """Dilations."""


class Broken(NamedTuple):
    """A member that means nothing for a problem, the rule that it breaks, and the stable name of the rule."""

    member: str
    rule: str
    kind: str


def broken(given: Mapping[str, Any], problem: Declaring, name: str = "") -> list[Broken]:
    """Return the members that mean nothing for a problem, whose operation is called by a `name`; None means nothing."""
    found = {member: value for member, value in given.items() if value is not None}
    rules = [
        Broken(str(member)[:64], f"is not a member of arithmetic, which are {', '.join(MEMBERS)}", "unknown_member")
        for member in found
        if member not in MEMBERS
    ]
    of_bias = problem.op.startswith("BiasAdd")
    choices = {
        "products": PRODUCTS if problem.dtype == "f32" and not of_bias else ("f32",),
        "sum": SUMS[:2] if problem.dtype == "f64" else SUMS,
        "segment_sum": SEGMENT_SUMS,
    }
    for member, names in choices.items():
        if member in found and found[member] not in names:
            rule = f"must be {' or '.join(names)} for {name or problem.op} in {problem.dtype}"
            rules.append(Broken(member, rule, "choice"))
    segments = found.get("segments", 1)
    if type(segments) is not int or not 1 <= segments <= _MOST_SEGMENTS:
        rules.append(Broken("segments", f"must be an integer from 1 to {_MOST_SEGMENTS}", "value"))
    algorithm = _broken_algorithm(found.get("algorithm", "direct"), problem, of_bias=of_bias)
    return rules if algorithm is None else [*rules, Broken("algorithm", algorithm, "algorithm")]


def _broken_algorithm(name: object, problem: Declaring, *, of_bias: bool) -> str | None:
    """Return the rule that an algorithm breaks."""
    if name == "direct":
        return None
    match = _WINOGRAD.fullmatch(name) if isinstance(name, str) else None
    if name != "fft" and match is None:
        return "must be direct, fft or winograd F(m, r), such as winograd F(4, 3)"
    if of_bias:
        return f"must be direct for {problem.op}"
    if max((*problem.strides, *problem.dilations), default=1) > 1:
        return "must be direct where strides or dilations are above 1"
    if match is not None:
        tile, taps = int(match[1]), int(match[2])
        if tile < 1 or taps < 2 or tile + taps - 1 > LARGEST_TILE:
            return f"must have tiles of at most {LARGEST_TILE} by {LARGEST_TILE}"
        if taps not in problem.kernel:
            return f"is for {taps} taps, but the kernel has {' x '.join(map(str, problem.kernel))}"
    return None


def fitting(given: Mapping[str, Any], problem: Declaring) -> dict[str, Any]:
    """Return the members of a declaration that mean something for a problem."""
    unfit = {each.member for each in broken(given, problem)}
    return {member: value for member, value in given.items() if value is not None and member not in unfit}


def described(given: Mapping[str, Any]) -> str:
    """Return a declaration as on the command line."""
    return ", ".join(f"{member}={value}" for member, value in given.items())


def parsed(texts: Sequence[str] | None) -> dict[str, Any] | None:
    """Return the declaration in flags such as ``products=tf32``; raises `ValueError` for one without a value."""
    found: dict[str, Any] = {}
    for text in texts or ():
        member, equals, value = (part.strip() for part in text.partition("="))
        if not equals:
            raise ValueError("--arithmetic must be NAME=VALUE, such as products=tf32")
        found[member] = int(value) if member == "segments" and value.isdecimal() else value
    return found or None


class _Simple(NamedTuple):
    op: str
    dtype: str
    kernel: tuple[int, ...]
    strides: tuple[int, ...] = ()
    dilations: tuple[int, ...] = ()


def meaningless(given: Mapping[str, Any], ops: Iterable[str], dtypes: Iterable[str]) -> list[Broken]:
    """Return the members that mean nothing for any of these operations and dtypes, with the rules that they break."""
    taps = tuple(range(1, LARGEST_TILE + 1))
    each = [{rule.member: rule for rule in broken(given, _Simple(op, dtype, taps))} for op in ops for dtype in dtypes]
    return [rule for member, rule in each[0].items() if all(member in rules for rules in each)] if each else []
