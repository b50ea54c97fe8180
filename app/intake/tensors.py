"""From tensors on the wire to the memory that kernels read: read the `inputs` of a call, put their bytes in order.

Reading takes descriptions and sizes only, and reports every fault of every tensor in one `InvalidParams`; whether the
tensors suit the operation is checked by `schemas.ops.resolve`, which needs only `meta`. Text is decoded after that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, get_args

import numpy as np

from app.intake.elements import Base64, Elements, Numbers, Sink, TensorFault, npy_dtype
from app.intake.lease import Lease
from app.pool.buffers import Memory, Segment
from app.threads import in_thread_if
from convgrad._dtypes import DTYPES, DType
from convgrad._errors import ParseError, TooLarge, Unsupported
from convgrad._npy import HEADER_LIMIT, NpyHeader, parse_header
from schemas.broken_rules import BrokenRule, broken_rule, invalid_params, too_large, unsupported
from schemas.frameworks import dtype_here
from schemas.rows import MAX_DIMS, InputRows
from schemas.tensors import MAX_NUMBERS, TensorMeta, WireDType, WireTensor, read_meta, read_tensor

__all__ = [
    "Input",
    "Tensor",
    "check_shape_tensor",
    "collect_tensors",
    "npy_tensor",
    "read_inputs",
    "shape_list",
]

# Inputs that are read or collected in a millisecond.
_AT_ONCE = 16
# Decoding or reordering this much takes well under a millisecond.
_INLINE = 128 << 10
_WHAT = "invalid inputs"
_WIRE_DTYPES = get_args(WireDType)
# Text that holds the header of any file that NumPy writes for a tensor; that of any file that is accepted.
_USUAL_HEADER, _LONGEST_HEADER = 400, 4 * -(-(HEADER_LIMIT + 12) // 3)


@dataclass(slots=True)
class Tensor:
    """One input: its dtype and shape, and what holds its elements, or None if it was only described.

    `collect_tensors` reorders the elements if they are in `fortran` order, and their bytes if those are `swapped`.
    """

    dtype: DType
    shape: tuple[int, ...]
    elements: Elements | None = None
    fortran: bool = False
    swapped: bool = False
    member: str | None = None
    """Member of the JSON object that has its data."""

    @property
    def meta(self) -> TensorMeta:
        """Dtype and shape, for the operation's rules."""
        return TensorMeta(self.dtype.name, self.shape)

    @property
    def nbytes(self) -> int:
        """Size of the elements in bytes."""
        return prod(self.shape) * self.dtype.itemsize


Input = Tensor | list[int]


def read_inputs(rows: InputRows, inputs: Mapping[str, Any]) -> dict[str, Input]:
    """Read the `inputs` member of a call.

    An input that is a shape becomes a list of integers, whatever its form; a tensor may be just dtype and shape.
    Raises `InvalidParams` or `Unsupported` with every fault.
    """
    read: dict[str, Input] = {}
    broken: list[BrokenRule] = []
    for name, value in inputs.items():
        row = rows.input_spellings.get(name)
        if value is None or row is None or isinstance(value, Tensor):
            # The operation rejects unknown names, together with its other errors.
            if value is not None:
                read[name] = value if isinstance(value, Tensor) else []
            continue
        is_shape = row == rows.shape_input
        if is_shape and isinstance(value, list):
            read[name] = value  # its elements are checked with the attributes
            continue
        tensor = _read(value, ["inputs", name], broken)
        if tensor is not None:
            has_values = is_shape and tensor.elements is not None
            read[name] = _values(tensor, ["inputs", name], broken) if has_values else tensor
    if broken:
        if all(rule["type"] == "unsupported_dtype" for rule in broken):
            raise unsupported(broken[0]["msg"], broken)
        raise invalid_params(_WHAT, broken)
    return read


async def collect_tensors(
    inputs: Mapping[str, Input], lease: Lease, *, here: bool = False, need_all: bool = True
) -> dict[str, Memory]:
    """Collect each tensor in one piece of memory, in C order and little-endian; return the memory by name.

    It is that of segments, unless only this process computes `here`. Raises `InvalidParams` for tensors that were only
    described, if they are needed, or whose text is none of theirs.
    """
    memory: dict[str, Memory] = {}
    broken = [
        broken_rule(["inputs", name], f"{name} has no data: send its elements as base64 or as numbers", "missing")
        for name, tensor in inputs.items()
        if need_all and isinstance(tensor, Tensor) and tensor.elements is None
    ]
    for number, (name, tensor) in enumerate(() if broken else inputs.items(), 1):
        if number % _AT_ONCE == 0:
            await asyncio.sleep(0)
        if isinstance(tensor, Tensor) and tensor.elements is not None:
            try:
                memory[name] = await _collect(tensor, lease, here)
            except TensorFault as fault:
                broken.append(_broken(tensor.elements, ["inputs", name], tensor.member, fault))
    if broken:
        raise invalid_params(_WHAT, broken)
    return memory


def npy_tensor(header: NpyHeader, declared: str | None, elements: Elements, member: str | None = None) -> Tensor:
    """Return the tensor of a `.npy` file; raises `TensorFault` unless it has the `declared` dtype."""
    fortran = header.fortran_order and len(header.shape) > 1
    return Tensor(npy_dtype(header, declared), header.shape, elements, fortran, header.big_endian, member)


def check_shape_tensor(dtype: DType, shape: tuple[int, ...]) -> None:
    """Raise `TensorFault` unless a tensor can be a shape: one dimension, of few s32 or s64."""
    if dtype.name not in ("s32", "s64"):
        raise TensorFault("must be s32 or s64, or a JSON list of integers", "shape_dtype")
    if len(shape) != 1 or shape[0] > MAX_DIMS:
        raise TensorFault(f"must have 1 dimension of at most {MAX_DIMS} values", "rank")


def shape_list(tensor: Tensor) -> list[int]:
    """Return the values of a tensor that is a shape; raises what `check_shape_tensor` raises."""
    check_shape_tensor(tensor.dtype, tensor.shape)
    assert tensor.elements is not None
    values = np.frombuffer(tensor.elements.content(), tensor.dtype.numpy)
    return [int(value) for value in (values.byteswap() if tensor.swapped else values)]


def _values(tensor: Tensor, loc: list[str | int], broken: list[BrokenRule]) -> list[int]:
    try:
        return shape_list(tensor)
    except TensorFault as fault:
        inside = fault.kind not in ("shape_dtype", "rank")
        broken.append(
            _broken(tensor.elements, loc, tensor.member, fault)
            if inside
            else broken_rule(loc, f"{loc[-1]} {fault.message}", fault.kind)
        )
        return []


def _read(value: Any, loc: list[str | int], broken: list[BrokenRule]) -> Tensor | None:
    wire = read_tensor(value, loc, broken)
    if wire is None:
        return None
    if wire.dtype is not None and wire.dtype not in _WIRE_DTYPES:
        here = dtype_here(wire.dtype)
        message = f"the dtype of {loc[-1]} must be one of {', '.join(_WIRE_DTYPES)}"
        message += f"; use {here.name}" if here is not None and here.name in _WIRE_DTYPES else ""
        broken.append(broken_rule([*loc, "dtype"], message, "unsupported_dtype"))
        return None
    try:
        if wire.member == "npy":
            return _npy(wire)
        meta = read_meta({"dtype": wire.dtype, "shape": wire.shape}, loc, broken)
        return None if meta is None else _described(wire, meta)
    except TensorFault as fault:
        broken.append(_broken(wire.payload, loc, wire.member, fault))
    except Unsupported as error:
        broken.append(broken_rule([*loc, "npy"], f"npy of {loc[-1]}: {error.message}", "unsupported_dtype"))
    except TooLarge as error:
        raise too_large(error, loc, str(loc[-1])) from None
    return None


def _broken(payload: object, loc: list[str | int], member: str | None, fault: TensorFault) -> BrokenRule:
    """Return the broken rule of a tensor's fault: those of numbers continue a sentence."""
    colon = "" if isinstance(payload, Numbers | list) else ":"
    where = loc if member is None else [*loc, member]
    return broken_rule(where, f"{member or 'data'} of {loc[-1]}{colon} {fault.message}", fault.kind)


def _described(wire: WireTensor, meta: TensorMeta) -> Tensor:
    tensor, value = Tensor(DTYPES[meta.dtype], meta.shape, member=wire.member), wire.payload
    if wire.member is None:
        return tensor
    if isinstance(value, list):
        if (count := prod(meta.shape)) > MAX_NUMBERS:
            binary = "as base64 in data or npy, or to /v1 as a .npy part of multipart/form-data"
            message = f"has {count} numbers by its shape, but a list may have {MAX_NUMBERS}: send it {binary}"
            raise TensorFault(message, "too_long")
        tensor.elements = Numbers(value, tensor.dtype, tensor.shape)
    else:
        tensor.elements = _sized(Base64(value), tensor.nbytes)
    return tensor


def _npy(wire: WireTensor) -> Tensor:
    text = Base64(wire.payload)
    try:
        header = parse_header(text.decoded(_USUAL_HEADER)) or parse_header(text.decoded(_LONGEST_HEADER))
    except ParseError as error:
        raise TensorFault(error.message, "npy") from None
    if header is None:
        raise TensorFault("the .npy data ends inside its header", "npy")
    elements = _sized(Base64(wire.payload, header.offset), header.nbytes)
    return npy_tensor(header, wire.dtype, elements, "npy")


def _sized(text: Base64, nbytes: int) -> Base64:
    if len(text.text) % 4 == 0 and text.nbytes != nbytes:
        raise TensorFault(f"dtype and shape need {nbytes} bytes, but {text.nbytes} arrived", "size")
    return text


async def _collect(tensor: Tensor, lease: Lease, here: bool) -> Memory:
    elements, large = tensor.elements, tensor.nbytes > _INLINE
    assert elements is not None
    if isinstance(elements, Sink) and elements.segment is not None:
        memory: Memory = elements.segment
    else:
        memory = Memory(elements.content()) if here else await lease.acquire(tensor.nbytes)
        if not here:
            await in_thread_if(large, elements.fill, memory.view[: tensor.nbytes])
    if not (tensor.fortran or tensor.swapped):
        return memory
    # The request may be cancelled before a thread ends: the thread's views keep the memory from being reused.
    ordered = Memory(bytearray(tensor.nbytes)) if here else await lease.acquire(tensor.nbytes)
    await in_thread_if(large, _reorder, tensor, memory, ordered)
    if isinstance(memory, Segment):
        lease.release(memory)
    return ordered


def _reorder(tensor: Tensor, source: Memory, target: Memory) -> None:
    """Copy the elements to C order and little-endian bytes, without the GIL."""
    size, order = tensor.dtype.itemsize, ">" if tensor.swapped else "<"
    stored = np.frombuffer(source.view, f"{order}u{size}", tensor.nbytes // size)
    into = np.frombuffer(target.view, f"<u{size}", tensor.nbytes // size)
    np.copyto(into.reshape(tensor.shape), stored.reshape(tensor.shape, order="F" if tensor.fortran else "C"))
