"""The `/v1` API: JSON or multipart in; JSON, multipart, `.npy`, events or tensor frames out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from fastapi import APIRouter, Request

from app.api.answer import Decode, answer, decode, decode_optional
from app.api.documents import OPERATION_LIST, description_of
from app.api.jobs import send_accepted, send_stored, submission
from app.api.routing import service_of
from app.calls.jobs.tasks import job_task
from app.calls.sealed.tasks import check_task
from app.calls.service import Service
from app.calls.tasks import Compute, RunGraph, Task, Tolerance, Validate, ValidateGraph, Verify
from app.calls.uploads import KeepTensor, drop_tensor, send_tensor
from app.http.exchange import exchange_of
from app.replies.formats import EVENTS, FORMATS, JSON, MULTIPART, NPY, Format, choose
from app.telemetry.context import RequestContext
from schemas.tables import CalledOperation, find_operation

__all__ = ["router"]

router = APIRouter(prefix="/v1")


@router.get("/ops")
async def list_all(request: Request) -> None:
    """List the operations with their aliases."""
    await OPERATION_LIST.reply(request)


@router.get("/ops/{op}")
async def describe_one(request: Request, op: str) -> None:
    """Describe one operation: attributes, inputs, outputs and layouts, as data."""
    await description_of(find_operation(op).called_as).reply(request)


def _add_page(
    path: str, make: Callable[..., Task], *formats: Format, decode: Decode = decode, method: str = "POST"
) -> None:
    """Add a page whose task `make` creates, of the service, the context and the parameters of the path."""
    by_type = {each.media_type: each for each in formats}
    types = tuple(by_type)

    async def page(request: Request, **parameters: str) -> None:
        exchange = exchange_of(request.scope)
        task = make(service_of(request), exchange.context, **parameters)
        if (submitted := submission(exchange, task)) is not None:
            await answer(exchange, submitted, decode, send_accepted)
            return
        chosen = by_type[choose(exchange.headers.get("accept", ""), types)]
        task.check_options = chosen.check
        await answer(exchange, task, decode, chosen.send)

    router.add_api_route(path, page, methods=[method])


def _operation(task: Callable[[Service, RequestContext, CalledOperation], Task]) -> Callable[..., Task]:
    return lambda service, context, op: task(service, context, find_operation(op))


def _check(method: str) -> Callable[..., Task]:
    """Return what makes the task of a check, whose id, if it is in the path, is added to the body."""

    def make(service: Service, context: RequestContext, **path: str) -> Task:
        return check_task(
            service, context, method, lambda body: {**body, **path} if isinstance(body, Mapping) else body
        )

    return make


@router.get("/jobs/{job}/result")
async def result_of_job(request: Request, job: str) -> None:
    """Send the result of a job, in any format of its call."""
    exchange = exchange_of(request.scope)
    encode = partial(send_stored, exchange.headers.get("accept", ""))
    task = job_task(service_of(request), exchange.context, "result", job)
    await answer(exchange, task, decode_optional, encode)


def _verify_signature(service: Service, context: RequestContext) -> Task:
    return check_task(service, context, "check.verify_signature", lambda body: {"document": body})


_add_page("/tensors", KeepTensor, JSON)
_add_page("/tensors/{handle}", send_tensor, NPY, JSON, decode=decode_optional, method="GET")
_add_page("/tensors/{handle}", drop_tensor, JSON, decode=decode_optional, method="DELETE")
_add_page("/ops/{op}", _operation(Compute), *FORMATS)
_add_page("/ops/{op}/validate", _operation(Validate), JSON)
_add_page("/ops/{op}/verify", _operation(Verify), JSON, EVENTS)
_add_page("/ops/{op}/tolerance", _operation(Tolerance), JSON, MULTIPART, EVENTS)
_add_page("/graphs", RunGraph, JSON, MULTIPART, EVENTS)
_add_page("/graphs/validate", ValidateGraph, JSON)
_add_page("/jobs", partial(job_task, what="list"), JSON, decode=decode_optional, method="GET")
_add_page("/jobs/{job}", partial(job_task, what="get"), JSON, decode=decode_optional, method="GET")
_add_page("/jobs/{job}", partial(job_task, what="cancel"), JSON, decode=decode_optional, method="DELETE")
_add_page("/checks", _check("check.begin"), JSON, decode=decode_optional)
_add_page("/checks/key", _check("check.key"), JSON, decode=decode_optional, method="GET")
_add_page("/checks/verify-signature", _verify_signature, JSON)
_add_page("/checks/{check}/next", _check("check.next"), JSON, MULTIPART, decode=decode_optional)
_add_page("/checks/{check}/submit", _check("check.submit"), JSON, EVENTS)
_add_page("/checks/{check}/finish", _check("check.finish"), JSON, decode=decode_optional)
_add_page("/checks/{check}", _check("check.drop"), JSON, decode=decode_optional, method="DELETE")
