"""The operations as data: names, attributes, inputs, outputs, defaults, and the specification pages they come from.

Everything that describes an operation is made from these tables: the Pydantic models, `ops.describe`, the OpenAPI and
OpenRPC documents and `docs/operations/`. Two editions of the pages use two sets of names. The *new* names are the
canonical ones; each row also has the *old* spelling, and every call accepts both. The name under which an operation is
called decides the names in its reply (the dialect) and the default of `weights_format`.

Symbols: N batch, I channels of `src`, O channels of `dst`, g `groups`, X the spatial axes (W, HW or DHW).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass, field, replace
from functools import cache, cached_property

from convgrad._errors import UnknownOperation
from schemas.broken_rules import MAX_BROKEN_RULES, safe_text
from schemas.frameworks import operation_here
from schemas.rows import DATA_FORMATS, WEIGHTS_FORMATS, AttributeRow, Dialect, Operation, TensorRow

__all__ = [
    "OPERATIONS",
    "CalledOperation",
    "find_operation",
    "near_miss",
    "operation_hint",
    "operation_names",
    "verified",
]


@dataclass(frozen=True, eq=False)
class CalledOperation:
    """An operation and the name it was called by, which decides the reply's dialect and one default.

    There is one object per name, which compares by identity even after pickling.
    """

    operation: Operation = field(repr=False)
    called_as: str
    dialect: Dialect

    def __reduce__(self) -> tuple[Callable[[object], CalledOperation], tuple[str]]:
        return find_operation, (self.called_as,)

    @cached_property
    def wire_names(self) -> Mapping[str, str]:
        """Name of every attribute, input and output in this dialect, by canonical name."""
        tensors = (*self.operation.inputs, *self.operation.outputs)
        names = {row.name: row.spelled(self.dialect) for row in self.operation.attributes}
        return names | {row.name: row.spelled(self.dialect) for row in tensors}


_STRIDES = AttributeRow("strides", "s64[]", "Step of the weights along each spatial axis.", required="yes", minimum=1)
_PADS_BEGIN = AttributeRow(
    "pads_begin",
    "s64[]",
    "Zeros before the first element of each spatial axis. `[]` means no padding. Ignored, but still "
    "checked, when `auto_pad` is not `none`.",
    required="unless auto_pad",
    minimum=0,
)
_PADS_END = AttributeRow(
    "pads_end",
    "s64[]",
    "Zeros after the last element of each spatial axis. `[]` means no padding. Ignored, but still "
    "checked, when `auto_pad` is not `none`.",
    required="unless auto_pad",
    minimum=0,
)
_DILATIONS = AttributeRow(
    "dilations", "s64[]", "Distance between the taps of the weights; 1 is a dense kernel.", required="yes", minimum=1
)
_AUTO_PAD = AttributeRow(
    "auto_pad",
    "string",
    "How padding is determined: `none` uses `pads_begin` and `pads_end`, `valid` means no padding, "
    "`same_upper` and `same_lower` put an odd zero at the end or at the beginning. Case is ignored.",
    choices=("none", "same_upper", "same_lower", "valid"),
    default="none",
)
_OUTPUT_PADDING_GRADIENT = AttributeRow(
    "output_padding",
    "s64[]",
    "Extra elements at the end of each spatial axis of `diff_dst`, fewer than the stride. Inferred from "
    "the shapes when absent.",
    minimum=0,
)
_OUTPUT_PADDING_FORWARD = AttributeRow(
    "output_padding",
    "s64[]",
    "Extra elements at the end of each spatial axis of `dst`, fewer than the stride. Zeros when absent.",
    minimum=0,
)
_GROUPS = AttributeRow(
    "groups",
    "s64",
    "Number of groups; it must divide the channels of `src` and of `dst`.",
    minimum=1,
    default=1,
)
_DATA_FORMAT = AttributeRow(
    "data_format", "string", "Axis order of the data tensors.", choices=DATA_FORMATS, default="NXC"
)
_WEIGHTS_FORMAT = AttributeRow(
    "weights_format",
    "string",
    "Axis order of the weights.",
    choices=WEIGHTS_FORMATS,
    default="XIO",
    old_name="filter_format",
)
_WEIGHTS_FORMAT_TRANSPOSED = AttributeRow(
    "weights_format",
    "string",
    "Axis order of the weights.",
    choices=WEIGHTS_FORMATS,
    default="XOI",
    old_default="XIO",
    old_name="filter_format",
)
_WEIGHTS_SHAPE = AttributeRow(
    "weights_shape",
    "s64[]",
    "Shape of the weights in the order of `weights_format`. The input of the same name takes precedence; "
    "one of the two is required. A list of zeros counts as absent.",
    minimum=1,
    old_name="filter_shape",
)

_DST_SHAPE = AttributeRow(
    "dst_shape",
    "s64[]",
    "Shape of the result, `diff_src`, in the order of `data_format`. The input of the same name takes precedence. When "
    "both are absent the spatial sizes are strides * (size of `diff_dst` - 1) + (kernel - 1) * dilations + 1 - "
    "pads_begin - pads_end + output_padding. A list of zeros counts as absent.",
    minimum=0,
    old_name="output_shape",
)
_OUTPUT_PADDING_DATA = AttributeRow(
    "output_padding",
    "s64[]",
    "Extra elements at the end of each spatial axis of `diff_src`, fewer than the stride. Inferred from `dst_shape` "
    "when absent, or zeros without it.",
    minimum=0,
)

_SRC = TensorRow("src", "Input of the forward operation: (N, I, X) or (N, X, I).", old_name="input_forward")
_DIFF_DST = TensorRow(
    "diff_dst", "Gradient of the forward operation's output: (N, O, X) or (N, X, O).", old_name="output_delta"
)
_WEIGHTS_SHAPE_INPUT = TensorRow(
    "weights_shape",
    "Shape of the weights, as a one-dimensional s32 tensor or a JSON list of integers.",
    old_name="filter_shape",
    required=False,
    dtypes="s32",
)

_WEIGHTS = TensorRow("weights", "Weights in the order of `weights_format`.", old_name="filter")
# `input`, `filter` and `output` are the names of the first edition of the forward operations' pages.
_FORWARD_INPUTS = (
    TensorRow("src", "Input: (N, I, X) or (N, X, I).", old_name="input"),
    _WEIGHTS,
    TensorRow("bias", "Added to every channel of `dst`: (O).", required=False),
)
_DST = TensorRow("dst", "Output: (N, O, X) or (N, X, O).", old_name="output")
_DIFF_BIAS = TensorRow("diff_bias", "Gradient of the bias: (O).", old_name="bias_delta")
_WEIGHTS_FOR_SRC = TensorRow(
    "weights",
    "Weights in the order of `weights_format`, read only for `diff_src`. They also give `weights_shape`.",
    old_name="filter",
    required=False,
    only_for="diff_src",
)
_DIFF_SRC = TensorRow("diff_src", "Gradient of `src`: (N, I, X) or (N, X, I).", old_name="input_delta")

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        name="ConvTransposeBackwardWeights",
        old_name="ConvTransposeBackpropFilters",
        summary="Gradient of a transposed convolution with respect to its weights.",
        formula=(
            "diff_weights[i, o_l, k] = sum over n and x of src[n, i, x] * diff_dst[n, o, y], "
            "where o = (i // (I/g)) * (O/g) + o_l and y = x * strides + k * dilations - pads_begin"
        ),
        transposed=True,
        attributes=(
            _STRIDES,
            _PADS_BEGIN,
            _PADS_END,
            _DILATIONS,
            _AUTO_PAD,
            _OUTPUT_PADDING_GRADIENT,
            _GROUPS,
            _DATA_FORMAT,
            _WEIGHTS_FORMAT_TRANSPOSED,
            _WEIGHTS_SHAPE,
        ),
        inputs=(_SRC, _DIFF_DST, _WEIGHTS_SHAPE_INPUT, _WEIGHTS_FOR_SRC),
        output=TensorRow("diff_weights", "Gradient of the weights.", old_name="filter_delta"),
        pages=("ConvTransposeBackwardWeights.rst", "ConvTransposeBackpropFilters-1.md"),
        extras=(_DIFF_BIAS, _DIFF_SRC),
    ),
    Operation(
        name="ConvolutionBackwardWeights",
        old_name="ConvolutionBackpropFilters",
        summary="Gradient of a convolution with respect to its weights.",
        formula=(
            "diff_weights[o, i_l, k] = sum over n and x of diff_dst[n, o, x] * src[n, i, y], "
            "where i = (o // (O/g)) * (I/g) + i_l and y = x * strides + k * dilations - pads_begin"
        ),
        transposed=False,
        attributes=(
            _STRIDES,
            _PADS_BEGIN,
            _PADS_END,
            _DILATIONS,
            _AUTO_PAD,
            _GROUPS,
            _DATA_FORMAT,
            _WEIGHTS_FORMAT,
            _WEIGHTS_SHAPE,
        ),
        inputs=(_SRC, _DIFF_DST, _WEIGHTS_SHAPE_INPUT, _WEIGHTS_FOR_SRC),
        output=TensorRow("diff_weights", "Gradient of the weights.", old_name="filter_delta"),
        pages=("ConvolutionBackpropFilters-1.md",),
        extras=(_DIFF_BIAS, _DIFF_SRC),
    ),
    Operation(
        name="ConvTranspose",
        old_name=None,
        summary="Transposed convolution, with an optional bias.",
        formula=(
            "dst[n, o, y] = bias[o] + sum over i, x and k of src[n, i, x] * weights[i, o_l, k], "
            "where i is in the group of o and y = x * strides + k * dilations - pads_begin"
        ),
        transposed=True,
        attributes=(
            _STRIDES,
            _PADS_BEGIN,
            _PADS_END,
            _DILATIONS,
            _AUTO_PAD,
            _OUTPUT_PADDING_FORWARD,
            _GROUPS,
            _DATA_FORMAT,
            _WEIGHTS_FORMAT_TRANSPOSED,
        ),
        inputs=_FORWARD_INPUTS,
        output=_DST,
        pages=("ConvTranspose.rst",),
    ),
    Operation(
        name="Convolution",
        old_name=None,
        summary="Convolution, with an optional bias.",
        formula=(
            "dst[n, o, x] = bias[o] + sum over i_l and k of src[n, i, y] * weights[o, i_l, k], "
            "where i = (o // (O/g)) * (I/g) + i_l and y = x * strides + k * dilations - pads_begin"
        ),
        transposed=False,
        attributes=(
            _STRIDES,
            _PADS_BEGIN,
            _PADS_END,
            _DILATIONS,
            _AUTO_PAD,
            _GROUPS,
            _DATA_FORMAT,
            _WEIGHTS_FORMAT,
        ),
        inputs=_FORWARD_INPUTS,
        output=_DST,
        pages=("Convolution.rst",),
    ),
    Operation(
        name="ConvolutionBackwardData",
        old_name="ConvolutionBackpropData",
        summary="Gradient of a convolution with respect to its input.",
        formula=(
            "diff_src[n, i, y] = sum over o, x and k of diff_dst[n, o, x] * weights[o, i_l, k], "
            "where o is in the group of i and y = x * strides + k * dilations - pads_begin"
        ),
        transposed=False,
        attributes=(
            _STRIDES,
            _PADS_BEGIN,
            _PADS_END,
            _DILATIONS,
            _AUTO_PAD,
            _OUTPUT_PADDING_DATA,
            _GROUPS,
            _DATA_FORMAT,
            _WEIGHTS_FORMAT,
            _DST_SHAPE,
        ),
        inputs=(
            _DIFF_DST,
            _WEIGHTS,
            TensorRow(
                "dst_shape",
                "Shape of the result, `diff_src`, as a one-dimensional s32 tensor or a JSON list of integers.",
                old_name="output_shape",
                required=False,
                dtypes="s32",
            ),
        ),
        output=_DIFF_SRC,
        pages=("ConvolutionBackwardData.rst",),
    ),
    Operation(
        name="ConvTransposeBackwardData",
        old_name=None,
        summary="Gradient of a transposed convolution with respect to its input.",
        formula=(
            "diff_src[n, i, x] = sum over o_l and k of diff_dst[n, o, y] * weights[i, o_l, k], "
            "where o = (i // (I/g)) * (O/g) + o_l and y = x * strides + k * dilations - pads_begin"
        ),
        transposed=True,
        attributes=(
            _STRIDES,
            _PADS_BEGIN,
            _PADS_END,
            _DILATIONS,
            _AUTO_PAD,
            _OUTPUT_PADDING_GRADIENT,
            _GROUPS,
            _DATA_FORMAT,
            _WEIGHTS_FORMAT_TRANSPOSED,
        ),
        inputs=(_DIFF_DST, _WEIGHTS),
        output=_DIFF_SRC,
        pages=("ConvTransposeBackwardData.rst",),
    ),
    Operation(
        name="BiasAdd",
        old_name=None,
        summary="A bias added to every channel.",
        formula="dst[n, o, x] = src[n, o, x] + bias[o]",
        transposed=False,
        attributes=(_DATA_FORMAT,),
        inputs=(
            TensorRow("src", "Input: (N, O, X) or (N, X, O), with any number of spatial axes from 0 to 3.", "input"),
            TensorRow("bias", "Added to every channel: (O)."),
        ),
        output=_DST,
        pages=("BiasAdd.rst",),
        ranks=(2, 3, 4, 5),
    ),
    Operation(
        name="BiasAddBackward",
        old_name="BiasAddBackprop",
        summary="Gradient of a bias: the sum over images and pixels of each channel.",
        formula="diff_bias[o] = sum over n and x of diff_dst[n, o, x]",
        transposed=False,
        attributes=(_DATA_FORMAT,),
        inputs=(_DIFF_DST,),
        output=_DIFF_BIAS,
        pages=("BiasAddBackward.rst",),
        ranks=(4, 5),  # as oneDNN's own shape inference has it
    ),
)


@cache
def verified(called: CalledOperation) -> CalledOperation:
    """Return the operation with each output as one more input: the result that `ops.verify` is about."""
    operation = called.operation
    results = tuple([replace(row, required=False) for row in operation.outputs])
    return CalledOperation(replace(operation, inputs=(*operation.inputs, *results)), called.called_as, called.dialect)


def _called() -> dict[str, CalledOperation]:
    found: dict[str, CalledOperation] = {}
    for operation in OPERATIONS:
        for name in operation.names:
            old = operation.old_name is not None and name.startswith(operation.old_name)
            found[name] = CalledOperation(operation, name, "old" if old else "new")
    return found


_CALLED = _called()


def operation_names() -> tuple[str, ...]:
    """Return the names and aliases of all operations."""
    return tuple(_CALLED)


def find_operation(name: object) -> CalledOperation:
    """Return the operation of a name or alias, with or without the suffix `-1`.

    Raises `UnknownOperation`, with the name here of an operation of another framework, or the closest known name.
    """
    called = _CALLED.get(name) if isinstance(name, str) else None
    if called is None:
        hint, end = operation_hint(name)
        shown = safe_text(name)
        msg = f"there is no {f'operation {shown}' if shown else 'such operation'}"
        known = ", ".join(operation.name for operation in OPERATIONS)
        raise UnknownOperation(f"{msg}: the operations are {known}{end}", data={"hint": hint})
    return called


def operation_hint(name: object, broken: Sized = ()) -> tuple[str | None, str]:
    """Return the operation that an unknown name may stand for, if any, and the end of the error message.

    `broken` are as in `near_miss`.
    """
    here = operation_here(name)
    if here is not None:
        return here.names[0], f"; use {', '.join(filter(None, (here.names[0], here.note)))}"
    hint = near_miss(name, _CALLED, broken)
    return hint, f"; did you mean {hint}?" if hint else ""


def near_miss(name: object, known: Mapping[str, object] | tuple[str, ...], broken: Sized = ()) -> str | None:
    """Return the known name closest to a misspelt one, or None.

    `broken` are those found before: a hint in one that will not be listed is not worth the search.
    """
    if len(broken) >= MAX_BROKEN_RULES or not isinstance(name, str) or not 1 < len(name) <= 64:
        return None
    folded = {entry.casefold().replace("_", ""): entry for entry in known}
    close = difflib.get_close_matches(name.casefold().replace("_", ""), folded, n=1, cutoff=0.75)
    return folded[close[0]] if close else None
