"""From the parsed request object to a call: attributes, inputs that have landed, options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from app.intake.options import parse_options
from app.intake.sinks import Lease
from app.intake.tensors import Input, metas, read_inputs
from schemas.attributes import read_attributes
from schemas.dumps import call_of_dump, is_dump
from schemas.problems import invalid_params, problem, safe_key
from schemas.tables import CalledOperation, near_miss
from schemas.tensors import TensorMeta

__all__ = ["MEMBERS", "RequestObject", "RequestedCall", "check_attributes", "read_call", "take_apart"]

MEMBERS = ("attributes", "inputs", "options")
"""The members of a request object, in the order that positional params have."""


@dataclass(frozen=True, slots=True)
class RequestedCall:
    """Hold what a request asks for; `attributes` may be a whole op object as oneDNN Graph dumps them."""

    called: CalledOperation
    attributes: Mapping[str, Any]
    inputs: dict[str, Input]
    options: Any

    @property
    def metas(self) -> dict[str, TensorMeta | list[int]]:
        """What the operation's rules need to know of the inputs."""
        return metas(self.inputs)


@dataclass(frozen=True, slots=True)
class RequestObject:
    """Hold the parts of a request as they came; `inputs` by name, whatever form the request had."""

    called: CalledOperation
    attributes: Mapping[str, Any]
    inputs: Mapping[str, Any]
    options: Any

    def described(self, row: str) -> Any:
        """Return what the request says of an input, by its canonical name; None when nothing."""
        spellings = self.called.operation.input_spellings
        return next((value for name, value in self.inputs.items() if spellings.get(name) == row), None)

    def read(
        self,
        lease: Lease,
        *,
        landed: Mapping[str, tuple[str, Input]] | None = None,
        need_data: bool = True,
    ) -> RequestedCall:
        """Read the inputs; what `landed` another way, by canonical name, stands in for its description."""
        came = landed or {}
        spellings = self.called.operation.input_spellings
        rest = {name: value for name, value in self.inputs.items() if spellings.get(name) not in came}
        inputs = read_inputs(self.called.operation, rest | dict(came.values()), lease, need_data=need_data)
        return RequestedCall(self.called, self.attributes, inputs, self.options)


def read_call(called: CalledOperation, request: Any, lease: Lease, *, need_data: bool = True) -> RequestedCall:
    """Read a request object, `{"attributes", "inputs", "options"}` or a dumped op with tensors in its inputs.

    Raises `InvalidParams` with every fault of the form, and what `read_inputs` raises.
    """
    return take_apart(called, request).read(lease, need_data=need_data)


def check_attributes(called: CalledOperation, request: Mapping[str, Any]) -> None:
    """Check the attributes and options of a request, as far as they are there, while its tensors are still to come.

    Raises `InvalidParams` for what they break by themselves; rules that shapes have a part in are for later.
    """
    attributes = request.get("attributes")
    if isinstance(attributes, Mapping) and not is_dump(attributes) and not is_dump(request):
        _, problems = read_attributes(called, attributes)
        if problems:
            raise invalid_params(called.called_as, problems)
    parse_options(request.get("options"))


def take_apart(called: CalledOperation, request: Any) -> RequestObject:
    """Take a request apart; a dumped op stands in for attributes and inputs, or for the attributes alone.

    Raises `InvalidParams` when it is neither form.
    """
    given = {} if request is None else request
    if not isinstance(given, Mapping):
        raise invalid_params(called.called_as, [problem([], "the request must be an object", "object_type")])
    if is_dump(given):
        given = call_of_dump(called, given)
    parts = {name: {} if given.get(name) is None else given[name] for name in ("attributes", "inputs")}
    problems = [problem([safe_key(name)], _unknown(name), "unknown_member") for name in given if name not in MEMBERS]
    problems += [
        problem([name], f"{name} must be an object", "object_type")
        for name, value in parts.items()
        if not isinstance(value, Mapping)
    ]
    if problems:
        raise invalid_params(called.called_as, problems)
    attributes, inputs = parts["attributes"], parts["inputs"]
    if is_dump(attributes) and not inputs:
        # Taken out of the dump, the inputs stay its own: its output is held to them.
        own = call_of_dump(called, attributes)
        attributes, inputs = own["attributes"], own["inputs"]
    return RequestObject(called, attributes, inputs, given.get("options"))


def _unknown(name: str) -> str:
    hint = near_miss(name, MEMBERS)
    rule = "a request has attributes, inputs and options, and no other member"
    return f"{rule}; did you mean {hint}?" if hint else rule
