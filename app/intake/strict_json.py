"""Strict JSON: the standard parser without its extensions."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from convgrad._errors import ParseError

__all__ = ["BOM", "MAX_DEPTH", "leading_members", "members_before", "parse_document"]

BOM = b"\xef\xbb\xbf"

MAX_DEPTH = 64
"""The most levels of nested objects and lists."""

# Bytes before a value that are searched for the members beside it.
_TAIL = 4096

_START = re.compile(r"[ \t\r\n]*\{")
_KEY = re.compile(r'[ \t\r\n]*("(?:[^"\\]|\\.)*")[ \t\r\n]*:[ \t\r\n]*')
_COMMA = re.compile(r"[ \t\r\n]*,")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


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


def leading_members(skeleton: bytes) -> dict[str, Any]:
    """Return the complete members at the start of an object that is still arriving.

    Stops at a fault without raising: parsing the whole document reports it.
    """
    found: dict[str, Any] = {}
    try:
        text = skeleton.removeprefix(BOM).decode()
        begin = _START.match(text)
        at = -1 if begin is None else begin.end()
        while at >= 0 and (key := _KEY.match(text, at)) is not None:
            value, end = _DECODER.raw_decode(text, key.end())
            comma = _COMMA.match(text, end)
            if comma is None:
                break
            found[json.loads(key[1])] = value
            at = comma.end()
    except (ValueError, RecursionError, ParseError):
        pass
    return found


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
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ParseError("an object of the JSON document has the same name twice")
    return found


def _finite(text: str) -> float:
    number = float(text)
    if number in (float("inf"), float("-inf")):
        raise ParseError("a number of the JSON document is out of range")
    return number


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_float=_finite)


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
