"""Arrays and `.npy` files as parts of a request: sizes are known in advance, and no tensor is copied as a whole."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from convgrad._dtypes import DType, dtype_of_array
from convgrad._errors import CallerError, ParseError, Unsupported
from convgrad._events import Array
from convgrad._npy import HEADER_LIMIT, NpyHeader, parse_header, write_header

__all__ = ["PIECE", "Bytes", "NpyFile", "Part", "Tensor", "array_of", "part"]

# Large enough for few system calls, small enough for the second-level cache.
PIECE = 256 * 1024

_VOID_PAIR = np.dtype("V2")
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

Bytes = bytes | memoryview


@dataclass(frozen=True, slots=True)
class NpyFile:
    """A tensor in a `.npy` file; `dtype` is needed only for bf16 stored as `uint16`."""

    path: str | os.PathLike[str]
    dtype: str | None = None


class Readable(Protocol):
    """Anything that NumPy can read as an array, such as a tensor of PyTorch or JAX."""

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the array."""


Tensor = np.ndarray[Any, Any] | str | os.PathLike[str] | NpyFile | Readable | Sequence[Any]
"""What the client accepts as a tensor: an array, the path of a `.npy` file, or a list of numbers."""


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor to send: each call of `pieces()` gives the `nbytes` bytes of a `.npy` file.

    `elements()` gives only its elements, in C order and little-endian; None for a file with another order.
    """

    dtype: DType
    shape: tuple[int, ...]
    nbytes: int
    pieces: Callable[[], Iterator[Bytes]]
    elements: Callable[[], Iterator[Bytes]] | None

    @property
    def size(self) -> int:
        """Size of the elements in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def describe(self) -> dict[str, Any]:
        """Return dtype and shape as JSON, for a request without the tensor's data."""
        return {"dtype": self.dtype.name, "shape": list(self.shape)}


def part(tensor: Tensor | Any) -> Part:
    """Prepare one tensor for sending.

    Arrays may have any strides and byte order; anything else that NumPy or DLPack can read is accepted. Raises
    `Unsupported` for a dtype that no operation has, `ParseError` for a file that is not a complete `.npy` file, and
    `OSError` when it can't be read.
    """
    match tensor:
        case NpyFile(path, declared):
            return _file_part(Path(path), declared)
        case str() | os.PathLike():
            return _file_part(Path(tensor), None)
        case _:
            return _array_part(array_of(tensor))


def array_of(value: Any) -> Array:
    """Return what NumPy can read as an array: arrays, lists, tensors of PyTorch and CuPy, and others by DLPack.

    A tensor of PyTorch is detached and copied to the CPU, and one of CuPy is copied; bfloat16 is kept. Lists of numbers
    become float32. Raises `Unsupported`.
    """
    if isinstance(value, np.ndarray):
        if type(value) is not np.ndarray and np.ma.is_masked(value):
            raise Unsupported("a tensor must not have masked elements: fill them, for example with .filled(0)")
        return np.asarray(value)  # no subclass: a slice of a matrix or masked array is another one
    if (torch := sys.modules.get("torch")) is not None and isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        half = value.dtype == torch.bfloat16
        found: Array = value.view(torch.uint16).numpy().view(_BFLOAT16) if half else value.numpy()
        return found
    if (cupy := sys.modules.get("cupy")) is not None and isinstance(value, cupy.ndarray):
        copied: Array = value.get()
        return copied
    try:
        if hasattr(value, "__dlpack__") and not hasattr(value, "__array__"):  # DLPack has no bfloat16 of ml_dtypes
            return np.from_dlpack(value)
        read = np.asarray(value, np.float32 if isinstance(value, Sequence) else None)
        if read.dtype.kind in "OSU":
            raise TypeError("that holds no numbers")
        return read
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise Unsupported(f"a tensor must be an array, not {type(value).__name__}: {error}") from error


def _array_part(array: Array) -> Part:
    # numpy.load gives two void bytes for what ml_dtypes saved as bfloat16.
    if array.dtype == _VOID_PAIR:
        array = array.view(_BFLOAT16)
    dtype = dtype_of_array(array)
    header = write_header(dtype, array.shape)

    def pieces() -> Iterator[Bytes]:
        yield header
        yield from _blocks(array, dtype)

    return Part(dtype, array.shape, len(header) + array.nbytes, pieces, partial(_blocks, array, dtype))


def _blocks(array: Array, dtype: DType) -> Iterator[Bytes]:
    """Yield the bytes in C order, little-endian, converting a piece at a time if needed."""
    if array.flags.c_contiguous and array.dtype == dtype.numpy:
        yield from _slices(_bytes_of(array))
    elif array.nbytes <= PIECE:
        yield _bytes_of(np.ascontiguousarray(array, dtype.numpy))
    else:
        rows = max(1, PIECE // (array.nbytes // len(array)))
        for at in range(0, len(array), rows):
            block = array[at] if rows == 1 else array[at : at + rows]
            yield from _blocks(block, dtype)


def _bytes_of(array: Array) -> memoryview:
    # The buffer protocol does not know bfloat16.
    return array.reshape(-1).view(np.uint8).data


def _slices(data: memoryview) -> Iterator[memoryview]:
    for at in range(0, len(data), PIECE):
        yield data[at : at + PIECE]


def _file_part(path: Path, declared: str | None) -> Part:
    try:
        header, size = _file_header(path)
        # Only ml_dtypes writes <V2, for bfloat16; <u2 may be anything, so it has to be declared.
        dtype = header.dtype("bf16" if declared is None and header.descr.endswith("V2") else declared)
    except CallerError as error:
        raise type(error)(f"{path}: {error.message}", data=error.data) from error
    whole = header.offset + header.nbytes
    if size != whole:
        raise ParseError(f"{path} must have {whole} bytes by its header, but has {size}")
    plain = not (header.big_endian or (header.fortran_order and len(header.shape) > 1))
    elements = partial(_file_pieces, path, size, header.offset) if plain else None
    return Part(dtype, header.shape, size, partial(_file_pieces, path, size), elements)


def _file_header(path: Path) -> tuple[NpyHeader, int]:
    with path.open("rb") as file:
        start = file.read(HEADER_LIMIT + 16)
        size = os.fstat(file.fileno()).st_size
    header = parse_header(start)
    if header is None:
        raise ParseError("the file ends within its .npy header")
    return header, size


def _file_pieces(path: Path, size: int, start: int = 0) -> Iterator[Bytes]:
    # Reads instead of a mapping: truncating the file meanwhile gives an error, not SIGBUS.
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        size -= start
        while size > 0:
            piece = file.read(min(PIECE, size))
            if not piece:
                raise ParseError(f"{path} was truncated while it was sent")
            size -= len(piece)
            yield piece
