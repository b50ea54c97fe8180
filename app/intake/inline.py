"""Base64 strings that are decoded into segments while the JSON document around them is still arriving."""

from __future__ import annotations

import binascii
import math
from typing import Any

import pybase64

from app.intake.lease import Lease
from app.intake.sinks import NpySink, RawSink, TensorFault
from convgrad._dtypes import DTYPES
from convgrad._errors import ConvgradError

__all__ = ["InlineTensor", "nbytes_of"]

MAX_RANK = 64


class InlineTensor:
    """Replaces a long `data` or `npy` string in the parsed document; its bytes are in `sink`.

    The string is base64: standard alphabet, padded, without white space, unused bits zero.

    A fault does not stop the document: it is kept in `fault`, the memory is given back, the rest of the
    string is skipped.
    """

    __slots__ = ("_odd", "_padded", "fault", "key", "sink")

    def __init__(
        self,
        key: str,
        lease: Lease,
        *,
        expected: int | None = None,
        raw_bound: int | None = None,
        refusal: ConvgradError | None = None,
    ) -> None:
        bound = None if raw_bound is None else raw_bound // 4 * 3
        self.key = key
        self.fault: TensorFault | ConvgradError | None = refusal
        self.sink: RawSink | None = None
        self._odd = b""  # the last characters, of a group of four
        self._padded = False
        if refusal is not None:
            return
        try:
            if key == "npy":
                self.sink = NpySink(lease, bound=bound)
            else:
                self.sink = RawSink(lease, expected=expected, bound=bound)
        except TensorFault as fault:
            self.fault = fault

    def write(self, piece: bytes | memoryview) -> None:
        """Decode the next characters of the string, without escapes."""
        if self.sink is None or self.fault is not None:
            return
        try:
            if self._odd:
                fill = 4 - len(self._odd)
                self._odd += piece[:fill]
                piece = piece[fill:]
                if len(self._odd) < 4:
                    return
                self.sink.write(self._decoded(self._odd))
            if whole := len(piece) & ~3:
                self.sink.write(self._decoded(piece[:whole]))
            self._odd = bytes(piece[whole:])
        except (TensorFault, ConvgradError) as fault:
            self._fail(fault)

    def _decoded(self, groups: bytes | memoryview) -> bytes:
        if self._padded:
            raise TensorFault("base64 has characters after its padding", "base64")
        self._padded = groups[-1] == 0x3D
        try:
            done = pybase64.b64decode(groups, validate=True)
        except (binascii.Error, ValueError):
            raise TensorFault("base64 has a character outside its alphabet, or misplaced padding", "base64") from None
        if self._padded and pybase64.b64encode(done[len(done) // 3 * 3 :]) != bytes(groups[-4:]):
            raise TensorFault("base64 has bits after its last byte that are not zero", "base64")
        return done

    def close(self) -> None:
        """Handle the end of the string."""
        if self.sink is None or self.fault is not None:
            return
        try:
            if self._odd:
                raise TensorFault("base64 ends in the middle of a group of four characters", "base64")
            self.sink.close()
        except (TensorFault, ConvgradError) as fault:
            self._fail(fault)

    async def supply(self) -> None:
        """Allocate the memory that the decoded bytes need."""
        if self.sink is None or self.fault is not None:
            return
        try:
            await self.sink.supply()
        except ConvgradError as fault:
            self._fail(fault)

    def _fail(self, fault: TensorFault | ConvgradError) -> None:
        # The traceback would keep the frames, and their views of the chunk, alive until the reply is sent.
        self.fault = fault.with_traceback(None)
        if self.sink is not None:
            self.sink.discard()


def nbytes_of(dtype: Any, shape: Any) -> int | None:
    """Return the size in bytes of a tensor with this wire dtype and shape, or None if either is invalid."""
    entry = DTYPES.get(dtype) if isinstance(dtype, str) else None
    if entry is None or not isinstance(shape, list | tuple) or len(shape) > MAX_RANK:
        return None
    if not all(type(dim) is int and 0 <= dim < 2**63 for dim in shape):
        return None
    return math.prod(shape) * entry.itemsize
