"""The client without the network: from calls to requests, and from replies to values and errors."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from convgrad import _frames
from convgrad._assembly import Assembly
from convgrad._errors import (
    PROBLEM_JSON,
    CallerError,
    ConnectFailed,
    ConvgradError,
    DeadlineExceeded,
    Forbidden,
    InvalidParams,
    InvalidRequest,
    MethodNotAllowed,
    NotAcceptable,
    NotFound,
    Overloaded,
    ProtocolError,
    RateLimited,
    ServiceError,
    TimedOut,
    TooLarge,
    Unauthorised,
    UnknownOperation,
    Unsupported,
    UnsupportedMediaType,
    error_from_code,
)
from convgrad._events import Health
from convgrad._graphs import Dump, GraphInputs, dump_of, graph_body
from convgrad._inference import BINARY, HEAD_LENGTH, inference, json_bytes
from convgrad._messages import MEDIA_TYPE, Messages
from convgrad._multipart import Body, multipart
from convgrad._requests import Inputs, OnUpload
from convgrad._tensors import Bytes, Part, part
from convgrad._whole import Whole

__all__ = [
    "Algorithm",
    "Decoder",
    "HttpRequest",
    "call",
    "decoder_of",
    "description",
    "error_of",
    "graph_run",
    "graph_validation",
    "health_of",
    "is_list",
    "json_of",
    "multipart_call",
    "not_ready",
    "object_of",
    "objects_of",
    "operations",
    "options",
    "output_of",
    "readiness",
    "tensor",
    "validation",
    "verification",
    "with_upload_progress",
]

Algorithm = Literal["direct", "winograd", "auto"]
"""How a convolution is summed: directly, by Winograd's transforms, or by the faster of the two."""

Decoder = Assembly | Messages | Whole
"""Decodes a reply while it arrives; `close` returns the result."""

# Errors by status, for replies that are not problem+json, such as a proxy's.
_BY_STATUS: dict[int, type[ConvgradError]] = {
    400: InvalidRequest,
    401: Unauthorised,
    403: Forbidden,
    404: NotFound,
    405: MethodNotAllowed,
    406: NotAcceptable,
    413: TooLarge,
    415: UnsupportedMediaType,
    422: InvalidParams,
    429: RateLimited,
    502: ConnectFailed,
    503: Overloaded,
    504: DeadlineExceeded,
}
# Largest call, in bytes of tensors, whose reply is not streamed.
_SMALL = 8 << 20
# Suffix of the inputs that are lists of integers.
_SHAPE = "_shape"
_OP = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
# Members of a problem object that are not part of an error's `data`.
_PROBLEM_OWN = frozenset({"type", "title", "status", "detail", "code"})


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """An HTTP request, independent of the HTTP library."""

    method: str
    path: str
    accept: str = "application/json"
    body: Body | None = None
    repeatable: bool = True
    """Whether the service may get it twice: it is sent again when the connection breaks before the reply."""


def call(
    op: str,
    inputs: Inputs,
    attributes: Mapping[str, Any] | None = None,
    *,
    options: Mapping[str, Any],
    whole: bool = False,
) -> HttpRequest:
    """Build the request that computes `op`: for the binary API, or as multipart if that can't represent the call.

    The reply is a stream of frames, which shows that the service is alive. With `whole` a small call requests only the
    bytes of its outputs, which is faster.
    """
    tensors = _parts(inputs, f64=_takes_f64(options))
    lists = {name: value for name, value in inputs.items() if is_list(name, value)}
    whole = whole and sum(part.nbytes for part in tensors.values()) <= _SMALL
    body = inference(tensors, lists, attributes or {}, options, whole=whole)
    if body is None:
        return multipart_call(op, inputs, attributes, options=options)
    accept = BINARY if whole else _frames.MEDIA_TYPE
    return HttpRequest("POST", f"/v2/models/{_name(op)}/infer", f"{accept}, {PROBLEM_JSON}", body)


def with_upload_progress(request: HttpRequest, on_upload: OnUpload | None) -> HttpRequest:
    """Return the request with a body that reports how much of it was sent."""
    body = request.body
    if on_upload is None or body is None:
        return request

    def pieces() -> Iterator[Bytes]:
        sent = 0
        for piece in body.pieces():
            on_upload(sent, body.length)
            yield piece
            sent += len(piece)
        on_upload(sent, body.length)

    return replace(request, body=replace(body, pieces=pieces))


def _takes_f64(options: Mapping[str, Any]) -> bool:
    return options.get("reference") is True or options.get("reproducible") is True


def _parts(inputs: Inputs, *, f64: bool) -> dict[str, Part]:
    return {name: tensor(name, value, f64=f64) for name, value in inputs.items() if not is_list(name, value)}


def tensor(name: str, value: Any, *, f64: bool) -> Part:
    """Return a tensor among the inputs; `f64` allows that dtype. Errors name the input and the remedy."""
    try:
        found = part(value)
    except Unsupported as error:
        raise Unsupported(f"{name}: {error.message}", data=error.data) from error
    dtype = found.dtype
    integers = dtype.numpy.kind == "i" and not name.endswith(_SHAPE)
    if integers or (dtype.name == "f64" and not f64):
        why = "is not computed" if integers else "is computed only with reference=True, slowly"
        remedy = "convert it, for example with .astype(numpy.float32)"
        raise Unsupported(f"{name}: {dtype.numpy} {why}: {remedy}")
    return found


def multipart_call(
    op: str,
    inputs: Inputs,
    attributes: Mapping[str, Any] | None = None,
    *,
    options: Mapping[str, Any],
    verified: bool = False,
) -> HttpRequest:
    """Build the multipart request that computes `op`, with lists in its JSON and a part for each tensor.

    A result that is to be `verified` is among the inputs.
    """
    tensors = _parts(inputs, f64=verified or _takes_f64(options))
    stated: dict[str, Any] = {name: value for name, value in inputs.items() if is_list(name, value)}
    # A .npy file can't name bfloat16, so the request does.
    stated |= {name: {"dtype": "bf16"} for name, sent in tensors.items() if sent.dtype.name == "bf16"}
    document = {"attributes": attributes or {}, "inputs": stated, "options": options}
    return HttpRequest("POST", _op_path(op), _frames.MEDIA_TYPE, multipart(json_bytes(document), tensors))


def verification(
    op: str,
    inputs: Inputs,
    attributes: Mapping[str, Any] | None = None,
    *,
    options: Mapping[str, Any],
    page: Literal["verify", "tolerance"] = "verify",
) -> HttpRequest:
    """Build a multipart request for a verification, whose inputs include the result, or for a tolerance."""
    computed = multipart_call(op, inputs, attributes, options=options, verified=True)
    return replace(computed, path=f"{_op_path(op)}/{page}", accept=f"{MEDIA_TYPE}, {PROBLEM_JSON}")


def validation(
    op: str,
    inputs: Inputs,
    attributes: Mapping[str, Any] | None = None,
    *,
    options: Mapping[str, Any],
) -> HttpRequest:
    """Build the request that checks `op` by the dtypes and shapes of its tensors."""
    stated = {
        name: value if is_list(name, value) or isinstance(value, Mapping) else part(value).describe()
        for name, value in inputs.items()
    }
    text = json_bytes({"attributes": attributes or {}, "inputs": stated, **({"options": options} if options else {})})
    body = Body("application/json", len(text), lambda: [text])
    return HttpRequest("POST", _op_path(op) + "/validate", body=body)


def graph_run(
    graph: Dump, inputs: GraphInputs, outputs: Sequence[int] | None, options: Mapping[str, Any]
) -> HttpRequest:
    """Build the request that computes a dumped graph."""
    body = graph_body(graph, inputs, outputs, options)
    return HttpRequest("POST", "/v1/graphs", f"multipart/form-data, {PROBLEM_JSON}", body)


def graph_validation(graph: Dump, options: Mapping[str, Any]) -> HttpRequest:
    """Build the request that checks a dumped graph."""
    text = json_bytes({"graph": dump_of(graph), **({"options": options} if options else {})})
    return HttpRequest("POST", "/v1/graphs/validate", body=Body("application/json", len(text), lambda: [text]))


def operations() -> HttpRequest:
    """Build the request for the list of operations."""
    return HttpRequest("GET", "/v1/ops")


def description(op: str) -> HttpRequest:
    """Build the request for the table of `op`."""
    return HttpRequest("GET", _op_path(op))


def readiness() -> HttpRequest:
    """Build the request for the readiness of the service."""
    return HttpRequest("GET", "/readyz")


def json_of(content: bytes) -> Any:
    """Parse a JSON reply; raises `ProtocolError` when it is not JSON."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ProtocolError("the reply must be JSON") from error


def object_of(value: Any) -> dict[str, Any]:
    """Return a reply that must be a JSON object; raises `ProtocolError` when it is not."""
    if not isinstance(value, dict):
        raise ProtocolError("the reply must be a JSON object")
    return value


def objects_of(value: Any) -> list[dict[str, Any]]:
    """Return the objects of a list; raises `ProtocolError` when it is none."""
    if not isinstance(value, list):
        raise ProtocolError("the reply must be a JSON list")
    return [object_of(entry) for entry in value]


def output_of(op: str, listed: Sequence[Mapping[str, Any]]) -> str:
    """Return the name of the output of `op`, given the list of operations; raises `UnknownOperation`."""
    try:
        for entry in listed:
            if op in (entry.get("op"), *entry.get("aliases", ())):
                return str(entry["outputs"][0])
    except (LookupError, TypeError) as error:
        raise ProtocolError("the reply must list operations with their aliases and outputs") from error
    raise UnknownOperation("the service has no such operation")


def health_of(reply: Any) -> Health:
    """Return the health that a reply, or an error of the service, reports."""
    if isinstance(reply, ConvgradError):
        return Health(False, reply.data if "status" in reply.data else {"status": reply.message, **reply.data})
    return Health(True, object_of(reply))


def not_ready(waited: float, seen: Health | None) -> TimedOut:
    """Build the error for a service that did not become ready, with the last state it reported."""
    detail = {} if seen is None else seen.detail
    last = ": ".join(str(detail[name]) for name in ("status", "cause") if detail.get(name))
    return TimedOut(f"the service was not ready within {waited:g} s{last and f'; its last state was {last}'}")


def decoder_of(headers: Mapping[str, str], request: HttpRequest) -> Decoder:
    """Return the decoder for the reply to a call or a verification; raises `ProtocolError` for other content types."""
    content_type = headers.get("content-type", "")
    if request.accept.startswith(MEDIA_TYPE):
        return Messages(content_type)
    kind = content_type.partition(";")[0].strip()
    if kind == _frames.MEDIA_TYPE:
        return Assembly()
    length = headers.get(HEAD_LENGTH, "")
    if kind == BINARY and _is_length(length):
        return Whole(int(length))
    raise ProtocolError(f"the reply must be {_frames.MEDIA_TYPE} or {BINARY}: is this a convgrad service?")


def error_of(status: int, headers: Mapping[str, str], content: bytes) -> ConvgradError:
    """Build the error for a reply with a status of 400 or more."""
    problem = _problem(content)
    code = problem.get("code")
    own = _PROBLEM_OWN if isinstance(code, str) else frozenset[str]()
    data = {key: value for key, value in problem.items() if key not in own}
    # The header has whole seconds; the problem object is more precise.
    if "retry_after" not in data and (seconds := _seconds(headers.get("retry-after"))) is not None:
        data["retry_after"] = seconds
    message = str(problem.get("detail") or problem.get("title") or f"the service replied with status {status}")
    if isinstance(code, str):
        return error_from_code(code, message, data=data)
    return _class_of(status)(message, data=data)


def options(
    reference: bool,
    deadline: float | None,
    outputs: Sequence[str] | None = None,
    *,
    reproducible: bool = False,
    algorithm: Algorithm = "direct",
    explain: bool = False,
    fast: bool | None = None,
    arithmetic: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the options of a call that differ from their defaults; an infinite deadline means none.

    Raises `InvalidParams` when `deadline` is not a positive number.
    """
    options: dict[str, Any] = {"reference": True} if reference else {}
    if reproducible:
        options["reproducible"] = True
    if algorithm != "direct":
        options["algorithm"] = algorithm
    if explain:
        options["explain"] = True
    if fast is not None:
        options["fast"] = fast
    if arithmetic is not None:
        options["arithmetic"] = dict(arithmetic)
    if outputs is not None:
        options["outputs"] = list(outputs)
    milliseconds = math.inf if deadline is None else deadline * 1000
    if math.isnan(milliseconds) or milliseconds <= 0:
        rule = f"deadline must be a number of seconds above 0, or infinity, but is {deadline}"
        raise InvalidParams(rule, errors=[{"loc": ["options", "deadline_ms"], "msg": rule, "type": "value"}])
    if milliseconds < math.inf:
        options["deadline_ms"] = math.ceil(max(1, milliseconds))
    return options


def _is_length(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 10


def is_list(name: str, value: object) -> bool:
    """Return whether an input is a shape, given as a list or as an array of integers; others are tensors."""
    if not name.endswith(_SHAPE):
        return False
    if isinstance(value, np.ndarray):
        return value.ndim == 1 and value.dtype.kind == "i"
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _op_path(op: str) -> str:
    return f"/v1/ops/{_name(op)}"


def _name(op: str) -> str:
    if not isinstance(op, str) or not _OP.fullmatch(op):
        # Servers and proxies may decode it to another path, even if it is quoted.
        raise UnknownOperation("an operation's name must be letters, digits, hyphens, dots and underscores")
    return op


def _problem(content: bytes) -> dict[str, Any]:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _seconds(value: str | None) -> float | None:
    """Parse Retry-After given in seconds; a date is ignored, because clocks differ."""
    try:
        seconds = float(value or "")
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) and seconds >= 0 else None


def _class_of(status: int) -> type[ConvgradError]:
    return _BY_STATUS.get(status, CallerError if status < 500 else ServiceError)
