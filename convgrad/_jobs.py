"""Jobs: calls that a service keeps and computes whether or not anybody waits; their requests and results."""

from __future__ import annotations

import inspect
import re
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from convgrad._blocking import Blocking, blocking, complete
from convgrad._core import HttpRequest, object_of
from convgrad._errors import Cancelled, NotFound, ProtocolError, TimedOut
from convgrad._events import Progress
from convgrad._report import Report
from convgrad._requests import GetJob, GetJobResult
from convgrad._stream import OnProgress
from convgrad._tolerance import Tolerance

if TYPE_CHECKING:
    from convgrad._base import Backend

__all__ = ["AsyncJob", "Job", "accepted", "blocking_job", "job_request", "submitted"]

A = TypeVar("A")
P = ParamSpec("P")

_ID = re.compile(r"[0-9a-f]{1,64}")
_ENDED = ("done", "failed", "cancelled")
_MADE: dict[str, Callable[[Any], Any]] = {"verify": Report, "tolerance": Tolerance.of}
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.05, 2.0


class AsyncJob:
    """`Job` for asyncio: the same names with `await`."""

    def __init__(self, backend: Backend, state: Mapping[str, Any]) -> None:
        self._backend = backend
        self.state = dict(state)
        """The last known state of the job: `state`, `place` or `progress`, `created`, `expires`, `error`."""
        self.id = str(state.get("job"))
        """Its id: `client.job(id)` finds it again, from any process."""

    async def refresh(self) -> dict[str, Any]:
        """Ask for the state of the job and return it; raises `NotFound` if it has expired, or was deleted."""
        self.state = object_of(await self._backend.fetch(GetJob("get", self.id)))
        return self.state

    async def wait(
        self,
        timeout: float | None = None,  # noqa: ASYNC109 - both clients have it
        *,
        on_progress: OnProgress | None = None,
    ) -> str:
        """Wait until the job has ended; return `done`, `failed` or `cancelled`.

        `on_progress` is called with `Progress` while the job runs. Raises `TimedOut` after `timeout` seconds, and
        `NotFound` if the job has expired, or was deleted.
        """
        pause, until = _FIRST_WAIT_S, None if timeout is None else time.monotonic() + timeout
        while (await self.refresh()).get("state") not in _ENDED:
            progress = self.state.get("progress")
            if on_progress is not None and isinstance(progress, Mapping) and progress.get("total"):
                on_progress(Progress(int(progress["done"]), int(progress["total"])))
            if until is not None and time.monotonic() + pause > until:
                raise TimedOut(f"the job has not ended within {timeout:g} s: it is {self.state.get('state')}")
            await self._backend.sleep(pause)
            pause = min(_LONGEST_WAIT_S, 1.5 * pause)
        return str(self.state["state"])

    async def result(
        self,
        timeout: float | None = None,  # noqa: ASYNC109 - both clients have it
        *,
        on_progress: OnProgress | None = None,
    ) -> Any:
        """Wait until the job has ended, and return its result.

        That is a `Result` of a computation, a `Report` of a verification, a `Tolerance`, or tensors by id of a graph.
        Raises what the call would have raised, `Cancelled` if the job was cancelled, and what `wait` raises.
        """
        if await self.wait(timeout, on_progress=on_progress) == "cancelled":
            raise Cancelled("the job was cancelled")
        kind = str(self.state.get("kind"))
        found = await self._backend.fetch(GetJobResult(self.id, kind))
        return _MADE[kind](found) if kind in _MADE else found

    async def cancel(self) -> None:
        """Cancel the job; if it has ended, have the service forget it and its result."""
        self.state = object_of(await self._backend.fetch(GetJob("cancel", self.id)))


class Job(Blocking[AsyncJob]):
    """A call that a service keeps and computes; `wait` for it, get its `result`, or `cancel` it."""

    def __init__(self, job: AsyncJob) -> None:
        self._async = job

    @property
    def id(self) -> str:
        """Its id: `client.job(id)` finds it again, from any process."""
        return self._async.id

    @property
    def state(self) -> dict[str, Any]:
        """The last known state of the job: `state`, `place` or `progress`, `created`, `expires`, `error`."""
        return self._async.state

    refresh = blocking(AsyncJob.refresh)
    wait = blocking(AsyncJob.wait)
    result = blocking(AsyncJob.result)
    cancel = blocking(AsyncJob.cancel)


def blocking_job(
    method: Callable[Concatenate[A, P], Coroutine[Any, Any, AsyncJob]],
) -> Callable[Concatenate[Blocking[A], P], Job]:
    """Return the blocking form of a method that returns a job, with its signature and docstring."""

    @wraps(method)
    def call(self: Blocking[A], /, *args: P.args, **kwargs: P.kwargs) -> Job:
        return Job(complete(method(self._async, *args, **kwargs)))

    call.__doc__ = inspect.getdoc(method)
    call.__signature__ = inspect.signature(method).replace(return_annotation="Job")  # type: ignore[attr-defined]
    return call


def submitted(request: HttpRequest, idempotency_key: str) -> HttpRequest:
    """Return a request whose call becomes a job; sent twice, it is the same one."""
    assert request.body is not None
    headers = {"prefer": "respond-async", "idempotency-key": idempotency_key}
    return replace(request, body=replace(request.body, headers=headers), accept="application/json")


def job_request(what: str, job: str = "", accept: str = "application/json") -> HttpRequest:
    """Build the request for `get`, `cancel`, `result` or `list`; raises `NotFound` for a malformed id."""
    if what != "list" and not _ID.fullmatch(job):
        raise NotFound("the id of a job must be digits and letters from a to f")
    path = {"list": "/v1/jobs", "result": f"/v1/jobs/{job}/result"}.get(what, f"/v1/jobs/{job}")
    return HttpRequest("DELETE" if what == "cancel" else "GET", path, accept)


def accepted(status: int, reply: Any) -> dict[str, Any]:
    """Return the state of a submitted job; raises `NotFound` for a service that has no jobs."""
    if status != 202:
        raise NotFound("the service has no jobs, and has computed the call at once: it needs CONVGRAD_SPOOL")
    if not _ID.fullmatch(str(object_of(reply).get("job"))):
        raise ProtocolError("the reply must have the id of a job")
    return object_of(reply)
