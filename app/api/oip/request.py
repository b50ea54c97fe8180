"""The inference request object of the Open Inference Protocol: from parsed JSON to names, shapes and data locations.

Unknown members are ignored, as the protocol requires. Parameters of the request that are not the protocol's own are
attributes, which the operation checks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from app.intake.body import MOST_VALUES
from app.intake.elements import Numbers
from app.intake.tensors import Tensor
from convgrad._dtypes import DType, dtype_of_oip
from convgrad._errors import InvalidRequest, Unsupported
from schemas.broken_rules import BrokenRule, broken_rule, dims, invalid_params, safe_key, unsupported
from schemas.call import read_outputs
from schemas.frameworks import dtype_here
from schemas.tables import CalledOperation
from schemas.tensors import read_shape

__all__ = ["HEAD_LENGTH", "InferRequest", "MemoryRange", "RequestedOutput", "read_request"]

HEAD_LENGTH = "inference-header-content-length"
"""The header with the length of the JSON that the bytes of tensors follow."""

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


@dataclass(frozen=True, slots=True)
class RequestedOutput:
    """A requested output: its name as the caller spelled it, and where its elements go.

    They are bytes after the JSON if it is `binary`, in shared memory if it has a `place`, and otherwise numbers in the
    JSON.
    """

    name: str
    binary: bool
    place: MemoryRange | None = None


@dataclass(frozen=True, slots=True)
class InferRequest:
    """A well-formed request; `timeout_us` is None if the caller set none.

    An input has its elements if they are numbers. Otherwise they are at its place in shared memory if it has one, and
    else after the JSON. Without `outputs` the reply has the first output of the operation.
    """

    id: str | None
    attributes: dict[str, Any]
    options: dict[str, Any]
    timeout_us: int | None
    inputs: dict[str, Tensor]
    outputs: tuple[RequestedOutput, ...]
    places: dict[str, MemoryRange]
    """Where inputs and outputs are in shared memory, by name."""


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
    return _Reader(called, _parameters(document, "the request")).read(document, request_id)


def _list(document: Mapping[str, Any], name: str, default: object = None) -> list[Any]:
    given = document.get(name)
    given = default if given is None else given
    if not isinstance(given, list):
        raise InvalidRequest(f"{name} must be a list of tensors")
    if len(given) > _MOST_TENSORS:
        raise InvalidRequest(f"{name} must have at most {_MOST_TENSORS} tensors, but has {len(given)}")
    if not all(isinstance(entry, Mapping) and isinstance(entry.get("name"), str) for entry in given):
        raise InvalidRequest(f"every entry of {name} must be an object with a name")
    return given


def _parameters(owner: Mapping[str, Any], what: str) -> Mapping[str, Any]:
    parameters = owner.get("parameters")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise InvalidRequest(f"the parameters of {what} must be an object")
    return parameters or {}


class _Reader:
    """Read the parts of one request; the faults of its tensors are collected."""

    def __init__(self, called: CalledOperation, parameters: Mapping[str, Any]) -> None:
        self._called = called
        self._parameters = parameters
        self._places: dict[str, MemoryRange] = {}
        self._broken: list[BrokenRule] = []

    def _wrong(self, loc: list[str], message: str, kind: str) -> None:
        self._broken.append(broken_rule(loc, message, kind))

    def read(self, document: Mapping[str, Any], request_id: str | None) -> InferRequest:
        """Read the whole request."""
        called, parameters, inputs = self._called, self._parameters, dict[str, Tensor]()
        for index, given in enumerate(_list(document, "inputs")):
            tensor = self._input(given, index)
            if given["name"] in inputs:
                self._wrong(["inputs", given["name"]], f"{given['name']} is given twice", "conflict")
            elif tensor is not None:
                inputs[given["name"]] = tensor
        asked = _list(document, "outputs", [])
        outputs = self._outputs(asked)
        timeout = self._timeout(parameters.get("timeout"))
        if self._broken:
            if self._broken[0]["type"] == "unsupported_dtype":
                raise unsupported(self._broken[0]["msg"], self._broken)
            raise invalid_params(called.called_as, self._broken)
        options: dict[str, Any] = {name: parameters[name] for name in _OPTIONS if name in parameters}
        if len(outputs) > 1 or (asked and outputs[0].name != called.wire_names[called.operation.output.name]):
            options["outputs"] = [output.name for output in outputs]
        # The parameters that are not the protocol's own.
        attributes = {
            name: self._attribute(name, value)
            for name, value in parameters.items()
            if name not in _RESERVED and name not in _OPTIONS and not name.startswith(_RESERVED_PREFIX)
        }
        return InferRequest(request_id, attributes, options, timeout, inputs, outputs, self._places)

    def _attribute(self, name: str, value: Any) -> Any:
        """Parse a list or an integer in a string."""
        operation = self._called.operation
        row = operation.attribute.get(operation.attribute_spellings.get(name, ""))
        if row is None or not isinstance(value, str) or len(value) > _LONGEST_LIST:
            return value
        text = value.strip()
        if row.kind == "s64[]" and (found := _LIST.fullmatch(text)):
            digits = found[1] if found[1] is not None else found[2]
            return [int(number) for number in digits.split(",")] if digits.strip() else []
        return int(text) if row.kind == "s64" and _INTEGER.fullmatch(text) else value

    def _timeout(self, value: Any) -> int | None:
        if isinstance(value, str) and _INTEGER.fullmatch(value.strip()):
            value = int(value)
        if value is not None and not _is_size(value):
            self._wrong(["parameters", "timeout"], "timeout must be microseconds, at least 0", "range")
        return value or None  # the protocol's 0 means no timeout

    def _input(self, given: Mapping[str, Any], index: int) -> Tensor | None:
        name = safe_key(given["name"])
        name = f"inputs[{index}]" if name == "?" else name
        before, loc = len(self._broken), ["inputs", name]
        shape = read_shape(given.get("shape"), [*loc, "shape"], self._broken)
        dtype = self._datatype(given.get("datatype"), name)
        if dtype is None or shape is None:
            return None
        tensor = Tensor(dtype, shape)
        if tensor.nbytes > _INT64_MAX:
            self._wrong([*loc, "shape"], f"{name} must have fewer than 2^63 bytes", "overflow")
        else:
            self._locate(tensor, given, loc)
        return tensor if len(self._broken) == before else None

    def _datatype(self, value: Any, name: str) -> DType | None:
        if not isinstance(value, str):
            self._wrong(["inputs", name, "datatype"], f"{name} needs a datatype", "missing")
            return None
        try:
            return dtype_of_oip(value)
        except Unsupported:
            msg = (
                f"the datatype of {name} must be FP32, FP16 or BF16, FP64 with reference, or INT32 or INT64 for a shape"
            )
            here = dtype_here(value)
            msg += f"; use {here.oip}" if here is not None else ""
            self._wrong(["inputs", name, "datatype"], msg, "unsupported_dtype")
            return None

    def _locate(self, tensor: Tensor, given: Mapping[str, Any], loc: list[str]) -> None:
        """Find where the data of an input is; it must be in one place only, and have the size of its shape."""
        name, before = loc[-1], len(self._broken)
        parameters = _parameters(given, name)
        size, data, place = parameters.get("binary_data_size"), given.get("data"), self._place(parameters, name)
        if (size is not None) + (data is not None) + (place is not None) > 1:
            msg = f"{name} has more than one of data, binary_data_size and shared memory: give one"
            self._wrong(loc, msg, "conflict")
        elif place is not None:
            self._places[given["name"]] = place
            self._check_size(place.byte_size, "shared_memory_byte_size", tensor, loc)
        elif size is not None:
            if not _is_size(size):
                self._wrong(loc, f"binary_data_size of {name} must be an integer of at least 0", "int_type")
            else:
                self._check_size(size, "binary_data_size", tensor, loc)
        elif isinstance(data, list):
            tensor.elements = Numbers(data, tensor.dtype, tensor.shape)
            if (count := math.prod(tensor.shape)) > MOST_VALUES:
                msg = f"data of {name} has a shape of {count} elements, more than a body can contain"
                self._wrong(loc, msg, "size")
        elif data is not None:
            self._wrong(loc, f"data of {name} must be a list of numbers", "list_type")
        elif len(self._broken) == before:
            self._wrong(loc, f"{name} needs data, binary_data_size or shared memory", "missing")

    def _check_size(self, size: int, what: str, tensor: Tensor, loc: list[str]) -> None:
        if size != tensor.nbytes:
            needs = f"{tensor.dtype.oip} of shape {dims(tensor.shape)} needs {tensor.nbytes} bytes"
            self._wrong(loc, f"{what} of {loc[-1]} is {size}, but {needs}", "size")

    def _place(self, parameters: Mapping[str, Any], name: str) -> MemoryRange | None:
        region, size = parameters.get("shared_memory_region"), parameters.get("shared_memory_byte_size")
        offset, loc = parameters.get("shared_memory_offset", 0), ["parameters", name]
        if region is None and size is None:
            return None
        if region is None or size is None:
            self._wrong(loc, f"{name} needs both shared_memory_region and shared_memory_byte_size", "missing")
        elif not isinstance(region, str):
            self._wrong(loc, f"shared_memory_region of {name} must be a string", "string_type")
        elif not (_is_size(offset) and _is_size(size)):
            msg = f"shared_memory_offset and shared_memory_byte_size of {name} must be integers of at least 0"
            self._wrong(loc, msg, "int_type")
        else:
            return MemoryRange(region, offset, size)
        return None

    def _outputs(self, given: list[Any]) -> tuple[RequestedOutput, ...]:
        """Read the requested outputs, in either spelling of their names; by default the operation's first."""
        called, binary = self._called, self._parameters.get("binary_data_output")
        if binary is not None and not isinstance(binary, bool):
            loc = ["parameters", "binary_data_output"]
            self._wrong(loc, "binary_data_output must be a bool", "bool_type")
        if not given:
            return (RequestedOutput(called.wire_names[called.operation.output.name], binary is True),)
        names = [entry["name"] for entry in given]
        read_outputs(called, names, self._broken, lambda index: ["outputs", safe_key(names[index])])
        return tuple([self._output(entry, binary is True) for entry in given])

    def _output(self, given: Mapping[str, Any], binary: bool) -> RequestedOutput:
        name, parameters = given["name"], _parameters(given, given["name"])
        if parameters.get("classification"):
            self._wrong(["outputs", name], "classification is not supported", "unsupported")
        own = parameters.get("binary_data")
        if own is not None and not isinstance(own, bool):
            self._wrong(["outputs", name], f"binary_data of {name} must be a bool", "bool_type")
        place = self._place(parameters, name)
        if place is not None:
            self._places[name] = place
        return RequestedOutput(name, place is None and (binary if own is None else own is True), place)


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value <= _INT64_MAX
