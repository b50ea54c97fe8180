"""Strict JSON: the standard parser without its extensions."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from json import JSONDecoder
from typing import Any

from convgrad._errors import ParseError

__all__ = [
    "BOM",
    "MAX_DEPTH",
    "Partial",
    "PartialList",
    "end_of",
    "members_before",
    "parse_document",
    "partial_document",
    "string_end",
]

BOM = b"\xef\xbb\xbf"

MAX_DEPTH = 64
"""The most levels of nested objects and lists."""

# Bytes before a value that are searched for the members beside it.
_TAIL = 4096

# Levels of objects and lists that are read while they arrive: a JSON-RPC request's are params, inputs and a tensor.
_PARTIAL_DEPTH = 5

_DELIMITERS = (",", "]", "}", " ", "\t", "\r", "\n")
_SPACE = re.compile(r"[ \t\r\n]*")
_KEY = re.compile(r'[ \t\r\n]*("(?:[^"\\]|\\.)*")[ \t\r\n]*:[ \t\r\n]*')
_COMMA = re.compile(r"[ \t\r\n]*,")
_STRING = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def end_of(pattern: re.Pattern[bytes], data: bytes | bytearray, start: int = 0, stop: int = sys.maxsize) -> int:
    """Return where a pattern that matches at least the empty string ends."""
    match = pattern.match(data, start, stop)
    assert match is not None
    return match.end()


def string_end(data: bytes | bytearray, start: int) -> int:
    """Return where the text of a string ends: at its quote, or before an incomplete escape, or with the data."""
    return end_of(_STRING, data, start)


def parse_document(skeleton: bytes, values: Sequence[object] = (), marks: list[tuple[int, int]] | None = None) -> Any:
    """Parse JSON strictly: UTF-8, no NaN, no duplicate names, no lone surrogates, at most `MAX_DEPTH` deep.

    Each `NaN` in the skeleton becomes the next of `values`, which stand for what was taken out of it; `marks` say where
    that was and how many bytes, so that an error can be located in the whole body. Raises `ParseError`.
    """
    left = iter(values)
    try:
        text = skeleton.removeprefix(BOM).decode()
        document = json.loads(
            text,
            object_pairs_hook=_unique,
            parse_float=_finite,
            parse_constant=lambda _: _next_value(left),
        )
        if text.count("[") + text.count("{") > MAX_DEPTH:
            _check_depth(document)
        if _SURROGATE.search(text):
            json.dumps(document, ensure_ascii=False, default=lambda _: None).encode()
    except json.JSONDecodeError as error:
        offset = error.pos + sum(removed for position, removed in marks or () if position < error.pos)
        raise ParseError(f"the body is not JSON: {error.msg} at character {offset}") from None
    except UnicodeEncodeError:
        raise ParseError("a string of the JSON document holds half of a surrogate pair") from None
    except UnicodeDecodeError:
        raise ParseError("the JSON document is not UTF-8") from None
    except RecursionError:
        raise _too_deep() from None
    except ValueError:  # int() has a limit on digits
        raise ParseError("a number of the JSON document has too many digits") from None
    return document


class Partial(dict[str, Any]):
    """The members that have arrived of an object that is still arriving."""

    def complete(self) -> dict[str, Any]:
        """Return those that are complete."""
        return {name: value for name, value in self.items() if not isinstance(value, Partial | PartialList)}


class PartialList(list[Any]):
    """The entries that have arrived of a list that is still arriving."""


def partial_document(skeleton: bytes, values: Sequence[object] = ()) -> Any:
    """Return what has arrived of a document: of an incomplete object or list its first members or entries.

    An incomplete object is a `Partial`, an incomplete list a `PartialList`. `values` are those of `parse_document`,
    followed by the one that is still arriving. None if nothing has arrived; at a fault it stops without an error, which
    the final parse raises.
    """
    left = iter(values)
    decoder = JSONDecoder(object_pairs_hook=_unique, parse_float=_finite, parse_constant=lambda _: next(left, None))
    try:
        text = skeleton.removeprefix(BOM).decode()
    except UnicodeDecodeError:
        return None
    if _SURROGATE.search(text):  # the final parse finds out whether it is half of a pair
        return None
    return _partial(text, 0, decoder, left, _PARTIAL_DEPTH)[0]


def _partial(text: str, start: int, decoder: JSONDecoder, left: Iterator[object], depth: int) -> tuple[Any, int | None]:
    """Return a value and where it ends, which is None if it is not complete; (None, None) if nothing is known of it."""
    position = _SPACE.match(text, start).end()  # type: ignore[union-attr] # matches the empty string
    opening = text[position : position + 1]
    if opening not in ("{", "[") or not depth:
        return _plain(text, position, decoder, left)
    value_so_far: Any = Partial() if opening == "{" else PartialList()
    closing, position = "}" if opening == "{" else "]", position + 1
    while True:
        key = None
        if (end := _closes(text, position, closing)) is not None:
            return (dict(value_so_far) if opening == "{" else list(value_so_far)), end
        if opening == "{":
            if (key := _KEY.match(text, position)) is None:
                return value_so_far, None
            position = key.end()
        value, end = _partial(text, position, decoder, left, depth - 1)
        if end is not None or value is not None:
            if key is None:
                value_so_far.append(value)
            elif (name := _name(key[1])) is not None and name not in value_so_far:
                value_so_far[name] = value
            else:
                return value_so_far, None
        comma = None if end is None else _COMMA.match(text, end)
        if comma is not None:
            position = comma.end()
        elif end is None or _closes(text, end, closing) is None:
            return value_so_far, None
        else:
            position = end


def _closes(text: str, start: int, closing: str) -> int | None:
    end = _SPACE.match(text, start).end()  # type: ignore[union-attr] # matches the empty string
    return end + 1 if text[end : end + 1] == closing else None


def _plain(text: str, start: int, decoder: JSONDecoder, left: Iterator[object]) -> tuple[Any, int | None]:
    if start == len(text):  # where the value that is still arriving was taken out
        return next(left, None), None
    try:
        value, end = decoder.raw_decode(text, start)
    except (ValueError, RecursionError, ParseError):
        return None, None
    # A number may go on.
    over = isinstance(value, str | list | dict) or text[end : end + 1] in _DELIMITERS
    return (value, end) if over else (None, None)


def _name(text: str) -> str | None:
    try:
        name = json.loads(text)
    except ValueError:
        return None
    return name if isinstance(name, str) else None


def members_before(skeleton: bytes | bytearray) -> dict[str, Any]:
    """Return the members beside a value that is still arriving: those before it in the innermost open object.

    `skeleton` ends with the name of the value and its colon. Empty if one of the members is an object, or is invalid.
    """
    tail = bytes(skeleton[-_TAIL:])
    head = tail[max(tail.rfind(b"{"), 0) :].rpartition(b'"')[0].rpartition(b'"')[0]
    try:
        members = json.loads(head.rstrip(b" \t\r\n").removesuffix(b",") + b"}")
    except (ValueError, RecursionError):
        return {}
    return members if isinstance(members, dict) else {}


def _next_value(values: Iterator[object]) -> object:
    value = next(values, None)
    if value is None:
        raise ParseError("NaN and Infinity are not JSON")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ParseError("an object of the JSON document has the same name twice")
    return members


def _finite(text: str) -> float:
    number = float(text)
    if number in (float("inf"), float("-inf")):
        raise ParseError("a number of the JSON document is out of range")
    return number


def _check_depth(document: Any) -> None:
    level = [document] if isinstance(document, dict | list) else []
    depth = 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise _too_deep()
        level = [
            child
            for node in level
            for child in (node.values() if type(node) is dict else node)
            if type(child) in (dict, list)
        ]


def _too_deep() -> ParseError:
    return ParseError(f"the JSON document is nested more than {MAX_DEPTH} deep")
