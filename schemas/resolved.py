"""A resolved call: complete, valid and frozen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from schemas.rows import Dialect
from schemas.shapes import GroupsAxis
from schemas.tables import CalledOperation
from schemas.tensors import TensorSpec

__all__ = ["ResolvedOp"]


@dataclass(frozen=True, slots=True)
class ResolvedOp:
    """Every size and attribute of a call after defaults, `auto_pad` and shape inference.

    Names are canonical; `wire_name` and `reply_attributes` translate them to the call's dialect. `inputs` are the
    tensors that the computation reads, in the order of the operation's table, and `outputs` what it computes, in the
    requested order. `dst_shape` is the shape of `diff_src`, like the attribute of that name. `macs` counts
    multiply-adds, including those with padding.
    """

    called: CalledOperation
    dtype: str
    n: int
    src_channels: int
    dst_channels: int
    groups: int
    src_spatial: tuple[int, ...]
    dst_spatial: tuple[int, ...]
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads_begin: tuple[int, ...]
    pads_end: tuple[int, ...]
    output_padding: tuple[int, ...]
    auto_pad: str
    data_format: str
    weights_format: str
    groups_axis: GroupsAxis
    weights_shape: tuple[int, ...]
    dst_shape: tuple[int, ...]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    warnings: tuple[str, ...]
    macs: int

    @property
    def output(self) -> TensorSpec:
        """The first output."""
        return self.outputs[0]

    @property
    def op(self) -> str:
        """Canonical name of the operation."""
        return self.called.operation.name

    @property
    def called_as(self) -> str:
        """Name that the caller used."""
        return self.called.called_as

    @property
    def dialect(self) -> Dialect:
        """The dialect of the reply."""
        return self.called.dialect

    def wire_name(self, name: str) -> str:
        """Return the name of an attribute, input or output in the call's dialect."""
        return self.called.wire_names[name]

    @property
    def reply_warnings(self) -> dict[str, list[str]]:
        """The member `warnings` of a reply, if there are any."""
        return {"warnings": list(self.warnings)} if self.warnings else {}

    def reply_attributes(self) -> dict[str, Any]:
        """Return the reply's `resolved` object: every attribute of the operation, and `groups_axis` if it has groups.

        Used as attributes again, all but `groups_axis` resolve to the same call.
        """
        attributes: dict[str, Any] = {}
        for row in self.called.operation.attributes:
            value = getattr(self, row.name)
            attributes[self.called.wire_names[row.name]] = list(value) if isinstance(value, tuple) else value
        return attributes | ({"groups_axis": self.groups_axis} if self.called.operation.convolves else {})
