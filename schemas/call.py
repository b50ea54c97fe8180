"""A parsed call: its attributes, inputs and weights' shape, each checked by itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from schemas.attributes import Given, read_attributes
from schemas.inputs import Inputs, read_inputs
from schemas.problems import Problem, dims, problem
from schemas.tables import CalledOperation
from schemas.tensors import TensorMeta, read_meta

__all__ = ["Call", "read_call"]


@dataclass(slots=True)
class Call:
    """The valid parts of a call.

    `weights` is the weights' shape and `weights_loc` where it was given. `output` is the output tensor of a dumped op,
    or None.
    """

    called: CalledOperation
    given: Given
    inputs: Inputs
    output: TensorMeta | None
    weights: tuple[int, ...] | None
    weights_loc: tuple[str, str]
    warnings: list[str]

    def name(self, canonical: str) -> str:
        """Return an attribute's or input's name as the caller spelled it, otherwise in the call's dialect."""
        written = self.given.spelled.get(canonical) or self.inputs.spelled.get(canonical)
        return written or self.called.wire_names[canonical]

    @property
    def transposed(self) -> bool:
        """Whether the operation is of a transposed convolution."""
        return self.called.operation.transposed

    @property
    def forward(self) -> bool:
        """Whether the operation is a forward one: weights are an input, and the output's shape is inferred."""
        return self.called.operation.output.name == "dst"


def read_call(
    called: CalledOperation, attributes: object, inputs: object, output: object
) -> tuple[Call, list[Problem]]:
    """Return a call, and the rules that its parts break by themselves or by their number of values."""
    given, problems = read_attributes(called, attributes)
    found, more = read_inputs(called, inputs)
    problems.extend(more)
    known = None if output is None else read_meta(output, ["outputs", called.wire_names[_output(called)]], problems)
    call = Call(called, given, found, known, None, ("inputs", ""), [])
    if call.forward:
        weights = found.metas.get("weights")
        call.weights_loc = ("inputs", call.name("weights"))
        call.weights = None if weights is None else weights.shape
    else:
        _choose_weights_shape(call, problems)
    problems.extend(_ranks(call))
    return call, problems


def _output(called: CalledOperation) -> str:
    return called.operation.output.name


def _choose_weights_shape(call: Call, problems: list[Problem]) -> None:
    """Take the weights' shape from the input, the attribute, or a dump's output, in this order."""
    given, inputs = call.given.weights_shape, call.inputs.weights_shape
    written = call.given.spelled.get("weights_shape") or call.called.wire_names["weights_shape"]
    as_input = call.inputs.spelled.get("weights_shape") or call.called.wire_names["weights_shape"]
    known = call.output.shape if call.output is not None else None
    if inputs is not None:
        shape, call.weights_loc = inputs, ("inputs", as_input)
        if given is not None and given != inputs:
            call.warnings.append(
                f"{as_input} was given twice: the input {dims(inputs)} was used, not the attribute {dims(given)}"
            )
    elif given is not None:
        shape, call.weights_loc = given, ("attributes", written)
        if call.inputs.values_unknown:
            call.warnings.append(f"the values of the input {as_input} are not known here: the attribute was used")
    elif known is not None:
        shape, call.weights_loc = known, ("outputs", call.called.wire_names["diff_weights"])
    else:
        if "weights_shape" not in call.given.bad and "weights_shape" not in call.inputs.bad:
            msg = f"{written} is required: as an input or as an attribute"
            problems.append(problem(["attributes", written], msg, "missing"))
        return
    zeros = [axis for axis, size in enumerate(shape) if size == 0]
    for axis in zeros:
        msg = f"{call.weights_loc[1]}[{axis}] must be at least 1, but is 0"
        problems.append(problem([*call.weights_loc, axis], msg, "greater_than_equal"))
    if known is not None and known != shape:
        msg = f"{call.weights_loc[1]} must be the output's shape, which is {dims(known)}, but is {dims(shape)}"
        problems.append(problem(call.weights_loc, msg, "output_shape"))
    call.weights = None if zeros else shape


def _ranks(call: Call) -> Iterator[Problem]:
    """Check that shapes have the rank of `src`, and lists one value per spatial axis."""
    metas = call.inputs.metas
    src = metas.get("src")
    if src is None or not 3 <= len(src.shape) <= 5:
        call.weights = None
        return
    rank, name = len(src.shape), call.name("src")
    for other in ("diff_dst", "weights"):
        meta = metas.get(other)
        if meta is not None and len(meta.shape) != rank:
            msg = f"{call.name(other)} must have {rank} dimensions like {name}, but has {len(meta.shape)}"
            yield problem(["inputs", call.name(other), "shape"], msg, "rank")
            del metas[other]
    if call.weights is not None and len(call.weights) != rank:
        if not call.forward:
            msg = f"{call.weights_loc[1]} must have {rank} values, as {name} has {rank} dimensions, "
            yield problem(call.weights_loc, f"{msg}but has {len(call.weights)}", "rank")
        call.weights = None
    yield from _lengths(call, rank - 2, name)


def _lengths(call: Call, spatial: int, src: str) -> Iterator[Problem]:
    axes = (
        f"one value for each of the {spatial} spatial axes of {src}"
        if spatial > 1
        else f"1 value, as {src} has 1 spatial axis"
    )
    for attribute, may_be_empty in _LISTS:
        values: tuple[int, ...] | None = getattr(call.given, attribute)
        if values is None or len(values) == spatial or (may_be_empty and not values):
            continue
        written = call.name(attribute)
        yield problem(["attributes", written], f"{written} must have {axes}, but has {len(values)}", "length")


_LISTS = (
    ("strides", False),
    ("dilations", False),
    ("pads_begin", True),
    ("pads_end", True),
    ("output_padding", False),
)
