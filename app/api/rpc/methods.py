"""The JSON-RPC methods: every operation under every name, `ops.*`, `graph.*`, `jobs.*`, `check.*`, `rpc.discover`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from app.api.documents import OPENRPC, OPERATION_LIST, description_of
from app.calls.jobs.tasks import Submit, is_job, job_task
from app.calls.sealed.tasks import check_task
from app.calls.service import Service
from app.calls.tasks import Compute, RunGraph, Task, Tolerance, Validate, ValidateGraph, Verify
from app.intake import requests
from app.telemetry.context import RequestContext
from convgrad._errors import UnknownOperation
from engine import graphs
from schemas.broken_rules import broken_rule, invalid_params
from schemas.checks import CHECK_METHODS
from schemas.dumps import is_dump
from schemas.rpc import bind_params
from schemas.tables import CalledOperation, find_operation, operation_names

__all__ = ["METHODS", "Method", "Params", "TaskMethod"]

Params = Mapping[str, Any] | Sequence[Any] | None


class TaskMethod(ABC):
    """A method with a task."""

    @abstractmethod
    def read(self, service: Service, context: RequestContext, params: Params) -> tuple[Task, Mapping[str, Any]]:
        """Return the task and its request object; raises `InvalidParams`."""


@dataclass(frozen=True)
class _RequestMethod(TaskMethod):
    """A method whose params are a request object: `make` returns the task, given the operation that they name.

    `params` are their names in order; the first one may be the operation, `op`. An op dumped by oneDNN Graph may take
    their place, unless they are those of a whole graph.
    """

    make: Callable[[Service, RequestContext, CalledOperation | None], Task]
    params: tuple[str, ...] = requests.MEMBERS
    required: tuple[str, ...] = ()

    def read(self, service: Service, context: RequestContext, params: Params) -> tuple[Task, Mapping[str, Any]]:
        """Return the task and its request object; raises `InvalidParams`."""
        if is_dump(params) and self.params is not graphs.MEMBERS:
            given = dict(cast("Mapping[str, Any]", params))
            given.setdefault("op", _kind(given))
        else:
            given = bind_params(params, self.params, required=self.required)
        op = given.pop("op", None)
        return self.make(service, context, _called(op) if self.params[:1] == ("op",) else None), given


class _SubmitMethod(TaskMethod):
    """A method whose params are another method and the params of that, which becomes a job."""

    def read(self, service: Service, context: RequestContext, params: Params) -> tuple[Task, Mapping[str, Any]]:
        """Return the task and the request object of the other method; raises `InvalidParams`."""
        names = "method", "params", "idempotency_key"
        given = bind_params(params, names, required=names[:2])
        method, params = METHODS.get(str(given["method"])), given["params"]
        if not isinstance(params, Mapping | list):
            raise invalid_params("params", [broken_rule(["params"], "params must be an object or a list", "type")])
        task, document = method.read(service, context, params) if isinstance(method, TaskMethod) else (None, {})
        if task is None or not is_job(task):
            rule = "method must be an operation, ops.verify, ops.tolerance or graph.run"
            raise invalid_params("params", [broken_rule(["method"], rule, "method")])
        return Submit(task, given.get("idempotency_key")), document


Method = TaskMethod | Callable[[Params], Any]
"""A method with a task, or a function that returns a JSON value, its text, or an awaitable of one of them."""


def _plain(answer: Callable[..., Any], *names: str) -> Method:
    """Make a method of a function whose parameters are all required, given by name or by position."""
    return lambda params: answer(**bind_params(params, names, required=names))


async def _describe(op: object) -> bytes:
    return await description_of(_called(op).called_as).content()


def _called(op: object) -> CalledOperation:
    try:
        return find_operation(op)
    except UnknownOperation as error:
        raise invalid_params("params", [broken_rule(["op"], error.message, "unknown_operation")]) from None


def _kind(dump: Mapping[str, Any]) -> object:
    graph = dump.get("graph")
    only = graph[0] if isinstance(graph, list) and len(graph) == 1 else dump
    return only.get("kind") if isinstance(only, Mapping) else None


def _operation(called: CalledOperation) -> TaskMethod:
    return _RequestMethod(lambda service, context, _: Compute(service, context, called))


def _of_named(task: Callable[[Service, RequestContext, CalledOperation], Task]) -> TaskMethod:
    return _RequestMethod(task, ("op", *requests.MEMBERS), ("op",))  # type: ignore[arg-type] # `read` gives it an operation


def _of_graph(task: Callable[[Service, RequestContext], Task]) -> TaskMethod:
    return _RequestMethod(lambda service, context, _: task(service, context), graphs.MEMBERS, ("graph",))


def _job(what: str, *params: str) -> TaskMethod:
    return _RequestMethod(lambda service, context, _: job_task(service, context, what), params, params)


def _check(name: str) -> TaskMethod:
    return _RequestMethod(
        lambda service, context, _: check_task(service, context, name),
        tuple(CHECK_METHODS[name].params),
        CHECK_METHODS[name].required,
    )


METHODS: dict[str, Method] = {
    **{name: _operation(find_operation(name)) for name in operation_names()},
    "ops.list": _plain(OPERATION_LIST.content),
    "ops.describe": _plain(_describe, "op"),
    "ops.validate": _of_named(Validate),
    "ops.verify": _of_named(Verify),
    "ops.tolerance": _of_named(Tolerance),
    "graph.run": _of_graph(RunGraph),
    "graph.validate": _of_graph(ValidateGraph),
    "jobs.submit": _SubmitMethod(),
    "jobs.get": _job("get", "job"),
    "jobs.result": _job("result", "job"),
    "jobs.cancel": _job("cancel", "job"),
    "jobs.list": _job("list"),
    **{name: _check(name) for name in CHECK_METHODS},
    "rpc.discover": _plain(OPENRPC.content),
}
"""Every method by its name."""
