"""A request object: attributes, inputs, options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

from app.intake.tensors import Tensor, read_inputs
from app.threads import in_thread_if
from engine.graphs import GraphCall, read_graph_call
from schemas.broken_rules import BrokenRule, broken_rule, invalid_params
from schemas.dumps import call_of_dump, is_dump
from schemas.rows import InputRows
from schemas.spelling import check_members
from schemas.tables import CalledOperation
from schemas.tensors import TensorMeta

__all__ = ["MEMBERS", "GraphRequest", "RequestObject", "read_graph_request", "read_request_object"]

MEMBERS = ("attributes", "inputs", "options")
"""The members of a request object, in the order of positional params."""

# Inputs that are read in a millisecond.
_AT_ONCE = 64


@dataclass(frozen=True)
class RequestObject:
    """The parts of a request; `inputs` by name, in whatever form the request had, or read.

    `called_as` names the request in errors. `attributes` may be a whole op object as dumped by oneDNN Graph.
    """

    called_as: str
    rows: InputRows
    attributes: Mapping[str, Any]
    inputs: Mapping[str, Any]
    options: Any

    def without_shape(self) -> Self:
        """Return the request without the attribute that the input for a shape replaces once its values arrive."""
        rest = {name: value for name, value in self.attributes.items() if not self.rows.is_shape(name)}
        return replace(self, attributes=rest)

    async def read(self) -> Self:
        """Return the request with its inputs read; raises as `read_inputs` does."""
        large = len(self.inputs) > _AT_ONCE
        return replace(self, inputs=await in_thread_if(large, read_inputs, self.rows, self.inputs))

    @cached_property
    def metas(self) -> dict[str, TensorMeta | list[int]]:
        """Dtype and shape of inputs that are read, and the values of shapes, for the operation's rules."""
        return {name: value.meta if isinstance(value, Tensor) else value for name, value in self.inputs.items()}


@dataclass(frozen=True)
class GraphRequest(RequestObject):
    """A request for a graph, whose structure is valid; its `attributes` hold the graph itself."""

    call: GraphCall


def read_graph_request(request: Any) -> GraphRequest:
    """Read a request object; raises what `read_graph_call` raises."""
    call = read_graph_call(request)
    inputs, document = request.get("inputs"), {"graph": request.get("graph")}
    return GraphRequest("graph", call.rows, document, inputs or {}, request.get("options"), call)


def read_request_object(called: CalledOperation, request: Any) -> RequestObject:
    """Split a request into its parts; a dumped op may replace attributes and inputs, or the attributes only.

    Raises `InvalidParams` when it has neither form.
    """
    members = {} if request is None else request
    if not isinstance(members, Mapping):
        raise invalid_params(called.called_as, [broken_rule([], "the request must be an object", "object_type")])
    if is_dump(members):
        members = call_of_dump(called, members)
    parts = {name: {} if members.get(name) is None else members[name] for name in ("attributes", "inputs")}
    broken: list[BrokenRule] = []
    check_members(members, MEMBERS, "a request has only the members attributes, inputs and options", broken)
    broken += [
        broken_rule([name], f"{name} must be an object", "object_type")
        for name, value in parts.items()
        if not isinstance(value, Mapping)
    ]
    if broken:
        raise invalid_params(called.called_as, broken)
    attributes, inputs = parts["attributes"], parts["inputs"]
    if is_dump(attributes) and not inputs:
        # The inputs are still the dump's own, so its output must match them.
        own = call_of_dump(called, attributes)
        attributes, inputs = own["attributes"], own["inputs"]
    return RequestObject(called.called_as, called.operation, attributes, inputs, members.get("options"))
