"""The inference request object of the Open Inference Protocol: from parsed JSON to names, shapes and data locations.

Unknown members are ignored, as the protocol requires. Parameters of the request that are not the protocol's own are
attributes, which the operation checks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from app.intake.body import MOST_VALUES
from convgrad._dtypes import DType, dtype_of_oip
from convgrad._errors import InvalidRequest, Unsupported
from schemas.broken_rules import BrokenRule, broken_rule, dims, invalid_params, safe_key, unsupported
from schemas.call import read_outputs
from schemas.frameworks import dtype_here
from schemas.tables import CalledOperation
from schemas.tensors import read_shape

__all__ = ["InferRequest", "InputTensor", "MemoryRange", "RequestedOutput", "read_request"]

Source = Literal["json", "binary", "region"]

_MOST_TENSORS = 64
_INT64_MAX = 2**63 - 1
_LONGEST_LIST = 1024
_NUMBERS = r"-?\d{1,19}\s*(?:,\s*-?\d{1,19}\s*)*"
_LIST = re.compile(rf"\[\s*((?:{_NUMBERS})?)\]|({_NUMBERS})", re.ASCII)
_INTEGER = re.compile(r"-?\d{1,19}", re.ASCII)
# The protocol's own parameters; sequences and priorities are ignored.
_RESERVED = frozenset(
    {"binary_data_output", "headers", "priority", "sequence_end", "sequence_id", "sequence_start", "timeout"}
)
_RESERVED_PREFIX = "triton_"
_OPTIONS = ("reference", "reproducible", "algorithm")


@dataclass(frozen=True, slots=True)
class MemoryRange:
    """A range of bytes in a registered shared-memory region."""

    region: str
    offset: int
    byte_size: int


@dataclass(slots=True)
class InputTensor:
    """One input: its description in the head, and where its data is or will come from."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    source: Source
    numbers: list[Any] | None = None
    place: MemoryRange | None = None
    nbytes: int = field(init=False)
    """Size of the elements in bytes."""

    def __post_init__(self) -> None:
        self.nbytes = math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class RequestedOutput:
    """A requested output: its name as the caller spelled it, and where its elements go.

    They are bytes after the JSON if it is `binary`, in shared memory if it has a `place`, and otherwise numbers in the
    JSON.
    """

    name: str
    binary: bool
    place: MemoryRange | None = None

    @property
    def in_json(self) -> bool:
        """Whether the elements are numbers in the JSON."""
        return not self.binary and self.place is None


@dataclass(slots=True)
class InferRequest:
    """A well-formed request; `timeout_us` is None if the caller set none.

    Without `outputs` the reply has the first output of the operation.
    """

    id: str | None
    attributes: dict[str, Any]
    options: dict[str, Any]
    timeout_us: int | None
    inputs: list[InputTensor]
    outputs: tuple[RequestedOutput, ...]
    places: dict[str, MemoryRange] = field(init=False)
    """Where inputs and outputs are in shared memory, by name."""

    def __post_init__(self) -> None:
        self.places = {tensor.name: tensor.place for tensor in self.inputs if tensor.place is not None}
        self.places |= {output.name: output.place for output in self.outputs if output.place is not None}


def read_request(called: CalledOperation, document: Any) -> InferRequest:
    """Read an inference request.

    Raises `InvalidRequest` when its structure is wrong, `InvalidParams` with every fault of its tensors and
    `Unsupported` for a datatype that no operation has.
    """
    if not isinstance(document, Mapping):
        raise InvalidRequest("the inference request must be a JSON object")
    request_id = document.get("id")
    if request_id is not None and not isinstance(request_id, str):
        raise InvalidRequest("id must be a string")
    parameters = _parameters(document, "the request")
    broken: list[BrokenRule] = []
    inputs = [
        tensor
        for index, given in enumerate(_list(document, "inputs", required=True))
        if (tensor := _input(given, index, broken)) is not None
    ]
    names = [tensor.name for tensor in inputs]
    broken += [
        broken_rule(["inputs", name], f"{name} is given twice", "conflict")
        for name in dict.fromkeys(names)
        if names.count(name) > 1
    ]
    binary = parameters.get("binary_data_output")
    asked = _list(document, "outputs")
    outputs = _outputs(called, asked, binary is True, broken)
    if binary is not None and not isinstance(binary, bool):
        broken.append(
            broken_rule(["parameters", "binary_data_output"], "binary_data_output must be a bool", "bool_type")
        )
    timeout = _timeout(parameters.get("timeout"), broken)
    if broken:
        if broken[0]["type"] == "unsupported_dtype":
            raise unsupported(broken[0]["msg"], broken)
        raise invalid_params(called.called_as, broken)
    options = _options(parameters)
    if len(outputs) > 1 or (asked and outputs[0].name != called.wire_names[called.operation.output.name]):
        options["outputs"] = [output.name for output in outputs]
    return InferRequest(request_id, _attributes(called, parameters), options, timeout, inputs, outputs)


def _list(document: Mapping[str, Any], name: str, *, required: bool = False) -> list[Any]:
    given = document.get(name)
    if given is None and not required:
        return []
    if not isinstance(given, list):
        raise InvalidRequest(f"{name} must be a list of tensors")
    if len(given) > _MOST_TENSORS:
        raise InvalidRequest(f"{name} must have at most {_MOST_TENSORS} tensors, but has {len(given)}")
    if not all(isinstance(entry, Mapping) and isinstance(entry.get("name"), str) for entry in given):
        raise InvalidRequest(f"every entry of {name} must be an object with a name")
    return given


def _parameters(owner: Mapping[str, Any], what: str) -> Mapping[str, Any]:
    parameters = owner.get("parameters")
    if parameters is None:
        return {}
    if not isinstance(parameters, Mapping):
        raise InvalidRequest(f"the parameters of {what} must be an object")
    return parameters


def _attributes(called: CalledOperation, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters that are not the protocol's own, parsing lists and integers in strings."""
    return {
        name: _value(called, name, value)
        for name, value in parameters.items()
        if name not in _RESERVED and name not in _OPTIONS and not name.startswith(_RESERVED_PREFIX)
    }


def _options(parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {name: parameters[name] for name in _OPTIONS if name in parameters}


def _value(called: CalledOperation, name: str, value: Any) -> Any:
    row = called.operation.attribute.get(called.operation.attribute_spellings.get(name, ""))
    if row is None or not isinstance(value, str) or len(value) > _LONGEST_LIST:
        return value
    text = value.strip()
    if row.kind == "s64[]" and (found := _LIST.fullmatch(text)):
        digits = found[1] if found[1] is not None else found[2]
        return [int(number) for number in digits.split(",")] if digits.strip() else []
    return int(text) if row.kind == "s64" and _INTEGER.fullmatch(text) else value


def _timeout(value: Any, broken: list[BrokenRule]) -> int | None:
    if isinstance(value, str) and _INTEGER.fullmatch(value.strip()):
        value = int(value)
    if value is None:
        return None
    if type(value) is not int or not 0 <= value <= _INT64_MAX:
        broken.append(broken_rule(["parameters", "timeout"], "timeout must be microseconds, at least 0", "range"))
        return None
    return value or None  # the protocol's 0 means no timeout


def _input(given: Mapping[str, Any], index: int, broken: list[BrokenRule]) -> InputTensor | None:
    name = safe_key(given["name"])
    name = f"inputs[{index}]" if name == "?" else name
    before = len(broken)
    shape = read_shape(given.get("shape"), ["inputs", name, "shape"], broken)
    dtype = _datatype(given.get("datatype"), name, broken)
    if dtype is None or shape is None:
        return None
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes > _INT64_MAX:
        broken.append(broken_rule(["inputs", name, "shape"], f"{name} must have fewer than 2^63 bytes", "overflow"))
        return None
    tensor = InputTensor(given["name"], dtype, shape, "json")
    _locate(tensor, given, name, broken)
    return tensor if len(broken) == before else None


def _datatype(value: Any, name: str, broken: list[BrokenRule]) -> DType | None:
    if not isinstance(value, str):
        broken.append(broken_rule(["inputs", name, "datatype"], f"{name} needs a datatype", "missing"))
        return None
    try:
        return dtype_of_oip(value)
    except Unsupported:
        msg = f"the datatype of {name} must be FP32, FP16 or BF16, FP64 with reference, or INT32 or INT64 for a shape"
        here = dtype_here(value)
        msg += f"; use {here.oip}" if here is not None else ""
        broken.append(broken_rule(["inputs", name, "datatype"], msg, "unsupported_dtype"))
        return None


def _locate(tensor: InputTensor, given: Mapping[str, Any], name: str, broken: list[BrokenRule]) -> None:
    """Find where the data of an input is; it must be in one place only, and have the size of its shape."""
    parameters = _parameters(given, name)
    loc = ["inputs", name]
    size, data = parameters.get("binary_data_size"), given.get("data")
    tensor.place = _place(parameters, name, broken)
    ways = [size is not None, data is not None, tensor.place is not None]
    if sum(ways) > 1:
        msg = f"{name} has more than one of data, binary_data_size and shared memory: give one"
        broken.append(broken_rule(loc, msg, "conflict"))
    elif tensor.place is not None:
        tensor.source = "region"
        _check_size(tensor.place.byte_size, "shared_memory_byte_size", tensor, name, broken)
    elif size is not None:
        tensor.source = "binary"
        if type(size) is not int or not 0 <= size <= _INT64_MAX:
            broken.append(broken_rule(loc, f"binary_data_size of {name} must be an integer of at least 0", "int_type"))
        else:
            _check_size(size, "binary_data_size", tensor, name, broken)
    elif isinstance(data, list):
        tensor.numbers = data
        if math.prod(tensor.shape) > MOST_VALUES:
            msg = f"data of {name} has a shape of {math.prod(tensor.shape)} elements, more than a body can contain"
            broken.append(broken_rule(loc, msg, "size"))
    elif data is not None:
        broken.append(broken_rule(loc, f"data of {name} must be a list of numbers", "list_type"))
    elif not any(found["loc"][:2] == loc for found in broken):
        broken.append(broken_rule(loc, f"{name} needs data, binary_data_size or shared memory", "missing"))


def _check_size(size: int, what: str, tensor: InputTensor, name: str, broken: list[BrokenRule]) -> None:
    if size != tensor.nbytes:
        needs = f"{tensor.dtype.oip} of shape {dims(tensor.shape)} needs {tensor.nbytes} bytes"
        msg = f"{what} of {name} is {size}, but {needs}"
        broken.append(broken_rule(["inputs", name], msg, "size"))


def _place(parameters: Mapping[str, Any], name: str, broken: list[BrokenRule]) -> MemoryRange | None:
    region, size = parameters.get("shared_memory_region"), parameters.get("shared_memory_byte_size")
    offset = parameters.get("shared_memory_offset", 0)
    if region is None and size is None:
        return None
    loc = ["parameters", name]
    if region is None or size is None:
        msg = f"{name} needs both shared_memory_region and shared_memory_byte_size"
        broken.append(broken_rule(loc, msg, "missing"))
    elif not isinstance(region, str):
        broken.append(broken_rule(loc, f"shared_memory_region of {name} must be a string", "string_type"))
    elif not all(type(value) is int and 0 <= value <= _INT64_MAX for value in (offset, size)):
        msg = f"shared_memory_offset and shared_memory_byte_size of {name} must be integers of at least 0"
        broken.append(broken_rule(loc, msg, "int_type"))
    else:
        return MemoryRange(region, offset, size)
    return None


def _outputs(
    called: CalledOperation, given: list[Any], binary: bool, broken: list[BrokenRule]
) -> tuple[RequestedOutput, ...]:
    """Read the requested outputs, in either spelling of their names; by default the operation's first."""
    if not given:
        return (RequestedOutput(called.wire_names[called.operation.output.name], binary),)
    names = [entry["name"] for entry in given]
    read_outputs(called, names, broken, lambda index: ["outputs", safe_key(names[index])])
    return tuple([_output(entry, binary, broken) for entry in given])


def _output(given: Mapping[str, Any], binary: bool, broken: list[BrokenRule]) -> RequestedOutput:
    name, parameters = given["name"], _parameters(given, given["name"])
    if parameters.get("classification"):
        broken.append(broken_rule(["outputs", name], "classification is not supported", "unsupported"))
    own = parameters.get("binary_data")
    if own is not None and not isinstance(own, bool):
        broken.append(broken_rule(["outputs", name], f"binary_data of {name} must be a bool", "bool_type"))
    place = _place(parameters, name, broken)
    return RequestedOutput(name, place is None and (binary if own is None else own is True), place)
