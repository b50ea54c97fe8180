"""Wire tensors to segments: read the `inputs` of a call, check each by itself, put its bytes in order.

`read_inputs` collects every fault of every tensor into one `InvalidParams`. It checks a tensor alone (its
bytes against its own dtype and shape); whether the tensors suit the operation is for `schemas.ops.resolve`,
which needs only `meta`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from app.intake.diverted import Diverted, nbytes_of
from app.intake.landing import Holding, NpyLanding, RawLanding, TensorFault
from app.pool.buffers import Segment
from convgrad._dtypes import DTYPES, DType
from convgrad._errors import InvalidParams
from convgrad._npy import NpyHeader
from schemas.problems import Problem, invalid_params, problem
from schemas.tables import MAX_DIMS, Operation
from schemas.tensors import TensorMeta, WireTensor, read_meta, read_tensor

__all__ = ["Tensor", "landed_npy", "metas", "read_inputs", "settle", "shape_list"]

# Reordering this much takes well under a millisecond.
_INLINE = 256 << 10
_SWAP_STEP = 1 << 18
_WHAT = "the inputs of the call can't be used"
_WIRE_DTYPES = ("f32", "f16", "bf16", "s32")


@dataclass(slots=True)
class Tensor:
    """Hold one input: its dtype and shape, and the memory with its bytes once they have come.

    `pieces` is empty for a tensor that was only described. `fortran` and `swapped` say what `settle` has
    still to do.
    """

    dtype: DType
    shape: tuple[int, ...]
    pieces: list[tuple[Segment, int]] = field(default_factory=list)
    fortran: bool = False
    swapped: bool = False

    @property
    def meta(self) -> TensorMeta:
        """What the operation's rules need to know."""
        return TensorMeta(self.dtype.name, self.shape)

    @property
    def nbytes(self) -> int:
        """Size of the elements."""
        size = nbytes_of(self.dtype.name, self.shape)
        assert size is not None
        return size


Input = Tensor | list[int]


def read_inputs(
    operation: Operation, inputs: Any, holding: Holding, *, need_data: bool = True
) -> dict[str, Input]:
    """Read the `inputs` member of a call; tensors that came as short strings are decoded now.

    The `weights_shape` input becomes a list of integers in whatever form it came. With `need_data=False` a
    tensor may be dtype and shape alone. Raises `InvalidParams` with every fault, and what a tensor's memory
    was refused with.
    """
    if inputs is None:
        inputs = {}
    if not isinstance(inputs, Mapping):
        raise invalid_params(_WHAT, [problem(["inputs"], "inputs must be an object", "object_type")])
    found: dict[str, Input] = {}
    problems: list[Problem] = []
    for name, value in inputs.items():
        row = operation.input_spellings.get(name)
        if value is None or row is None or isinstance(value, Tensor):
            # An unknown name is the operation's to refuse, together with everything else that it finds.
            if value is not None:
                found[name] = value if isinstance(value, Tensor) else []
            continue
        is_shape = row == "weights_shape"
        if is_shape and isinstance(value, list):
            found[name] = value  # its elements are checked with the attributes
            continue
        tensor = _read(value, ["inputs", name], problems, holding, need_data=need_data or is_shape)
        if tensor is not None:
            found[name] = _values(tensor, ["inputs", name], problems) if is_shape else tensor
    if problems:
        raise invalid_params(_WHAT, problems)
    return found


def metas(inputs: Mapping[str, Input]) -> dict[str, TensorMeta | list[int]]:
    """Return what the operation's rules need to know of each input."""
    return {name: value.meta if isinstance(value, Tensor) else value for name, value in inputs.items()}


async def settle(inputs: Mapping[str, Input], holding: Holding) -> dict[str, Segment]:
    """Bring every tensor into C order and little-endian in one segment, and return the segments."""
    return {
        name: await _settled(tensor, holding) for name, tensor in inputs.items() if isinstance(tensor, Tensor)
    }


def landed_npy(header: NpyHeader, declared: str | None, pieces: list[tuple[Segment, int]]) -> Tensor:
    """Describe a `.npy` file whose data has landed; `InvalidParams` when it is not of the `declared`
    dtype.
    """
    return Tensor(
        header.dtype(declared),
        header.shape,
        pieces,
        fortran=header.fortran_order and len(header.shape) > 1,
        swapped=header.big_endian,
    )


def shape_list(tensor: Tensor) -> list[int]:
    """Read a one-dimensional s32 or s64 tensor as integers; raises `TensorFault` when it is not one."""
    if tensor.dtype.name not in ("s32", "s64"):
        raise TensorFault("must be s32, or a JSON list of integers", "shape_dtype")
    if len(tensor.shape) != 1 or tensor.shape[0] > MAX_DIMS:
        raise TensorFault(f"must have 1 dimension of at most {MAX_DIMS} values", "rank")
    raw = b"".join(bytes(segment.view[:used]) for segment, used in tensor.pieces)
    values = np.frombuffer(raw, tensor.dtype.numpy)
    return [int(value) for value in (values.byteswap() if tensor.swapped else values)]


def _values(tensor: Tensor, loc: list[str | int], problems: list[Problem]) -> list[int]:
    try:
        return shape_list(tensor)
    except TensorFault as fault:
        problems.append(problem(loc, f"{loc[-1]} {fault.message}", fault.kind))
        return []


def _read(
    value: Any, loc: list[str | int], problems: list[Problem], holding: Holding, *, need_data: bool
) -> Tensor | None:
    before = len(problems)
    wire = read_tensor(value, loc, problems)
    if wire is None:
        return None
    if wire.dtype is not None and wire.dtype not in _WIRE_DTYPES:
        message = f"the dtype of {loc[-1]} must be one of {', '.join(_WIRE_DTYPES)}"
        problems.append(problem([*loc, "dtype"], message, "unsupported_dtype"))
        return None
    try:
        if wire.encoding == "npy":
            return _npy(wire, holding)
        tensor = _described(wire, loc, problems)
        if tensor is not None and wire.encoding == "base64":
            landing = _landing(wire.payload, "data", holding, tensor.nbytes)
            if landing.nbytes != tensor.nbytes:
                raise TensorFault(
                    f"dtype and shape need {tensor.nbytes} bytes and {landing.nbytes} came", "size"
                )
            tensor.pieces = landing.pieces
        elif need_data and len(problems) == before:
            problems.append(problem(loc, f"{loc[-1]} needs data: the base64 of its elements", "missing"))
    except TensorFault as fault:
        member = "npy" if wire.encoding == "npy" else "data"
        problems.append(problem([*loc, member], f"{member} of {loc[-1]}: {fault.message}", fault.kind))
        return None
    return tensor


def _described(wire: WireTensor, loc: list[str | int], problems: list[Problem]) -> Tensor | None:
    meta = read_meta({"dtype": wire.dtype, "shape": wire.shape}, loc, problems)
    return None if meta is None else Tensor(DTYPES[meta.dtype], meta.shape)


def _npy(wire: WireTensor, holding: Holding) -> Tensor:
    landing = _landing(wire.payload, "npy", holding)
    assert isinstance(landing, NpyLanding)
    assert landing.header is not None
    try:
        return landed_npy(landing.header, wire.dtype, landing.pieces)
    except InvalidParams as error:
        raise TensorFault(error.errors[0]["msg"], error.errors[0]["type"]) from None


def _landing(value: Any, key: str, holding: Holding, expected: int | None = None) -> RawLanding | NpyLanding:
    if isinstance(value, str):
        text = value.encode("ascii", "replace")
        size = len(text) // 4 * 3 - text[-2:].count(b"=")
        if expected is not None and size != expected:
            raise TensorFault(f"dtype and shape need {expected} bytes and {size} came", "size")
        value = Diverted(key, holding, expected=expected, raw_bound=len(text) + 3)
        value.write(text)
        value.close()
        if value.fault is None and value.landing is not None and value.landing.waiting:
            raise TensorFault(
                f"the name {key} must be written without escapes before so long a text", "escape"
            )
    if not isinstance(value, Diverted):
        raise TensorFault("must be base64 text", "string_type")
    if value.fault is not None:
        raise value.fault.with_traceback(None)
    assert value.landing is not None
    return value.landing


async def _settled(tensor: Tensor, holding: Holding) -> Segment:
    if len(tensor.pieces) != 1:
        await _join(tensor, holding)
    if tensor.fortran:
        await _reorder(tensor, holding)
    if tensor.swapped:
        await _offload(tensor, _swap, tensor)
        tensor.swapped = False
    return tensor.pieces[0][0]


async def _join(tensor: Tensor, holding: Holding) -> None:
    """Bring the pieces into one segment, giving each back once it is copied; an empty tensor has none."""
    whole, at = await holding.acquire_async(tensor.nbytes), 0
    pieces, tensor.pieces = tensor.pieces, [(whole, tensor.nbytes)]
    for segment, used in pieces:
        await _offload(tensor, _copy, whole, at, segment, used)
        holding.release(segment)
        at += used


async def _reorder(tensor: Tensor, holding: Holding) -> None:
    source = tensor.pieces[0][0]
    target = await holding.acquire_async(tensor.nbytes)
    await _offload(tensor, _transpose, tensor, target)
    holding.release(source)
    tensor.pieces, tensor.fortran = [(target, tensor.nbytes)], False


async def _offload(tensor: Tensor, work: Callable[..., None], *args: Any) -> None:
    """Run `work`, in a thread when the tensor is large.

    A cancelled caller may leave before the thread does: its views keep the memory from being lent again.
    """
    if tensor.nbytes <= _INLINE:
        work(*args)
    else:
        await asyncio.to_thread(work, *args)


def _copy(target: Segment, at: int, source: Segment, used: int) -> None:
    np.copyto(
        np.frombuffer(target.view, np.uint8)[at : at + used], np.frombuffer(source.view, np.uint8)[:used]
    )


def _transpose(tensor: Tensor, target: Segment) -> None:
    bits, count = np.dtype(f"u{tensor.dtype.itemsize}"), tensor.nbytes // tensor.dtype.itemsize
    source = np.frombuffer(tensor.pieces[0][0].view, bits, count)
    into = np.frombuffer(target.view, bits, count)
    np.copyto(into.reshape(tensor.shape), source.reshape(tensor.shape, order="F"))


def _swap(tensor: Tensor) -> None:
    """Turn the bytes of every element round, in place and in steps: NumPy keeps the GIL for each."""
    bits, count = np.dtype(f"u{tensor.dtype.itemsize}"), tensor.nbytes // tensor.dtype.itemsize
    elements = np.frombuffer(tensor.pieces[0][0].view, bits, count)
    for start in range(0, count, _SWAP_STEP):
        elements[start : start + _SWAP_STEP].byteswap(inplace=True)
