"""A parsed call: its attributes, inputs and weights' shape, each checked by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from schemas.attributes import Given, read_attributes
from schemas.broken_rules import BrokenRule, broken_rule, dims, safe_key
from schemas.inputs import Inputs, read_inputs
from schemas.spelling import advice
from schemas.tables import CalledOperation
from schemas.tensors import TensorMeta, read_meta

__all__ = ["ParsedCall", "read_call", "read_outputs"]


@dataclass(slots=True)
class ParsedCall:
    """The valid parts of a call.

    `outputs` are the canonical names of the requested outputs. `weights` is the weights' shape and `weights_loc` where
    it was given; `result` and `result_loc` are the same for the shape of `diff_src` where the call gives it. `output`
    is the output tensor of a dumped op, or None.
    """

    called: CalledOperation
    given: Given
    inputs: Inputs
    output: TensorMeta | None
    weights: tuple[int, ...] | None
    weights_loc: tuple[str, str]
    warnings: list[str]
    result: tuple[int, ...] | None = None
    result_loc: tuple[str, str] = ("attributes", "dst_shape")
    outputs: tuple[str, ...] = ()

    def name(self, canonical: str) -> str:
        """Return an attribute's or input's name as the caller spelled it, otherwise in the call's dialect."""
        written = self.given.spelled.get(canonical) or self.inputs.spelled.get(canonical)
        return written or self.called.wire_names[canonical]

    @property
    def transposed(self) -> bool:
        """Whether the operation is of a transposed convolution."""
        return self.called.operation.transposed

    @property
    def base(self) -> str:
        """The input whose rank the other tensors must have: `src`, or `diff_dst` without it."""
        return self.called.operation.inputs[0].name


def read_call(
    called: CalledOperation, attributes: object, inputs: object, output: object, outputs: tuple[str, ...] = ()
) -> tuple[ParsedCall, list[BrokenRule]]:
    """Return a call, and the rules that its parts break by themselves or by their number of values."""
    given, broken = read_attributes(called, attributes)
    found, more = read_inputs(called, inputs)
    broken.extend(more)
    known = None if output is None else read_meta(output, ["outputs", called.wire_names[_output(called)]], broken)
    call = ParsedCall(called, given, found, known, None, ("inputs", ""), [])
    call.outputs = read_outputs(called, outputs, broken) or (_output(called),)
    _check_needed(call, broken)
    if called.operation.computes == "diff_weights":
        call.weights, call.weights_loc = _choose_shape(call, "weights_shape", broken)
    elif called.operation.convolves:
        weights = found.metas.get("weights")
        call.weights_loc = ("inputs", call.name("weights"))
        call.weights = None if weights is None else weights.shape
        if called.operation.shape_input is not None:
            call.result, call.result_loc = _choose_shape(call, called.operation.shape_input, broken)
    broken.extend(_ranks(call))
    return call, broken


def read_outputs(
    called: CalledOperation,
    asked: Sequence[str],
    broken: list[BrokenRule],
    loc: Callable[[int], list[str | int]] = lambda index: ["options", "outputs", index],
) -> tuple[str, ...]:
    """Return the canonical names of the requested outputs; `loc` gives the place of each in the request."""
    spellings, found = called.operation.output_spellings, list[str]()
    for index, name in enumerate(asked):
        output = spellings.get(name)
        if output is None:
            known = ", ".join(called.wire_names[row.name] for row in called.operation.outputs)
            msg = f"{safe_key(name)} is not an output of {called.called_as}: it has {known}"
            broken.append(broken_rule(loc(index), msg + advice(called, name, "output"), "unknown_output"))
        elif output in found:
            msg = f"outputs must name each output once, but repeats {safe_key(name)}"
            broken.append(broken_rule(loc(index), msg, "conflict"))
        else:
            found.append(output)
    return tuple(found)


def _check_needed(call: ParsedCall, broken: list[BrokenRule]) -> None:
    """Check the inputs that only some outputs read: a missing one is an error, an unneeded one gets a warning."""
    for row in call.called.operation.inputs:
        if row.only_for is None:
            continue
        output, given = call.called.wire_names[row.only_for], row.name in call.inputs.metas
        if given and row.only_for not in call.outputs:
            call.warnings.append(f"{call.name(row.name)} is not read: {output} is not among the requested outputs")
        elif not given and row.only_for in call.outputs and row.name not in call.inputs.bad:
            name = call.called.wire_names[row.name]
            broken.append(broken_rule(["inputs", name], f"{name} is required for {output}", "missing"))


def _output(called: CalledOperation) -> str:
    return called.operation.output.name


def _choose_shape(
    call: ParsedCall, row: str, broken: list[BrokenRule]
) -> tuple[tuple[int, ...] | None, tuple[str, str]]:
    """Return the shape of the result and where it was given: by the input, the attribute, or a dump's output."""
    given, inputs = getattr(call.given, row), call.inputs.shape
    weights = call.inputs.metas.get("weights") if row == "weights_shape" else None
    written = call.given.spelled.get(row) or call.called.wire_names[row]
    as_input = call.inputs.spelled.get(row) or call.called.wire_names[row]
    known = call.output.shape if call.output is not None else None
    if inputs is not None:
        shape, loc = inputs, ("inputs", as_input)
        if given is not None and given != inputs:
            call.warnings.append(
                f"{as_input} was given twice: the input {dims(inputs)} was used, not the attribute {dims(given)}"
            )
    elif given is not None:
        shape, loc = given, ("attributes", written)
        if call.inputs.values_unknown:
            call.warnings.append(f"the values of the input {as_input} are not known here: the attribute was used")
    elif known is not None:
        shape, loc = known, ("outputs", call.called.wire_names[_output(call.called)])
    elif weights is not None:
        shape, loc = weights.shape, ("inputs", call.name("weights"))
    else:
        needed = row == "weights_shape" or call.inputs.values_unknown
        if needed and row not in call.given.bad and row not in call.inputs.bad:
            msg = f"{written} is required: as an input or as an attribute"
            broken.append(broken_rule(["attributes", written], msg, "missing"))
        return None, ("attributes", written)
    # Of a data tensor the batch may be empty.
    zeros = [axis for axis, size in enumerate(shape) if size == 0 and (axis or row == "weights_shape")]
    for axis in zeros:
        msg = f"{loc[1]}[{axis}] must be at least 1, but is 0"
        broken.append(broken_rule([*loc, axis], msg, "greater_than_equal"))
    if weights is not None and weights.shape != shape:
        msg = f"{call.name('weights')} must have the shape {dims(shape)} of {loc[1]}, but has {dims(weights.shape)}"
        broken.append(broken_rule(["inputs", call.name("weights"), "shape"], msg, "weights_shape"))
    if known is not None and known != shape:
        msg = f"{loc[1]} must be the output's shape, which is {dims(known)}, but is {dims(shape)}"
        broken.append(broken_rule(loc, msg, "output_shape"))
    return None if zeros else shape, loc


def _ranks(call: ParsedCall) -> Iterator[BrokenRule]:
    """Check that shapes have the rank of the first input, and lists one value per spatial axis."""
    metas = call.inputs.metas
    base = metas.get(call.base)
    if base is None or len(base.shape) not in call.called.operation.ranks:
        call.weights = call.result = None
        return
    rank, name = len(base.shape), call.name(call.base)
    for other in (row.name for row in call.called.operation.inputs[1:] if row.name in ("diff_dst", "weights")):
        meta = metas.get(other)
        if meta is not None and len(meta.shape) != rank:
            msg = f"{call.name(other)} must have {rank} dimensions like {name}, but has {len(meta.shape)}"
            yield broken_rule(["inputs", call.name(other), "shape"], msg, "rank")
            del metas[other]
    if call.weights is not None and len(call.weights) != rank:
        if call.called.operation.computes == "diff_weights":
            yield _wrong_rank(call.weights, call.weights_loc, rank, name)
        call.weights = None
    if call.result is not None and len(call.result) != rank:
        yield _wrong_rank(call.result, call.result_loc, rank, name)
        call.result = None
    yield from _lengths(call, rank - 2, name)


def _wrong_rank(shape: tuple[int, ...], loc: tuple[str, str], rank: int, base: str) -> BrokenRule:
    msg = f"{loc[1]} must have {rank} values, as {base} has {rank} dimensions, but has {len(shape)}"
    return broken_rule(loc, msg, "rank")


def _lengths(call: ParsedCall, spatial: int, base: str) -> Iterator[BrokenRule]:
    axes = (
        f"one value for each of the {spatial} spatial axes of {base}"
        if spatial > 1
        else f"1 value, as {base} has 1 spatial axis"
    )
    for attribute, may_be_empty in _LISTS:
        values: tuple[int, ...] | None = getattr(call.given, attribute)
        if values is None or len(values) == spatial or (may_be_empty and not values):
            continue
        written = call.name(attribute)
        yield broken_rule(["attributes", written], f"{written} must have {axes}, but has {len(values)}", "length")


_LISTS = (
    ("strides", False),
    ("dilations", False),
    ("pads_begin", True),
    ("pads_end", True),
    ("output_padding", False),
)
