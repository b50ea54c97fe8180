"""The `/v1` API: JSON or multipart in; JSON, multipart, `.npy`, events or tensor frames out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fastapi import APIRouter, Request

from app.api.answer import REQUEST_TYPES, Decode, Encode, answer, decode, decode_optional
from app.api.routing import service_of
from app.calls.sealed_tasks import CheckTask, Submit
from app.calls.tasks import Compute, RunGraph, Task, Validate, ValidateGraph, Verify
from app.http.exchange import exchange_of
from app.replies import frames, multipart, npy, sse
from app.replies.accept import choose
from app.replies.result import send_result
from schemas.describe import describe, list_operations
from schemas.tables import find_operation

__all__ = ["REPLY_TYPES", "REQUEST_TYPES", "router"]

router = APIRouter(prefix="/v1")

JSON = "application/json"


_ENCODERS: dict[str, Encode] = {
    JSON: send_result,
    npy.MEDIA_TYPE: npy.send_npy,
    sse.MEDIA_TYPE: sse.send_events,
    frames.MEDIA_TYPE: frames.send_frames,
    multipart.MEDIA_TYPE: multipart.send_multipart,
}
REPLY_TYPES = tuple(_ENCODERS)


async def _answer(request: Request, task: Task, *reply_types: str, decode: Decode = decode) -> None:
    exchange = exchange_of(request.scope)
    chosen = choose(exchange.headers.get("accept"), reply_types)
    await answer(exchange, task, decode, _ENCODERS[chosen])


@router.get("/ops")
async def list_all(_: Request) -> Any:
    """List the operations with their aliases."""
    return list_operations()


@router.get("/ops/{op}")
async def describe_one(_: Request, op: str) -> Any:
    """Describe one operation: attributes, inputs, outputs and layouts, as data."""
    return describe(op)


@router.post("/ops/{op}")
async def compute(request: Request, op: str) -> None:
    """Compute an operation, under any of its names."""
    exchange = exchange_of(request.scope)
    chosen = choose(exchange.headers.get("accept"), REPLY_TYPES)
    check = npy.check_outputs if chosen == npy.MEDIA_TYPE else lambda _: None
    await answer(exchange, Compute(service_of(request), find_operation(op), check), decode, _ENCODERS[chosen])


@router.post("/ops/{op}/validate")
async def validate(request: Request, op: str) -> None:
    """Check a call without computing it: returns resolved attributes, output shapes, plan and cost.

    A tensor may be just its dtype and shape.
    """
    await _answer(request, Validate(service_of(request), find_operation(op)), JSON)


@router.post("/ops/{op}/verify")
async def verify(request: Request, op: str) -> None:
    """Compare a result with the float64 reference: the result is one more input, named like the output.

    The reply is a report, with status 200 also for a result that fails.
    """
    await _answer(request, Verify(service_of(request), find_operation(op)), JSON, sse.MEDIA_TYPE)


@router.post("/graphs")
async def run_graph(request: Request) -> None:
    """Compute the nodes of a graph in order; results stay in shared memory until they are sent."""
    await _answer(request, RunGraph(service_of(request)), JSON, multipart.MEDIA_TYPE, sse.MEDIA_TYPE)


@router.post("/graphs/validate")
async def validate_graph(request: Request) -> None:
    """Check a graph without computing it: returns its inputs and outputs, and each node's attributes and cost.

    An invalid graph gets everything that is wrong with it at once.
    """
    await _answer(request, ValidateGraph(service_of(request)), JSON)


async def _answer_check(request: Request, method: str, check: str | None, *reply_types: str) -> None:
    task = CheckTask(service_of(request), method, _of(check) if check else lambda body: body)
    await _answer(request, task, *(reply_types or (JSON,)), decode=decode_optional)


def _of(check: str) -> Callable[[Any], Any]:
    """Add the check, which is in the path, to the body of a request."""
    return lambda body: {**body, "check": check} if isinstance(body, Mapping) else body


@router.post("/checks")
async def begin_check(request: Request) -> None:
    """Begin a sealed check of a kernel that takes the operations, dtypes and attributes in `takes`."""
    await _answer_check(request, "check.begin", None)


@router.post("/checks/verify-signature")
async def verify_signature(request: Request) -> None:
    """Say whether this service signed the document of a check, which is the body."""
    task = CheckTask(service_of(request), "check.verify_signature", lambda body: {"document": body})
    await _answer(request, task, JSON)


@router.post("/checks/{check}/next")
async def next_case(request: Request, check: str) -> None:
    """Return the next case: operation, attributes and inputs; the same one again until it is answered or late."""
    await _answer_check(request, "check.next", check, JSON, multipart.MEDIA_TYPE)


@router.post("/checks/{check}/submit")
async def submit_result(request: Request, check: str) -> None:
    """Judge the kernel's result of a case, the one input; the reply is a report, also on a result that fails."""
    await _answer(request, Submit(service_of(request), _of(check)), JSON, sse.MEDIA_TYPE)


@router.post("/checks/{check}/finish")
async def finish_check(request: Request, check: str) -> None:
    """End a check; return the signed document with the outcome of each case."""
    await _answer_check(request, "check.finish", check)


@router.delete("/checks/{check}")
async def drop_check(request: Request, check: str) -> None:
    """Forget a check."""
    await _answer_check(request, "check.drop", check)
