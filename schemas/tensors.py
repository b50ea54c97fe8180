"""Tensors in requests: their dtype, shape and encoding, without their data.

A tensor in JSON is its elements with dtype and shape, as base64 or numbers, or a whole `.npy` file as base64; in
`ops.validate` and in the `request` part of a multipart body it may be less. Data is never decoded here:
`WireTensor.payload` is the JSON value, or the object that the body's reader put in its place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from math import prod
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from convgrad._dtypes import DTYPES
from schemas.broken_rules import BrokenRule, broken_rule, members_rule, number, safe_key
from schemas.rows import MAX_DIMS
from schemas.shapes import INT64_MAX, elements
from schemas.tables import near_miss

__all__ = [
    "MAX_LISTED",
    "MAX_NUMBERS",
    "MAX_OUTPUTS",
    "DataTensor",
    "NpyTensor",
    "TensorDescription",
    "TensorMeta",
    "TensorReply",
    "TensorSpec",
    "WireTensor",
    "listed",
    "read_meta",
    "read_shape",
    "read_tensor",
]

WireDType = Literal["f32", "f16", "bf16", "f64", "s32"]
# Tools that make up a value take the largest number, and any text for base64, unless they are given an example.
Size = Annotated[int, Field(strict=True, ge=0, le=INT64_MAX, examples=[1])]
Shape = Annotated[list[Size], Field(max_length=MAX_DIMS, examples=[[1, 1, 2]])]
Base64 = Annotated[str, Field(json_schema_extra={"contentEncoding": "base64"}, examples=["AACAPwAAAEA="])]

MAX_NUMBERS = 1_000_000
"""The most elements of a tensor that is a list of numbers in a request."""
MAX_LISTED = 1_000_000
"""The most elements of an output that is a list of numbers in a reply."""
MAX_OUTPUTS = 16
"""The most outputs that a call may request."""

_NUMBERS = (
    f"Or a list of at most {MAX_NUMBERS} numbers, flat or nested like the shape; "
    '`"NaN"`, `"Infinity"` and `"-Infinity"` are strings.'
)

# Other members of a logical tensor in oneDNN's graph dumps. They are ignored, strides too: data is in C order.
_DUMPED = frozenset({"id", "stride", "layout_type", "property_type"})
_MEMBERS = ("dtype", "shape", "data", "npy")


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """The oneDNN name of a tensor's dtype, and its shape."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor of a resolved call: canonical name, dtype and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def as_json(self) -> dict[str, Any]:
        """Describe the tensor, without its name, as JSON."""
        return {"dtype": self.dtype, "shape": list(self.shape)}


@dataclass(frozen=True, slots=True)
class WireTensor:
    """A tensor of a request: its description, and its data or where that is.

    `member` is `data` (elements in C order: little-endian bytes, or numbers), `npy` (a file), or None without data.
    """

    dtype: str | None
    shape: tuple[int, ...] | None
    member: Literal["data", "npy"] | None = None
    payload: Any = None

    @property
    def meta(self) -> TensorMeta | None:
        """The tensor's dtype and shape, if both are known without its data."""
        return None if self.dtype is None or self.shape is None else TensorMeta(self.dtype, self.shape)


class _Closed(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class DataTensor(_Closed):
    """A tensor as raw bytes, or as numbers."""

    dtype: WireDType
    shape: Shape
    data: Base64 | list[Any] = Field(
        description=f"Little-endian elements in C order, as base64. {_NUMBERS}", examples=[[[[1, 2]]]]
    )


class NpyTensor(_Closed):
    """A tensor as a `.npy` file."""

    npy: Base64 = Field(description="A whole .npy file, as base64.")
    dtype: WireDType | None = Field(default=None, description="Needed for bf16, which .npy can't name.")


class TensorDescription(_Closed):
    """A tensor without its data: for `ops.validate`."""

    dtype: WireDType
    shape: Shape


class TensorReply(_Closed):
    """An output tensor in the requested encoding; a streamed one has a checksum instead of data."""

    dtype: WireDType
    shape: Shape | None = None
    data: Base64 | list[Any] | None = None
    npy: Base64 | None = None
    sha256: str | None = None


def listed(shape: Sequence[int]) -> int:
    """Return how many entries the nested lists of a tensor have at their widest level: its elements, if it has any."""
    return prod(takewhile(bool, shape))


def read_shape(value: object, loc: list[str | int], broken: list[BrokenRule]) -> tuple[int, ...] | None:
    """Return a shape as a tuple of 64-bit sizes, or None after appending to `broken`."""
    if not isinstance(value, list | tuple):
        broken.append(broken_rule(loc, f"{_where(loc)} must be a list of integers", "list_type"))
        return None
    if len(value) > MAX_DIMS:
        msg = f"{_where(loc)} must have at most {MAX_DIMS} dimensions, but has {len(value)}"
        broken.append(broken_rule(loc, msg, "too_long"))
        return None
    before = len(broken)
    for axis, size in enumerate(value):
        if type(size) is not int:
            msg = f"size {axis} of {_where(loc)} must be an integer"
            broken.append(broken_rule([*loc, axis], msg, "int_type"))
        elif not 0 <= size <= INT64_MAX:
            msg = f"size {axis} of {_where(loc)} must be from 0 to {INT64_MAX}, but is {number(size)}"
            broken.append(broken_rule([*loc, axis], msg, "range"))
    return tuple(value) if len(broken) == before else None


def read_meta(value: object, loc: list[str | int], broken: list[BrokenRule]) -> TensorMeta | None:
    """Return dtype and shape of a tensor that must have both, or None after appending to `broken`.

    The number of bytes must be less than 2^63, so that it can't overflow later.
    """
    if isinstance(value, TensorMeta):
        dtype: object = value.dtype
        shape: object = value.shape
    elif isinstance(value, Mapping):
        dtype, shape = value.get("dtype"), value.get("shape")
    else:
        broken.append(broken_rule(loc, f"{_where(loc)} must be a tensor with dtype and shape", "tensor_type"))
        return None
    if not isinstance(dtype, str):
        broken.append(broken_rule([*loc, "dtype"], f"{_where(loc)} needs a dtype", "missing"))
    sizes = read_shape(shape, [*loc, "shape"], broken)
    if sizes is None or not isinstance(dtype, str):
        return None
    known = DTYPES.get(dtype)
    if elements(sizes) * (known.itemsize if known else 1) > INT64_MAX:
        msg = f"{_where(loc)} must have fewer than 2^63 bytes"
        broken.append(broken_rule([*loc, "shape"], msg, "overflow"))
        return None
    return TensorMeta(dtype, sizes)


def read_tensor(value: object, loc: list[str | int], broken: list[BrokenRule]) -> WireTensor | None:
    """Return a tensor of a request in any of its forms, or None after appending to `broken`."""
    if not isinstance(value, Mapping):
        broken.append(
            broken_rule(loc, f"{_where(loc)} must be a tensor: an object with dtype, shape and data", "tensor_type")
        )
        return None
    too_many = members_rule(value, loc)
    if too_many is not None:
        broken.append(too_many)
        return None
    before = len(broken)
    _unknown_members(value, loc, broken)
    dtype, shape = value.get("dtype"), value.get("shape")
    if dtype is not None and not isinstance(dtype, str):
        broken.append(broken_rule([*loc, "dtype"], f"the dtype of {_where(loc)} must be a string", "string_type"))
    sizes = None if shape is None else read_shape(shape, [*loc, "shape"], broken)
    member = _member(value, loc, broken)
    if len(broken) > before:
        return None
    payload = None if member is None else value[member]
    return WireTensor(dtype if isinstance(dtype, str) else None, sizes, member, payload)


def _unknown_members(value: Mapping[Any, Any], loc: list[str | int], broken: list[BrokenRule]) -> None:
    for key in value:
        if key not in _MEMBERS and key not in _DUMPED:
            name, hint = safe_key(key), near_miss(key, _MEMBERS, broken)
            msg = f"a tensor may have only dtype, shape and data, or npy, but {_where(loc)} has another member"
            broken.append(broken_rule([*loc, name], f"{msg}; did you mean {hint}?" if hint else msg, "unknown_member"))


def _member(value: Mapping[Any, Any], loc: list[str | int], broken: list[BrokenRule]) -> Literal["data", "npy"] | None:
    data, npy = value.get("data"), value.get("npy")
    if data is not None and npy is not None:
        broken.append(broken_rule(loc, f"{_where(loc)} has both data and npy: give one", "conflict"))
    if data is None and npy is None:
        return None
    member = "data" if data is not None else "npy"
    # The body's reader may have replaced the value by an object of its own; other JSON values are errors.
    wrong = (bool, int, float, tuple, dict) + ((list,) if member == "npy" else ())
    if isinstance(value[member], wrong):
        rule = "must be base64 text" + (" or a list of numbers" if member == "data" else "")
        broken.append(broken_rule([*loc, member], f"{member} of {_where(loc)} {rule}", "string_type"))
    if member == "npy":
        if value.get("shape") is not None:
            broken.append(broken_rule([*loc, "shape"], f"the npy file of {_where(loc)} has its own shape", "conflict"))
        return "npy"
    broken.extend(
        broken_rule([*loc, needed], f"{_where(loc)} has data and therefore needs a {needed}", "missing")
        for needed in ("dtype", "shape")
        if value.get(needed) is None
    )
    return "data"


def _where(loc: list[str | int]) -> str:
    """Return `src` or `the shape of src` for the place of a tensor in a call."""
    return f"the shape of {loc[-2]}" if loc[-1] == "shape" and len(loc) > 1 else str(loc[-1])
