"""Sealed checks: the requests for them, and the cases in the replies."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from convgrad._check.cases import Case
from convgrad._core import Request
from convgrad._errors import PROBLEM_JSON, NotFound, ProtocolError
from convgrad._events import Array
from convgrad._graphs import tensors_of
from convgrad._inference import json_bytes
from convgrad._multipart import Body, multipart
from convgrad._tensors import Tensor, part

__all__ = ["SealedCase", "beginning", "case_of", "deletion", "next_request", "post", "submission"]

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


def post(what: str, document: Mapping[str, Any], check: str | None = None) -> Request:
    """Build a request about a check, or one without a check; raises `NotFound` for a malformed id."""
    text = json_bytes(document)
    return Request("POST", _path(check, what), body=Body("application/json", len(text), lambda: [text]))


def beginning(document: Mapping[str, Any]) -> Request:
    """Build the request that begins a check. Sent twice, it would begin two."""
    return replace(post("", document), repeatable=False)


def deletion(check: str) -> Request:
    """Build the request that deletes a check."""
    return Request("DELETE", _path(check, ""))


def next_request(check: str, *, seed: bool) -> Request:
    """Build the request for the next case."""
    request = post("/next", {"send": "seed" if seed else "tensors"}, check)
    return Request("POST", request.path, f"multipart/form-data, {PROBLEM_JSON}", request.body)


def submission(case: SealedCase, result: Tensor) -> Request:
    """Build the request that submits a result."""
    sent = part(result)
    stated = {case.output: {"dtype": "bf16"}} if sent.dtype.name == "bf16" else {}
    body = multipart(json_bytes({"case": case.number, "inputs": stated}), {case.output: sent})
    return Request("POST", _path(case.check, "/submit"), body=body)


def case_of(content_type: str, body: bytes) -> SealedCase | None:
    """Return the case in a reply, None after the last; raises `ProtocolError` for anything else."""
    reply, inputs = tensors_of(content_type, body, "inputs")
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


def _path(check: str | None, what: str) -> str:
    if check is not None and not (isinstance(check, str) and _ID.fullmatch(check)):
        raise NotFound("the id of a check must be letters and digits")
    return f"/v1/checks{'' if check is None else f'/{check}'}{what}"
