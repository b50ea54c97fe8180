"""A request object: attributes, inputs, options; and what arrives of it.

A decoder, whatever its format, is an async iterator over what has arrived: `Begun`, `Known` and `Arrived`. It knows
nothing of calls: its caller checks each item, and stops reading when one is rejected.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

from app.intake.lease import Lease
from app.intake.sinks import RawSink
from app.intake.strict_json import Partial
from app.intake.tensors import Input, Tensor, check_begun_tensor, read_inputs
from app.pool.buffers import Segment
from engine.options import Options, parse_options
from schemas.attributes import read_attributes
from schemas.broken_rules import BrokenRule, broken_rule, invalid_params
from schemas.call import read_outputs
from schemas.dumps import call_of_dump, is_dump
from schemas.rows import InputRows
from schemas.spelling import check_members
from schemas.tables import CalledOperation
from schemas.tensors import TensorMeta

__all__ = [
    "MEMBERS",
    "Arrived",
    "Begun",
    "Known",
    "RequestEvent",
    "RequestObject",
    "check_begun",
    "check_begun_inputs",
    "read_request_object",
]

MEMBERS = ("attributes", "inputs", "options")
"""The members of a request object, in the order of positional params."""


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

    def described(self, row: str) -> Any:
        """Return the request's description of an input, by canonical name; None if there is none."""
        spellings = self.rows.input_spellings
        return next((value for name, value in self.inputs.items() if spellings.get(name) == row), None)

    async def read(
        self,
        lease: Lease,
        *,
        parts: Mapping[str, tuple[str, Input]] | None = None,
    ) -> Self:
        """Return the request with its inputs read.

        Those that came as separate `parts`, by canonical name, replace their descriptions.
        """
        replaced = parts or {}
        spellings = self.rows.input_spellings
        rest = {name: value for name, value in self.inputs.items() if spellings.get(name) not in replaced}
        inputs = await read_inputs(self.rows, rest | dict(replaced.values()), lease)
        return replace(self, inputs=inputs)

    @cached_property
    def metas(self) -> dict[str, TensorMeta | list[int]]:
        """Dtype and shape of inputs that are read, and the values of shapes, for the operation's rules."""
        return {name: value.meta if isinstance(value, Tensor) else value for name, value in self.inputs.items()}


@dataclass(frozen=True, slots=True)
class Begun:
    """Some members of the request object have arrived (see `partial_document`)."""

    document: Mapping[str, Any]


@dataclass(slots=True)
class Known:
    """Dtype and shape of the tensors are known; the last one that a decoder yields has all of their data.

    `prepared` is the plan of this request. `RequestReceiver` sets it, and the decoder may read it after its `yield`, or
    set it before, from a cache: it may have been made for an earlier request with other data. `likely` is a plan for an
    earlier request that is used while the values of the shape input have not arrived: they may differ.
    """

    request: RequestObject
    prepared: Any = None
    likely: Any = None
    all_described: bool = True
    """Whether no further input can come, only data; else optional ones, and those of some outputs, still may."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """Bytes of tensors have arrived: their segments, and the bytes `received`, by canonical name."""

    segments: Mapping[str, Segment]
    received: Mapping[str, int]

    @classmethod
    def at(cls, sinks: Mapping[str, RawSink]) -> Self:
        """Return what has arrived at the sinks that hold all of their bytes in place."""
        segments = {row: sink.segment for row, sink in sinks.items()}
        return cls(segments, {row: sink.nbytes for row, sink in sinks.items()})


RequestEvent = Begun | Known | Arrived


def check_begun(called: CalledOperation, request: Mapping[str, Any], memory: int) -> Options:
    """Check what has arrived of a request object (`partial_document`), so that it can be rejected before the rest has.

    Returns the options, which are the defaults until they have arrived. Raises `InvalidParams` for attributes and
    options that break rules by themselves, for names of outputs that the operation lacks, and for a tensor that can't
    be read; `TooLarge` for one that exceeds the `memory` of the service. Rules that involve several of them, or what
    may still come, are checked later.
    """
    attributes = request.get("attributes")
    if isinstance(attributes, Mapping) and not is_dump(attributes) and not is_dump(request):
        if isinstance(attributes, Partial):  # also of a dump, which only its other members show
            spellings = called.operation.attribute_spellings
            attributes = {name: value for name, value in attributes.complete().items() if name in spellings}
            _, broken = read_attributes(called, attributes)
            broken = [rule for rule in broken if rule["type"] != "missing"]
        else:
            _, broken = read_attributes(called, attributes)
        if broken:
            raise invalid_params(called.called_as, broken)
    options = request.get("options")
    parsed = parse_options(None if isinstance(options, Partial) else options)
    unknown: list[BrokenRule] = []
    read_outputs(called, parsed.outputs, unknown)
    if unknown:
        raise invalid_params(called.called_as, unknown)
    check_begun_inputs(request.get("inputs"), memory)
    return parsed


def check_begun_inputs(inputs: object, memory: int) -> None:
    """Check the tensors that are still arriving, as `check_begun` does."""
    for name, description in inputs.items() if isinstance(inputs, Mapping) else ():
        if isinstance(description, Mapping):
            complete = description.complete() if isinstance(description, Partial) else description
            check_begun_tensor(name, complete, memory)


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
