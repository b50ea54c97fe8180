"""From tensors on the wire to segments: read the `inputs` of a call, check each one, put its bytes in order.

`read_inputs` reports every fault of every tensor in one `InvalidParams`. It checks each tensor's bytes against its own
dtype and shape; whether the tensors suit the operation is checked by `schemas.ops.resolve`, which needs only `meta`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol, get_args

import numpy as np

from app.intake.inline import InlineTensor, ReceivedData
from app.intake.lease import Lease
from app.intake.numbers import Numbers
from app.intake.sinks import NpySink, RawSink, TensorFault
from app.intake.values import declared_size
from app.pool.buffers import Segment
from app.threads import in_thread_if
from convgrad._dtypes import DTYPES, DType
from convgrad._errors import TooLarge, Unsupported
from schemas.broken_rules import BrokenRule, broken_rule, dims, invalid_params, safe_key, too_large, unsupported
from schemas.frameworks import dtype_here
from schemas.rows import MAX_DIMS, InputRows
from schemas.tensors import MAX_NUMBERS, TensorMeta, WireDType, WireTensor, read_meta, read_shape, read_tensor

__all__ = [
    "Elements",
    "Input",
    "Tensor",
    "check_begun_tensor",
    "check_shape_tensor",
    "collect_tensors",
    "npy_tensor",
    "read_inputs",
    "shape_list",
]

# Inputs that are read or collected in a millisecond.
_AT_ONCE = 64
# Reordering this much takes well under a millisecond.
_INLINE = 256 << 10
_SWAP_STEP = 1 << 18
_WHAT = "invalid inputs"
_WIRE_DTYPES = get_args(WireDType)


class Elements(Protocol):
    """What holds the elements of a tensor, or will when they have arrived."""

    async def collect(self) -> Segment:
        """Collect all elements in one segment."""

    def content(self) -> bytes:
        """Return a copy of all bytes; for small tensors."""


@dataclass(slots=True)
class Tensor:
    """One input: its dtype and shape, and what holds its elements, or None if it was only described.

    `collect_tensors` reorders the elements if they are in `fortran` order, and their bytes if those are `swapped`.
    """

    dtype: DType
    shape: tuple[int, ...]
    sink: Elements | None = None
    fortran: bool = False
    swapped: bool = False

    @property
    def meta(self) -> TensorMeta:
        """Dtype and shape, for the operation's rules."""
        return TensorMeta(self.dtype.name, self.shape)

    @property
    def nbytes(self) -> int:
        """Size of the elements in bytes."""
        return prod(self.shape) * self.dtype.itemsize


Input = Tensor | list[int]


async def read_inputs(rows: InputRows, inputs: Mapping[str, Any], lease: Lease) -> dict[str, Input]:
    """Read the `inputs` member of a call, yielding to other requests; tensors in short strings are decoded now.

    An input that is a shape becomes a list of integers, whatever its form; a tensor may be just dtype and shape.
    Raises `InvalidParams` with every fault, and the errors of allocating memory.
    """
    read: dict[str, Input] = {}
    broken: list[BrokenRule] = []
    for number, (name, value) in enumerate(inputs.items(), 1):
        if number % _AT_ONCE == 0:
            await asyncio.sleep(0)
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
        tensor = _read(value, ["inputs", name], broken, lease)
        if tensor is not None:
            has_values = is_shape and tensor.sink is not None
            read[name] = _values(tensor, ["inputs", name], broken) if has_values else tensor
    if broken:
        if all(read["type"] == "unsupported_dtype" for read in broken):
            raise unsupported(broken[0]["msg"], broken)
        raise invalid_params(_WHAT, broken)
    return read


def check_begun_tensor(name: str, description: Mapping[str, Any], memory: int) -> None:
    """Check the size of a tensor that is still arriving, if its description has arrived.

    Raises `InvalidParams` if it has too many dimensions or the body can't contain it, and `TooLarge` if it exceeds the
    `memory` of the service.
    """
    loc, size, shape = ["inputs", safe_key(name)], declared_size(description), description.get("shape")
    if isinstance(shape, list) and len(shape) > MAX_DIMS:
        broken: list[BrokenRule] = []
        read_shape(shape, [*loc, "shape"], broken)
        raise invalid_params(_WHAT, broken)
    if size is not None and size > memory:
        message = f"{loc[1]} has {size} bytes, but this service allows {memory} for a call:"
        message += f" its shape is {dims(description['shape'])}"
        raise TooLarge(message, data={"reason": "memory", "limit": memory, "value": size, "loc": loc})
    for member in ("data", "npy"):
        data = description.get(member)
        if isinstance(data, ReceivedData) and isinstance(data.fault, TensorFault):
            message = _fault_message(member, loc[1], data, data.fault)
            raise invalid_params(_WHAT, [broken_rule([*loc, member], message, data.fault.kind)])


async def collect_tensors(inputs: Mapping[str, Input], lease: Lease) -> dict[str, Segment]:
    """Collect each tensor in one segment, in C order and little-endian; return the segments by name.

    Raises `InvalidParams` for tensors that were only described.
    """
    broken = [
        broken_rule(["inputs", name], f"{name} has no data: send its elements as base64 or as numbers", "missing")
        for name, tensor in inputs.items()
        if isinstance(tensor, Tensor) and tensor.sink is None
    ]
    if broken:
        raise invalid_params(_WHAT, broken)
    segments = {}
    for number, (name, tensor) in enumerate(inputs.items(), 1):
        if number % _AT_ONCE == 0:
            await asyncio.sleep(0)
        if isinstance(tensor, Tensor):
            segments[name] = await _collect(tensor, lease)
    return segments


def npy_tensor(sink: NpySink, declared: str | None) -> Tensor:
    """Return the tensor of a received `.npy` file; raises `TensorFault` unless it has the `declared` dtype."""
    dtype, header = sink.dtype(declared), sink.header
    assert header is not None
    return Tensor(
        dtype,
        header.shape,
        sink,
        fortran=header.fortran_order and len(header.shape) > 1,
        swapped=header.big_endian,
    )


def check_shape_tensor(dtype: DType, shape: tuple[int, ...]) -> None:
    """Raise `TensorFault` unless a tensor can be a shape: one dimension, of few s32 or s64."""
    if dtype.name not in ("s32", "s64"):
        raise TensorFault("must be s32 or s64, or a JSON list of integers", "shape_dtype")
    if len(shape) != 1 or shape[0] > MAX_DIMS:
        raise TensorFault(f"must have 1 dimension of at most {MAX_DIMS} values", "rank")


def shape_list(tensor: Tensor) -> list[int]:
    """Return the values of a tensor that is a shape; raises what `check_shape_tensor` raises."""
    check_shape_tensor(tensor.dtype, tensor.shape)
    assert tensor.sink is not None
    values = np.frombuffer(tensor.sink.content(), tensor.dtype.numpy)
    return [int(value) for value in (values.byteswap() if tensor.swapped else values)]


def _values(tensor: Tensor, loc: list[str | int], broken: list[BrokenRule]) -> list[int]:
    try:
        return shape_list(tensor)
    except TensorFault as fault:
        broken.append(broken_rule(loc, f"{loc[-1]} {fault.message}", fault.kind))
        return []


def _read(value: Any, loc: list[str | int], broken: list[BrokenRule], lease: Lease) -> Tensor | None:
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
            sink = _sink(wire.payload, "npy", lease)
            assert isinstance(sink, NpySink)
            return npy_tensor(sink, wire.dtype)
        tensor = _described(wire, loc, broken)
        if tensor is not None and wire.member == "data":
            tensor.sink = _data(wire.payload, tensor, lease)
    except TensorFault as fault:
        member = wire.member or "data"
        message = _fault_message(member, loc[-1], wire.payload, fault)
        broken.append(broken_rule([*loc, member], message, fault.kind))
        return None
    except Unsupported as error:
        broken.append(broken_rule([*loc, "npy"], f"npy of {loc[-1]}: {error.message}", "unsupported_dtype"))
        return None
    except TooLarge as error:
        raise too_large(error, loc, str(loc[-1])) from None
    return tensor


def _fault_message(member: str, name: str | int, payload: object, fault: TensorFault) -> str:
    """Return the message of a tensor's fault: those of numbers continue a sentence."""
    colon = "" if isinstance(payload, Numbers | list) else ":"
    return f"{member} of {name}{colon} {fault.message}"


def _described(wire: WireTensor, loc: list[str | int], broken: list[BrokenRule]) -> Tensor | None:
    meta = read_meta({"dtype": wire.dtype, "shape": wire.shape}, loc, broken)
    return None if meta is None else Tensor(DTYPES[meta.dtype], meta.shape)


def _data(value: Any, tensor: Tensor, lease: Lease) -> RawSink | Numbers:
    if isinstance(value, list):
        value = Numbers.of(value, lease, (tensor.dtype, tensor.shape), most=MAX_NUMBERS)
    if isinstance(value, Numbers):
        value.check(tensor.dtype, tensor.shape)
        return value
    sink = _sink(value, "data", lease, tensor.nbytes)
    if sink.nbytes != tensor.nbytes:
        raise TensorFault(f"dtype and shape need {tensor.nbytes} bytes, but {sink.nbytes} arrived", "size")
    return sink


def _sink(value: Any, key: str, lease: Lease, expected: int | None = None) -> RawSink:
    if isinstance(value, str):
        text = value.encode("ascii", "replace")
        size = len(text) // 4 * 3 - text[-2:].count(b"=")
        if expected is not None and size != expected:
            raise TensorFault(f"dtype and shape need {expected} bytes, but {size} arrived", "size")
        value = InlineTensor(key, lease, expected=expected, raw_bound=len(text) + 3)
        value.write(text)
        value.close()
    if not isinstance(value, InlineTensor):
        raise TensorFault("must be base64 text", "string_type")
    if value.fault is not None:
        raise value.fault.with_traceback(None)
    return value.sink


async def _collect(tensor: Tensor, lease: Lease) -> Segment:
    assert tensor.sink is not None
    segment, large = await tensor.sink.collect(), tensor.nbytes > _INLINE
    # The request may be cancelled before a thread ends: the thread's views keep the memory from being reused.
    if tensor.fortran:
        source, segment = segment, await lease.acquire_async(tensor.nbytes)
        await in_thread_if(large, _transpose, tensor, source, segment)
        lease.release(source)
    if tensor.swapped:
        await in_thread_if(large, _swap, tensor, segment)
    return segment


def _transpose(tensor: Tensor, source: Segment, target: Segment) -> None:
    bits, count = np.dtype(f"u{tensor.dtype.itemsize}"), tensor.nbytes // tensor.dtype.itemsize
    stored = np.frombuffer(source.view, bits, count)
    into = np.frombuffer(target.view, bits, count)
    np.copyto(into.reshape(tensor.shape), stored.reshape(tensor.shape, order="F"))


def _swap(tensor: Tensor, segment: Segment) -> None:
    """Swap the bytes of every element in place; in steps, because NumPy holds the GIL during each."""
    bits, count = np.dtype(f"u{tensor.dtype.itemsize}"), tensor.nbytes // tensor.dtype.itemsize
    elements = np.frombuffer(segment.view, bits, count)
    for start in range(0, count, _SWAP_STEP):
        elements[start : start + _SWAP_STEP].byteswap(inplace=True)
