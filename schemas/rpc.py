"""JSON-RPC 2.0: parse messages and build responses.

Independent of methods, HTTP and error codes, which the API maps. A request without `id` is a notification and gets no
answer. A batch is answered item by item, invalid ones included.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from schemas.broken_rules import BrokenRule, broken_rule, invalid_params, members_rule, safe_key
from schemas.tables import near_miss

__all__ = [
    "Batch",
    "Id",
    "Invalid",
    "Request",
    "bind_params",
    "error_response",
    "id_of",
    "parse_message",
]

Id = str | int | float | None

_MAX_ID = 4096
_MAX_BATCH = 1000


@dataclass(frozen=True, slots=True)
class Request:
    """One request; `params` is None if it has none."""

    method: str
    params: Mapping[str, Any] | Sequence[Any] | None
    id: Id = None
    is_notification: bool = False


@dataclass(frozen=True, slots=True)
class Invalid:
    """An invalid request: the rule that it breaks, and the id to answer with, if it has one."""

    message: str
    id: Id = None


@dataclass(frozen=True, slots=True)
class Batch:
    """The items of a batch in order; there is at least one."""

    items: tuple[Request | Invalid, ...]


def parse_message(payload: object) -> Request | Invalid | Batch:
    """Parse a decoded JSON body.

    An empty batch, or one of too many items, is one `Invalid`, as the specification requires.
    """
    if isinstance(payload, list | tuple):
        if not payload:
            return Invalid("a batch must have at least 1 request, but is empty")
        if len(payload) > _MAX_BATCH:
            return Invalid(f"a batch must have at most {_MAX_BATCH} requests, but has {len(payload)}")
        return Batch(tuple(_parse_request(item) for item in payload))
    return _parse_request(payload)


def _parse_request(item: object) -> Request | Invalid:
    if not isinstance(item, Mapping):
        return Invalid("a request must be an object")
    request_id, is_right = _read_id(item)
    if not is_right:
        return Invalid(f"id must be a string of at most {_MAX_ID} characters, a number or null")
    if item.get("jsonrpc") != "2.0":
        return Invalid('jsonrpc must be "2.0"', request_id)
    method = item.get("method")
    if not isinstance(method, str):
        return Invalid("method must be a string", request_id)
    params = item.get("params")
    if "params" in item and not isinstance(params, Mapping | list | tuple):
        return Invalid("params must be an object or an array", request_id)
    return Request(method, params, request_id, "id" not in item)


def id_of(item: Mapping[Any, Any]) -> Id:
    """Return the id to answer a request with, also if the request is invalid."""
    return _read_id(item)[0]


def _read_id(item: Mapping[Any, Any]) -> tuple[Id, bool]:
    request_id = item.get("id")
    if request_id is None:
        return None, True
    if isinstance(request_id, bool) or not isinstance(request_id, str | int | float):
        return None, False
    if isinstance(request_id, str):
        # The id is sent back unchanged, so it must be possible to encode it.
        return (request_id, True) if len(request_id) <= _MAX_ID and _is_text(request_id) else (None, False)
    return (request_id, True) if isinstance(request_id, int) or math.isfinite(request_id) else (None, False)


def _is_text(value: str) -> bool:
    return not any("\ud800" <= char <= "\udfff" for char in value)


def bind_params(
    params: Mapping[str, Any] | Sequence[Any] | None,
    names: Sequence[str],
    *,
    required: Sequence[str] = (),
    what: str = "params",
) -> dict[str, Any]:
    """Return params by name; positional ones are in the order of `names`.

    Raises `InvalidParams` for a missing, extra or unknown parameter; its message begins with `what` they are.
    """
    broken: list[BrokenRule] = []
    if params is None:
        named: dict[str, Any] = {}
    elif isinstance(params, Mapping):
        too_many = members_rule(params, [what])
        if too_many is not None:
            raise invalid_params(what, [too_many])
        named = {name: params[name] for name in names if name in params}
        broken.extend(_unknown(name, names) for name in params if name not in names)
    else:
        named = dict(zip(names, params, strict=False))
        if len(params) > len(names):
            msg = f"params must have at most {len(names)} values ({', '.join(names)}), but has {len(params)}"
            broken.append(broken_rule(["params"], msg, "too_long"))
    broken.extend(broken_rule([name], f"{name} is required", "missing") for name in required if name not in named)
    if broken:
        raise invalid_params(what, broken)
    return named


def _unknown(name: object, names: Sequence[str]) -> BrokenRule:
    hint = near_miss(name, tuple(names))
    msg = f"there is no such parameter; the parameters are {', '.join(names)}"
    return broken_rule([safe_key(name)], f"{msg}; did you mean {hint}?" if hint else msg, "unknown_parameter")


def error_response(request_id: Id, code: int, message: str, data: Any = None) -> dict[str, Any]:
    """Return the response to a failed or invalid request; `data` is left out if it is None."""
    error = {"code": code, "message": message} | ({} if data is None else {"data": data})
    return {"jsonrpc": "2.0", "error": error, "id": request_id}
