"""Jobs over HTTP, and the runner that computes them.

A job is its request, sent again by the service itself: it passes `answer` like any other, and its result goes to the
spool. Cancelling it is what a disconnect is to other requests.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import aclosing, suppress
from functools import partial
from io import BufferedReader
from typing import Any, Self

from starlette.types import Message, Scope, Send

from app.api.answer import answer, decode
from app.calls.jobs.jobs import Jobs
from app.calls.jobs.spool import LEASE_S, Job
from app.calls.jobs.stored import result_pieces
from app.calls.jobs.tasks import Submit, is_job, task_of
from app.calls.service import Service
from app.calls.tasks import Task
from app.calls.work import Progress, Work, finish
from app.http.exchange import BodyLimits, Exchange
from app.replies.body import json_bytes, send_body
from app.replies.formats import EVENTS, FORMATS, JSON, MULTIPART, choose
from app.telemetry.context import as_convgrad_error
from convgrad._errors import Cancelled, InternalError, Overloaded, RateLimited, ShuttingDown, SpoolFull
from engine.options import Options

__all__ = ["Run", "Runner", "send_accepted", "send_stored", "submission"]

_log = logging.getLogger("convgrad.job")

_ASYNC, _RELEASED = "respond-async", "released"
# Jobs that a replica computes at a time: the units of one usually occupy all workers.
_AT_ONCE = 4
# Jobs take at most one in four places of the queue.
_SHARE = 4
# How often the runner looks for jobs of other replicas and renews its claims, and removes what has expired.
_TICK_S, _SWEEP_S = 1.0, 60.0
_PIECE = 1 << 18


def submission(exchange: Exchange, task: Task) -> Submit | None:
    """Return the task that makes a job of a request, if the client prefers one (RFC 7240) and the service has jobs."""
    preferences = exchange.headers.get("prefer", "")
    if not preferences or task.service.jobs is None or not is_job(task):
        return None
    if _ASYNC not in (each.partition(";")[0].strip().lower() for each in preferences.split(",")):
        return None
    key = exchange.headers.get("idempotency-key")
    return Submit(task, None if key is None else key.removeprefix('"').removesuffix('"'))


async def send_accepted(work: Work, send: Send) -> None:
    """Reply with the state of a submitted job."""
    await finish(work)
    document = work.result().document
    headers = {"location": f"/v1/jobs/{document['job']}", "preference-applied": _ASYNC}
    body = json_bytes(document)
    await send_body(send, [body], "application/json", len(body), status=202, headers=headers)


async def send_stored(accept: str, work: Work, send: Send) -> None:
    """Send the result of a job in any format that its call could have had."""
    outputs = tuple(output.name for output in work.result().outputs)
    formats = FORMATS if work.streams == "tiles" else (JSON, *([MULTIPART] if outputs else []), EVENTS)
    types = tuple(each.media_type for each in formats)
    chosen = formats[types.index(choose(accept, types))]
    chosen.check(Options(outputs=outputs))
    await chosen.send(work, send)


class Runner:
    """Compute the jobs of a service, while the ``async with`` block runs."""

    def __init__(self, service: Service, jobs: Jobs) -> None:
        self._service = service
        self._jobs = jobs
        self._most = min(_AT_ONCE, max(1, service.settings.queue_length // _SHARE))
        self._running: dict[Job, Run] = {}
        self._swept = 0.0

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._go())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Put running jobs back into the queue, and close the spool."""
        tasks = [self._task, *(run.task for run in self._running.values())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._jobs.close()

    async def _go(self) -> None:
        while True:
            self._jobs.changed.clear()
            try:
                await self._tick()
            except Exception as error:  # noqa: BLE001 - such as a full disk: the next time it may work
                _log.error("the spool fails: %s", error)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._jobs.changed.wait(), _TICK_S)

    async def _tick(self) -> None:
        jobs, spool, running = self._jobs, self._jobs.spool, self._running
        if running:
            progress = {(job.id, job.attempt): run.progress for job, run in running.items()}
            lost = await jobs.call(spool.renew, progress)
            for run in [run for job, run in running.items() if job.id in lost]:
                run.cancelled.set()
        while len(running) < self._most and self._service.status == "ready":
            if (claimed := await jobs.call(spool.claim)) is None:
                break
            self._start(*claimed)
        if time.monotonic() > self._swept + _SWEEP_S:
            await jobs.call(spool.sweep)
            self._swept = time.monotonic()
        await jobs.count()

    def _start(self, job: Job, begun: bool) -> None:
        facts = {"job": job.id, "key": job.key, "attempt": job.attempt}
        if begun:
            self._jobs.taken_over += 1
            _log.warning("job taken over: it was not renewed for %g s", LEASE_S, extra={"facts": facts})
        _log.info("job running", extra={"facts": facts})
        run = self._running[job] = Run(self._service, self._jobs, job)
        run.task.add_done_callback(partial(self._ended, job))

    def _ended(self, job: Job, task: asyncio.Task[str]) -> None:
        del self._running[job]
        if task.cancelled():
            return
        if (error := task.exception()) is not None:  # another replica takes it over
            _log.error("the spool fails: %s", error, extra={"facts": {"job": job.id}})
        elif task.result() != _RELEASED:  # that is tried again after a while
            self._jobs.changed.set()


class Run:
    """One attempt at a job."""

    def __init__(self, service: Service, jobs: Jobs, job: Job) -> None:
        self.progress = 0, 0
        self._service = service
        self._jobs = jobs
        self._job = job
        self.cancelled = asyncio.Event()
        """Set to stop: the job was cancelled or taken over."""
        self._began = time.monotonic()
        self.task = asyncio.create_task(self._go())

    async def _go(self) -> str:
        jobs, job, outcome = self._jobs, self._job, _RELEASED
        facts: dict[str, Any] = {"job": job.id, "kind": job.kind, "op": job.op, "attempt": job.attempt}
        with self._service.telemetry.tracing.job(facts):
            try:
                outcome = await self._outcome()
            finally:
                if outcome == _RELEASED:
                    await asyncio.shield(jobs.call(jobs.spool.release, job))
                facts |= {"outcome": outcome, "ms": round((time.monotonic() - self._began) * 1000, 3)}
                _log.info("job %s", outcome, extra={"facts": facts | {"key": job.key, "request_id": job.request_id}})
        return outcome

    async def _outcome(self) -> str:
        """Compute the job and store what comes of it; return that, or `released` if it has to be tried again."""
        jobs, job = self._jobs, self._job
        try:
            with await asyncio.to_thread(jobs.spool.open_request, job) as file:
                exchange = self._exchange(file)
                await answer(exchange, task_of(job, self._service, exchange.context), decode, self._keep)
            return "done"
        except Exception as caught:  # noqa: BLE001 - every error is the job's
            error = as_convgrad_error(caught)
            if isinstance(error, InternalError):
                _log.error("internal error", exc_info=caught, extra={"facts": {"job": job.id}})
            error = error.with_traceback(None)  # whose frames hold the memory of the call, and this one the error
        if isinstance(error, Overloaded | RateLimited | ShuttingDown) and not isinstance(error, SpoolFull):
            return _RELEASED
        if self.cancelled.is_set() or not await jobs.call(jobs.spool.fail, job, error):
            return "cancelled"
        return "failed"

    def _exchange(self, file: BufferedReader) -> Exchange:
        """Return the request of the job, as if it had just arrived."""
        job = self._job
        length = file.seek(0, 2)
        file.seek(0)
        headers = {"content-type": job.content_type, "content-length": str(length), "x-request-id": job.request_id}
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        scope: Scope = {"type": "http", "method": "POST", "path": "/v1/jobs", "headers": raw}

        async def receive() -> Message:
            if file.tell() < length:
                piece = await asyncio.to_thread(file.read, _PIECE)
                return {"type": "http.request", "body": piece, "more_body": file.tell() < length}
            await self.cancelled.wait()
            return {"type": "http.disconnect"}

        exchange = Exchange(scope, receive, _send_nothing, BodyLimits(length))
        exchange.context.api, exchange.context.key, exchange.context.address = "jobs", job.key, job.address
        return exchange

    async def _keep(self, work: Work, _: Send) -> None:
        """Run the work and store its result."""
        jobs, spool, job = self._jobs, self._jobs.spool, self._job
        async with aclosing(work.events()) as events:
            async for event in events:
                if isinstance(event, Progress):
                    self.progress = event.done, event.total
        pieces = result_pieces(work.result(), work.streams)
        size = await asyncio.to_thread(spool.write_result, job, pieces)
        if not await jobs.call(spool.finish, job, size):
            self.cancelled.set()
            raise Cancelled("the job was cancelled or taken over")


async def _send_nothing(_: Message) -> None:
    """Drop a message of the reply: a job has no client."""
