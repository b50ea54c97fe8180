"""Base64 strings that are decoded into segments while the JSON document around them is still arriving."""

from __future__ import annotations

import binascii

import pybase64

from app.intake.lease import Lease
from app.intake.sinks import NpySink, RawSink, TensorFault
from convgrad._errors import ConvgradError

__all__ = ["InlineTensor", "ReceivedData"]


class ReceivedData:
    """The data of a tensor that was taken out of a JSON document; its bytes are in `sink`.

    A fault does not stop the document: it is kept in `fault`, the memory is given back, the rest of the value is
    skipped.
    """

    __slots__ = ("fault", "sink")

    def __init__(self, sink: RawSink, fault: TensorFault | ConvgradError | None = None) -> None:
        self.sink = sink
        self.fault = fault

    async def supply(self) -> None:
        """Allocate the memory that the bytes so far need."""
        if self.fault is None:
            try:
                await self.sink.supply()
            except ConvgradError as fault:
                self.fail(fault)

    def fail(self, fault: TensorFault | ConvgradError) -> None:
        """Keep the fault, and give the memory back."""
        # The traceback would keep the frames, and their views of the chunk, alive until the reply is sent.
        self.fault = fault.with_traceback(None)
        self.sink.discard()


class InlineTensor(ReceivedData):
    """Replaces a long `data` or `npy` string in the parsed document.

    The string is base64: standard alphabet, padded, without white space, unused bits zero. `expected` is the size of
    its bytes, if known, and `raw_bound` the most text that can still arrive.
    """

    __slots__ = ("_odd", "_padded")

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
        super().__init__(NpySink(lease, bound=bound) if key == "npy" else RawSink(lease, bound=bound), refusal)
        self._odd = b""  # the last characters, of a group of four
        self._padded = False
        if expected is not None and refusal is None:
            try:
                self.sink.expect(expected, bound)
            except TensorFault as fault:
                self.fail(fault)

    def write(self, piece: bytes | memoryview) -> None:
        """Decode the next characters of the string, without escapes."""
        if self.fault is not None:
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
            self.fail(fault)

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
        if self.fault is not None:
            return
        try:
            if self._odd:
                raise TensorFault("base64 ends in the middle of a group of four characters", "base64")
            self.sink.close()
        except (TensorFault, ConvgradError) as fault:
            self.fail(fault)
