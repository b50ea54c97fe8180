"""`options` of a call: how the reply is encoded, which kernel, how long it may take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from convgrad._errors import InvalidParams
from schemas.problems import number

__all__ = ["Options", "parse_options"]

Encoding = Literal["base64", "npy"]

_LONGEST_MS = 86_400_000


@dataclass(frozen=True, slots=True)
class Options:
    """Hold the options of one call after defaults."""

    encoding: Encoding = "base64"
    deadline_ms: int | None = None
    reference: bool = False


def parse_options(given: object) -> Options:
    """Check `options` as a caller wrote them; null means the default.

    Raises `InvalidParams` with every broken rule, an unknown option among them.
    """
    if given is None:
        return Options()
    if not isinstance(given, Mapping):
        raise _invalid([_error([], "options must be an object", "type")])
    errors = [
        _error([name], f"there is no such option; the options are {', '.join(_CHECKS)}", "unknown_option")
        for name in given
        if name not in _CHECKS
    ]
    values = {name: given[name] for name in _CHECKS if given.get(name) is not None}
    errors += [
        _error([name], rule, "value") for name, value in values.items() if (rule := _CHECKS[name](value)) is not None
    ]
    if errors:
        raise _invalid(errors)
    return Options(**values)


def _check_encoding(value: object) -> str | None:
    return None if value in ("base64", "npy") else "encoding must be base64 or npy"


def _check_deadline(value: object) -> str | None:
    rule = f"deadline_ms must be an integer from 1 to {_LONGEST_MS}"
    if type(value) is not int:
        return rule
    return None if 1 <= value <= _LONGEST_MS else f"{rule}, but is {number(value)}"


def _check_reference(value: object) -> str | None:
    return None if isinstance(value, bool) else "reference must be true or false"


_CHECKS = {"encoding": _check_encoding, "deadline_ms": _check_deadline, "reference": _check_reference}


def _error(loc: list[str], message: str, kind: str) -> dict[str, Any]:
    # A name of the caller's own making is cut, so that an error stays small whatever came.
    return {"loc": ["options", *(part[:64] for part in loc)], "msg": message, "type": kind}


def _invalid(errors: list[dict[str, Any]]) -> InvalidParams:
    return InvalidParams(f"options: {errors[0]['msg']}", errors=errors)
