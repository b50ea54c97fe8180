"""Sealed checks: the requests for them, and the cases in the replies."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from convgrad._check.cases import Case
from convgrad._core import HttpRequest
from convgrad._errors import PROBLEM_JSON, NotFound, ProtocolError
from convgrad._events import Array
from convgrad._graphs import tensors_of
from convgrad._inference import json_bytes
from convgrad._multipart import Body, multipart
from convgrad._tensors import Tensor, part

__all__ = ["SELF_TEST", "SealedCase", "case_in", "case_of", "encoded", "next_request", "require_id", "submission"]

SELF_TEST = "(self-test)"
"""The key in the documents of self-tests; no key of a service can have this name."""

_ID = re.compile(r"[0-9a-z]{1,64}")


@dataclass(frozen=True)
class SealedCase:
    """A case of a sealed check: the call whose result is wanted. `number` counts from 0 to `cases` - 1."""

    check: str
    number: int
    cases: int
    op: str
    dtype: str
    attributes: dict[str, Any]
    inputs: dict[str, Array]
    output: str
    output_shape: tuple[int, ...]
    problem: dict[str, Any]
    """The fields of the problem that the attributes are made of: channels, groups, pads, .."""


def encoded(method: str, params: Mapping[str, Any]) -> HttpRequest:
    """Build the request for a method of sealed checks; raises `NotFound` for a malformed id."""
    rest = {name: value for name, value in params.items() if name != "check"}
    match method.removeprefix("check."):
        case "begin":  # sent twice, it would begin two
            return replace(_post("", rest), repeatable=False)
        case "drop":
            return HttpRequest("DELETE", _path(params["check"], ""))
        case "key":
            return HttpRequest("GET", _path(None, "/key"))
        case "verify_signature":
            return _post("/verify-signature", params["document"])
        case name:
            return _post(f"/{name}", rest, params["check"])


def _post(what: str, document: Mapping[str, Any], check: str | None = None) -> HttpRequest:
    text = json_bytes(document)
    return HttpRequest("POST", _path(check, what), body=Body("application/json", len(text), lambda: [text]))


def next_request(check: str, *, seed: bool) -> HttpRequest:
    """Build the request for the next case."""
    request = _post("/next", {"send": "seed" if seed else "tensors"}, check)
    return HttpRequest("POST", request.path, f"multipart/form-data, {PROBLEM_JSON}", request.body)


def submission(check: str, case: int, output: str, result: Tensor) -> HttpRequest:
    """Build the request that submits a result."""
    sent = part(result)
    stated = {output: {"dtype": "bf16"}} if sent.dtype.name == "bf16" else {}
    body = multipart(json_bytes({"case": case, "inputs": stated}), {output: sent})
    return HttpRequest("POST", _path(check, "/submit"), body=body)


def case_of(content_type: str, body: bytes) -> SealedCase | None:
    """Return the case in a reply, None after the last; raises `ProtocolError` for anything else."""
    return case_in(*tensors_of(content_type, body, "inputs"))


def case_in(reply: Mapping[str, Any], inputs: dict[str, Array]) -> SealedCase | None:
    """Return the case that a reply describes, with these inputs unless it has their seed; raises like `case_of`."""
    try:
        if reply["case"] is None:
            return None
        ((output, described),) = reply["outputs"].items()
        if "generate" in reply:
            inputs = Case.from_json(reply["generate"]).inputs()
        names = ("op", "dtype", "attributes", "problem", "check", "cases")
        given = {name: reply[name] for name in names}
        shape = tuple(map(int, described["shape"]))
        return SealedCase(**given, number=int(reply["case"]), inputs=inputs, output=output, output_shape=shape)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ProtocolError("the reply must be a case of a sealed check") from error


def require_id(check: object) -> None:
    """Raise `NotFound` for an id that no check has, unless it is None."""
    if check is not None and not (isinstance(check, str) and _ID.fullmatch(check)):
        raise NotFound("the id of a check must be letters and digits")


def _path(check: str | None, what: str) -> str:
    require_id(check)
    return f"/v1/checks{'' if check is None else f'/{check}'}{what}"
