"""The tasks of jobs: submit one, ask for its state or its result, cancel it, list one's own."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
from collections.abc import Mapping
from typing import Any

from app.calls.jobs.jobs import Jobs
from app.calls.jobs.spool import Job, NewJob
from app.calls.jobs.stored import Stored, read_result, request_body
from app.calls.service import Service
from app.calls.tasks import Ask, Compute, RunGraph, Task, Tolerance, Verify
from app.calls.work import Answered, Result, Work
from app.intake.lease import Lease
from app.intake.requests import RequestObject
from app.telemetry.context import ANYONE, RequestContext
from convgrad._errors import InvalidRequest, NotFound, SpoolFull, error_from_code
from engine.graphs import PreparedGraph, result_bytes
from engine.planning import Prepared
from schemas.tables import find_operation

__all__ = ["Submit", "is_job", "job_task", "task_of"]

_log = logging.getLogger("convgrad.job")

_KINDS: dict[str, type[Task]] = {"compute": Compute, "verify": Verify, "tolerance": Tolerance, "graph": RunGraph}
_IDEMPOTENCY_KEY = re.compile(r"[!-~]{1,255}")


def is_job(task: Task) -> bool:
    """Return whether a task may be a job: validations and sealed checks are answered at once."""
    return type(task) in _KINDS.values()


def task_of(job: Job, service: Service, context: RequestContext) -> Task:
    """Return the task of a job."""
    operation = (find_operation(job.op),) if job.op else ()
    return _KINDS[job.kind](service, context, *operation)


def _owner(context: RequestContext) -> str:
    return f"address {context.address}" if context.key == ANYONE else f"key {context.key}"


def _jobs_of(service: Service) -> Jobs:
    if service.jobs is None:
        raise NotFound("this service has no jobs: CONVGRAD_SPOOL names a folder for them", data={"reason": "no_spool"})
    return service.jobs


class Submit(Task):
    """Check a request as `task` does, and keep it as a job."""

    limited = False

    def __init__(self, task: Task, idempotency_key: Any = None) -> None:
        """Raise `InvalidRequest` for a malformed idempotency key, and `NotFound` if the service has no jobs."""
        super().__init__(task.service, task.context)
        self._task = task
        self._jobs = _jobs_of(task.service)
        self._idempotency_key = key = idempotency_key
        if key is not None and not (isinstance(key, str) and _IDEMPOTENCY_KEY.fullmatch(key)):
            raise InvalidRequest("an idempotency key must have 1 to 255 printable characters of ASCII, and no space")

    async def read(self, document: Any) -> RequestObject:
        """Read the request object."""
        return await self._task.read(document)

    async def prepare(self, request: RequestObject) -> Any:
        """Check and plan the request."""
        return await self._task.prepare(request)

    async def work(self, request: RequestObject, lease: Lease) -> Work:
        """Return the state of the new job, or of the one with its idempotency key.

        Raises what the call would raise before it is queued, `SpoolFull`, and `InvalidParams` if the idempotency key
        was used for another request.
        """
        prepared, tensors = await self._task.arrived(request, lease)
        context, task = self.context, self._task
        kind = next(name for name, each in _KINDS.items() if each is type(task))
        op = task.called.called_as if isinstance(task, Compute) else ""
        digest, body = await asyncio.to_thread(request_body, kind, op, request, tensors)
        new = NewJob(
            os.urandom(16).hex(), _owner(context), context.key, context.address, context.request_id, kind, op,
            body.content_type, digest, self._idempotency_key, body.length + _result_bytes(prepared),
        )  # fmt: skip
        job = await self._jobs.add(new, body.pieces())
        if job.id == new.id:
            facts = {"job": job.id, "kind": kind, "op": op, "key": context.key, "request_id": context.request_id}
            _log.info("job queued", extra={"facts": facts})
        return Answered(context, Result((await self._jobs.describe(job))[0]))


def _result_bytes(prepared: Prepared | PreparedGraph) -> int:
    if isinstance(prepared, PreparedGraph):
        return sum(result_bytes(prepared.graph.tensors[number], prepared.layout) for number in prepared.wanted)
    return sum(each.nbytes for each in prepared.computations)


def job_task(service: Service, context: RequestContext, what: str, job: object = None) -> Task:
    """Return the task of `get`, `result`, `cancel` or `list`; the job is that of the path, or else of the params.

    It raises `NotFound` for an unknown job, and that of another key.
    """
    jobs, owner = _jobs_of(service), _owner(context)

    async def answer(given: Mapping[str, Any], lease: Lease) -> Work:
        name = str(given.get("job") if job is None else job)
        if what == "list":
            found = await jobs.describe(*await jobs.call(jobs.spool.of, owner))
            return Answered(context, Result({"jobs": found}))
        if what == "cancel":
            asked = await jobs.cancel(name, owner)
            _log.info("job deleted", extra={"facts": {"job": asked.id, "state": asked.state, "key": context.key}})
        else:
            asked = await jobs.call(jobs.spool.find, name, owner)
        if what == "result":
            return await _stored(jobs, asked, context, lease)
        return Answered(context, Result((await jobs.describe(asked))[0]))

    return Ask(service, context, answer)


async def _stored(jobs: Jobs, job: Job, context: RequestContext, lease: Lease) -> Work:
    """Return the stored work; raises the error of a job that failed, and `NotFound` while there is no result."""
    if job.error is not None:
        found = json.loads(job.error)
        if found["data"].get("reason") == "spool_disk":
            raise SpoolFull(found["message"], data=found["data"])
        raise error_from_code(found["code"], found["message"], data=found["data"])
    if job.state != "done":
        message = f"the job has no result: it is {job.state}"
        raise NotFound(message, data={"reason": "no_result", "state": job.state})
    with await asyncio.to_thread(read_result, jobs.spool.result_path(job)) as file:
        return await Stored(context, file).read(lease)
