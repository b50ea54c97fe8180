"""Receive the bytes of a tensor where kernels read them, written once."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from app.intake.lease import Lease
from app.pool.buffers import Segment
from convgrad._dtypes import DType
from convgrad._errors import InvalidParams
from convgrad._npy import NpyHeader

__all__ = ["Elements", "Sink", "TensorFault", "npy_dtype"]

# A tensor up to this size, that of the smallest segment, gets one only when a worker needs it.
_SMALL = 64 << 10


class TensorFault(Exception):  # noqa: N818 - becomes an error where the tensor's name is known
    """A fault in the bytes of one tensor, without the tensor's place in the call."""

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.message = message
        self.kind = kind


class Elements(ABC):
    """What holds the elements of a tensor, or will when they have arrived."""

    @abstractmethod
    def content(self) -> bytes | bytearray | memoryview:
        """Return all bytes; raises `TensorFault`. Takes a while for large tensors."""

    def fill(self, target: memoryview) -> None:
        """Write all bytes into memory of their size."""
        # NumPy copies without the GIL
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(self.content(), np.uint8))


class Sink(Elements):
    """Receive the `nbytes` bytes of a tensor: on the heap if they are few, otherwise in a segment."""

    def __init__(self, lease: Lease, nbytes: int = 0) -> None:
        self.nbytes = nbytes
        self.received = 0
        self.segment: Segment | None = None
        """Where the bytes are, if they are many."""
        self.small = bytearray()
        """Those of a small tensor."""
        self._lease = lease
        self._begun = False

    @property
    def missing(self) -> int:
        """How many bytes have not arrived."""
        return self.nbytes - self.received

    async def write(self, data: bytes | memoryview) -> None:
        """Receive the next bytes, at most those that are missing.

        Raises what allocating their memory raises.
        """
        if not self._begun:
            self._begun = True
            if self.nbytes > _SMALL or not self._lease.on_heap(self.nbytes):
                self.segment = await self._lease.acquire(self.nbytes)
        if self.segment is None:
            self.small += data
        else:
            self.segment.view[self.received : self.received + len(data)] = data
        self.received += len(data)

    def room(self) -> memoryview:
        """Return the memory for the bytes that are still to come; empty where that is not allocated."""
        return memoryview(b"") if self.segment is None else self.segment.view[self.received : self.nbytes]

    def placed(self, count: int) -> None:
        """Count bytes that were written to `room` directly."""
        self.received += count

    def content(self) -> bytearray:
        """Return all bytes."""
        return self.small if self.segment is None else bytearray(self.segment.view[: self.nbytes])


def npy_dtype(header: NpyHeader, declared: str | None) -> DType:
    """Return the dtype by the header; raises `TensorFault` unless it is the `declared` one."""
    try:
        return header.dtype(declared)
    except InvalidParams as error:
        raise TensorFault(error.errors[0]["msg"], error.errors[0]["type"]) from None
