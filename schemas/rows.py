"""What a row of the operations' tables is: an attribute, a tensor, an operation; two spellings of each name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

__all__ = [
    "DATA_FORMATS",
    "DTYPE_NAMES",
    "MAX_DIMS",
    "REFERENCE_DTYPES",
    "WEIGHTS_FORMATS",
    "AttributeRow",
    "Dialect",
    "InputRows",
    "Operation",
    "TensorRow",
]

Dialect = Literal["new", "old"]
Kind = Literal["s64[]", "s64", "string"]

DTYPE_NAMES = ("f32", "f16", "bf16")
# Only options.reference and verifications compute these.
REFERENCE_DTYPES = ("f64",)
DATA_FORMATS = ("NXC", "NCX")
WEIGHTS_FORMATS = ("XIO", "OIX", "XOI", "IOX")

# oneDNN's DNNL_MAX_NDIMS. Graph dumps write a list attribute that was never set as this many zeros.
MAX_DIMS = 12


class Spelled:
    """What has a name, and in the old edition of its page perhaps another one."""

    name: str
    old_name: str | None

    def spelled(self, dialect: Dialect) -> str:
        """Return the name in a dialect."""
        return self.old_name if dialect == "old" and self.old_name else self.name

    def others(self, dialect: Dialect) -> list[str]:
        """Return the other spellings of the name in a dialect."""
        return sorted({self.name, self.old_name or self.name} - {self.spelled(dialect)})


@dataclass(frozen=True)
class AttributeRow(Spelled):
    """One attribute: its two spellings, type, range, default, and whether a call must have it.

    `required` is `unless auto_pad` for pads, which are needed only while `auto_pad` is `none`. `default` is None when
    the meaning of an absent value depends on the call; `old_default` applies under an old operation name.
    """

    name: str
    kind: Kind
    doc: str
    required: Literal["yes", "no", "unless auto_pad"] = "no"
    minimum: int | None = None
    choices: tuple[str, ...] = ()
    default: str | int | None = None
    old_default: str | int | None = None
    old_name: str | None = None

    def default_in(self, dialect: Dialect) -> str | int | None:
        """Return the default under an operation name of this dialect."""
        return self.old_default if dialect == "old" and self.old_default is not None else self.default


@dataclass(frozen=True)
class TensorRow(Spelled):
    """One input or output; `dtypes` is `T` (the type of the call's tensors) or `s32` for a shape.

    An input that is `only_for` an output is read, and required, when a call requests that output.
    """

    name: str
    doc: str
    old_name: str | None = None
    required: bool = True
    dtypes: Literal["T", "s32"] = "T"
    only_for: str | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class InputRows:
    """The inputs that a request may have: those of an operation, a graph or a sealed check."""

    inputs: tuple[TensorRow, ...] = ()

    @cached_property
    def shape_input(self) -> str | None:
        """The input that is a shape, which may be an attribute instead; None if there is none."""
        return next((row.name for row in self.inputs if row.dtypes == "s32"), None)

    def is_shape(self, name: str) -> bool:
        """Whether this is a spelling of the input that is a shape."""
        return self.shape_input is not None and self.input_spellings.get(name) == self.shape_input

    @cached_property
    def input_spellings(self) -> Mapping[str, str]:
        """Canonical input name by every accepted spelling."""
        return _spellings(self.inputs)


@dataclass(frozen=True, eq=False, kw_only=True)
class Operation(InputRows, Spelled):
    """One operation: its names, attributes, inputs, outputs, and the pages that specify it.

    `extras` are outputs that a call may request in addition to `output` or instead of it (`options.outputs`).
    """

    name: str
    old_name: str | None
    summary: str
    formula: str
    transposed: bool
    attributes: tuple[AttributeRow, ...]
    output: TensorRow
    pages: tuple[str, ...]
    ranks: tuple[int, ...] = (3, 4, 5)
    """Numbers of dimensions that the data tensors may have."""
    extras: tuple[TensorRow, ...] = ()

    @property
    def outputs(self) -> tuple[TensorRow, ...]:
        """All outputs that a call may request."""
        return self.output, *self.extras

    @cached_property
    def output_spellings(self) -> Mapping[str, str]:
        """Canonical output name by every accepted spelling."""
        return _spellings(self.outputs)

    @property
    def computes(self) -> Literal["dst", "diff_src", "diff_weights", "diff_bias"]:
        """The output that the operation computes by default, by its new name."""
        return self.output.name  # type: ignore[return-value] # as the tests of the tables check

    @cached_property
    def convolves(self) -> bool:
        """Whether the operation has weights and strides; BiasAdd and BiasAddBackward have neither."""
        return "strides" in self.attribute

    @property
    def widens(self) -> bool:
        """Whether the shape rule is s * (size - 1) + E - b - e + p, with output padding: the output may be larger."""
        return self.transposed != (self.computes == "diff_src")

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Every name of this operation, the canonical one first."""
        plain = (self.name,) if self.old_name is None else (self.name, self.old_name)
        return tuple(name + suffix for name in plain for suffix in ("", "-1"))

    @property
    def aliases(self) -> list[str]:
        """Every name but the canonical one."""
        return [*self.names[1:]]

    @property
    def snake_name(self) -> str:
        """The name of functions that compute the operation: `convolution_backward_data`."""
        return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", self.name).lower()

    @cached_property
    def attribute(self) -> Mapping[str, AttributeRow]:
        """The attribute rows by canonical name."""
        return {row.name: row for row in self.attributes}

    @cached_property
    def attribute_spellings(self) -> Mapping[str, str]:
        """Canonical attribute name by every accepted spelling."""
        return _spellings(self.attributes)


def _spellings(rows: tuple[Spelled, ...]) -> dict[str, str]:
    names: dict[str, str] = {}
    for row in rows:
        names[row.name] = row.name
        if row.old_name is not None:
            names[row.old_name] = row.name
    return names
