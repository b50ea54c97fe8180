"""Requests, replies and problems as models, for the OpenAPI and OpenRPC documents.

The APIs parse bodies as they arrive, without these models, and `schemas.ops.resolve` has the rules. A test checks the
models against the tables, so that the documents match the service.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model

from schemas.attributes import attributes_model, plain_attributes_model
from schemas.rows import MAX_DIMS, Dialect, Operation, TensorRow
from schemas.tables import OPERATIONS, CalledOperation, find_operation, verified
from schemas.tensors import MAX_LISTED, MAX_OUTPUTS, DataTensor, NpyTensor, TensorDescription, TensorReply

__all__ = [
    "OPERATION_NAME",
    "AnyCall",
    "CallOptions",
    "CallReply",
    "Problem",
    "ProblemError",
    "Stats",
    "ToleranceReply",
    "ValidateReply",
    "VerifyReply",
    "other_names",
    "request_model",
    "validate_model",
    "verify_model",
]


OPERATION_NAME: dict[str, Any] = {
    "description": "Name of an operation. Its other names, `x-aliases`, are accepted too.",
    "schema": {"type": "string", "enum": [row.name for row in OPERATIONS]},
    "x-aliases": {row.name: row.aliases for row in OPERATIONS},
}
"""The parameter that names an operation, as both documents describe it."""


def other_names(row: Operation) -> str:
    """Return the sentence about the aliases of an operation, which are no methods or paths of their own."""
    return f"Also called as {', '.join(f'`{name}`' for name in row.aliases)}."


class _Reply(BaseModel):
    model_config = ConfigDict(extra="allow")


class Arithmetic(BaseModel):
    """What a kernel under verification says of its products and sums; a member that is left out has its default."""

    model_config = ConfigDict(extra="forbid")

    products: Literal["f32", "tf32", "bf16", "f16", "3xtf32", "bf16x3", "bf16x6"] | None = Field(
        default="f32", description="What products are formed of: rounded inputs, or several narrow numbers for each."
    )
    sum: Literal["f64", "f32", "f16", "bf16"] | None = Field(default=None, description="What sums are kept in.")
    segments: Annotated[int, Field(strict=True, ge=1, le=1 << 12)] | None = Field(
        default=1, description="Parts that are summed apart, and whose sums are added in segment_sum."
    )
    segment_sum: Literal["f64", "f32", "f16", "bf16"] | None = Field(
        default=None, description="What the sums of the segments are added in; by default the dtype of the result."
    )
    algorithm: Annotated[str, Field(pattern=r"^(direct|fft|winograd F\(\d{1,2}, ?\d{1,2}\))$")] | None = Field(
        default="direct", description="direct, fft, or Winograd's F(m, r): tiles of m elements of dst for r taps."
    )


class CallOptions(BaseModel):
    """How a call is computed and answered."""

    model_config = ConfigDict(extra="forbid")

    encoding: Literal["base64", "npy", "list"] | None = Field(
        default="base64",
        description="Output tensors in JSON: raw elements, or a whole .npy file, in base64; or nested lists of at most "
        f"{MAX_LISTED} numbers.",
    )
    deadline_ms: Annotated[int, Field(strict=True, ge=1, le=86_400_000)] | None = Field(
        default=None, description="Time after which the call stops and fails with deadline_exceeded."
    )
    reference: bool | None = Field(
        default=False, description="Use the slow reference kernel, which accumulates in float64 and alone computes f64."
    )
    reproducible: bool | None = Field(
        default=False, description="Give the same bits on every kind of processor: slower, by the reference kernel."
    )
    algorithm: Literal["direct", "winograd", "auto"] | None = Field(
        default="direct",
        description="How convolutions are summed; auto: the faster way. What winograd can't compute is refused.",
    )
    outputs: Annotated[list[str], Field(min_length=1, max_length=MAX_OUTPUTS)] | None = Field(
        default=None, description="Names of the outputs to compute; by default the operation's first."
    )
    explain: bool | None = Field(
        default=False, description="In verifications: test every hypothesis, also about a result that passes."
    )
    fast: bool | None = Field(
        default=None, description="In verifications: random projections; by default only beyond the work limit."
    )
    arithmetic: Arithmetic | None = Field(
        default=None,
        description="In verifications and tolerances: what the kernel says of its products and sums; by default f32.",
    )


class Stats(_Reply):
    """The cost of a computation."""

    kernel: str
    algorithm: Literal["direct", "winograd"]
    gmac: float
    compute_ms: float
    tiles: int


class CallReply(_Reply):
    """The reply to a call: outputs by name, the attributes after defaults and `auto_pad`, and the cost."""

    op: str
    outputs: dict[str, TensorReply]
    resolved: dict[str, Any]
    stats: Stats
    warnings: list[str] | None = None


class ValidateReply(_Reply):
    """The reply to `ops.validate`: the call's outputs, resolved attributes and plan; nothing was computed."""

    op: str
    outputs: dict[str, TensorDescription]
    resolved: dict[str, Any]
    plan: dict[str, Any]
    warnings: list[str] | None = None


class Verdict(_Reply):
    """Whether a result passes, how many elements fail, and by which rule."""

    passed: bool
    failed: int
    rule: str


class Rule(_Reply):
    """One rule of the verdict: how many elements it is about, what was measured, and the limit.

    `exact` counts wrong elements. `mean_square` is the mean of squared errors in units of those that are expected,
    `largest` the largest error as a share of what is allowed, `hypotheses` the correlation with the likeliest cause.
    """

    rule: Literal["exact", "mean_square", "largest", "hypotheses"]
    passed: bool
    elements: int
    measured: float | str
    limit: float | None
    text: str


class Cause(_Reply):
    """A cause of the errors: their correlation with those that it predicts, and their size as a multiple of these."""

    cause: str
    text: str
    correlation: float
    size: float


class WrongAxis(_Reply):
    """Places of an axis that hold all wrong elements; `step` is None where they are not evenly spaced."""

    axis: str
    size: int
    first: int
    last: int
    step: int | None
    count: int
    text: str


class Wrong(_Reply):
    """Where a result is wrong: axes on which only some indices have wrong elements, and what they have in common."""

    text: str
    wrong: int
    elements: int
    axes: list[WrongAxis]
    box: int
    share_of_box: float
    alike: str | None


class Detection(_Reply):
    """How many products of a sum can be lost before the test notices, as a share of all `products` of the sum.

    Products of fewer than `product_bits` significant bits are noticed; null where every bit counts.
    """

    every_element: float
    one_element: float
    products: int
    product_bits: float | None


class RelativeErrors(_Reply):
    """The RMS error in units of that of a naive sum in order, and of the exact sum rounded once."""

    to_naive: float | str
    to_best: float | str


class Projections(_Reply):
    """What a fast verification found: how many random projections, their errors, and which part was checked in full.

    `exact` is whether all projections are exact, null where sums are not. The rest of the report is about `checked`.
    """

    count: int
    passed: bool
    exact: bool | None
    mean_square: dict[str, float | str]
    largest: dict[str, float | str]
    detection: dict[str, float]
    checked: dict[str, Any]


class VerifyReply(_Reply):
    """The report of `ops.verify`: a result compared with the float64 reference."""

    op: str
    output: str
    passed: bool
    dtype: str
    shape: list[int]
    elements: int
    equal: bool
    unequal: int
    max_error: float | str
    ulp: list[dict[str, int | None]]
    rules: list[Rule]
    verdicts: dict[str, Verdict]
    causes: list[Cause]
    product_bits: float | None
    difficulty: float
    order: str | None
    arithmetic: dict[str, Any] | None = None
    errors: RelativeErrors | None
    detection: Detection
    where: Wrong | None
    projections: Projections | None = None
    maps: dict[str, Any]
    worst: dict[str, Any] | None
    hints: list[str]
    resolved: dict[str, Any]
    stats: Stats
    warnings: list[str] | None = None


class ToleranceDetection(_Reply):
    """Share of the `products` of a sum that may be missing unseen in one element, a typical one, by either test."""

    one_element: float
    one_element_of_pair: float
    products: int


class NotFinite(_Reply):
    """How many elements are NaN and Inf because the data are, and the indices of the `first` of them."""

    nan: int
    inf: int
    first: list[list[int]]


class ToleranceReply(_Reply):
    """The reply to `ops.tolerance`: how far honest results of the call may be from its float64 reference.

    `outputs` are the `reference`, rounded to the dtype, and the `tolerance` of each element, as f32, or f64 for f64.
    `atol` and `rtol` contain the tolerance of every element. `exact` elements must have every bit of the reference,
    `unbounded` ones may have any value.
    """

    op: str
    output: str
    dtype: str
    shape: list[int]
    elements: int
    atol: float
    rtol: float
    exact: int
    unbounded: int
    largest: float
    difficulty: float
    arithmetic: str
    detection: ToleranceDetection
    not_finite: NotFinite
    text: str
    outputs: dict[str, TensorReply]
    resolved: dict[str, Any]
    stats: Stats
    warnings: list[str] | None = None


class ProblemError(_Reply):
    """One broken rule; `loc` is the path to the value, for example `["attributes", "strides", 0]`."""

    loc: list[str | int]
    msg: str
    type: str


class Problem(_Reply):
    """An RFC 9457 problem; `code` is stable, `errors` lists every broken rule."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    request_id: str
    errors: list[ProblemError] | None = None


class AnyCall(BaseModel):
    """A call of any operation, in any form that the service accepts; the paths of the operations have their own."""

    model_config = ConfigDict(extra="forbid")

    attributes: dict[str, Any] | None = Field(default=None, description="Attributes by name, in either spelling.")
    inputs: dict[str, DataTensor | NpyTensor | TensorDescription | list[int] | None] = Field(
        description="Tensors and shapes by name, in either spelling."
    )
    options: CallOptions | None = None


def request_model(called: CalledOperation, *, plain: bool = False) -> type[BaseModel]:
    """Return the model of a call's body: attributes, inputs with their data, options.

    With `plain` it has one spelling of each name, and no wrapped values.
    """
    return _request(called.operation.name, called.dialect, "Request", plain=plain)


def validate_model(called: CalledOperation, *, plain: bool = False) -> type[BaseModel]:
    """Return the model of the body of `validate`, in which a tensor may be just dtype and shape."""
    return _request(called.operation.name, called.dialect, "Validate", plain=plain)


def verify_model(called: CalledOperation, *, plain: bool = False) -> type[BaseModel]:
    """Return the model of the body of `verify`, whose inputs have the result too."""
    return _request(called.operation.name, called.dialect, "Verify", plain=plain)


@cache
def _request(
    operation: str, dialect: Dialect, kind: Literal["Request", "Validate", "Verify"], *, plain: bool
) -> type[BaseModel]:
    row = find_operation(operation).operation
    name = row.spelled(dialect)
    called, described = find_operation(name), kind == "Validate"
    tensor: Any = DataTensor | NpyTensor | TensorDescription if described else DataTensor | NpyTensor
    attributes: Any = plain_attributes_model(called) if plain else attributes_model(called)
    needed = not plain or any(field.is_required() for field in attributes.model_fields.values())
    return create_model(
        f"{name}{kind}",
        __config__=ConfigDict(extra="forbid"),
        __doc__=f"A call of {name}. {row.summary}",
        attributes=(
            attributes if needed else attributes | None,
            Field(default=... if needed else None, description=f"Attributes of {name}."),
        ),
        inputs=(
            create_model(
                f"{name}{kind}Inputs",
                __config__=ConfigDict(extra="forbid"),
                __doc__=f"Inputs of {name}.",
                **_inputs(verified(called) if kind == "Verify" else called, tensor, plain=plain),
            ),
            ...,
        ),
        options=(CallOptions | None, Field(default=None)),
    )


def _inputs(called: CalledOperation, tensor: Any, *, plain: bool) -> dict[str, Any]:
    """Return a field for each input in the dialect called, and unless `plain` for its other spelling."""
    found: dict[str, Any] = {}
    for row in called.operation.inputs:
        name = row.spelled(called.dialect)
        if plain and row.required:
            found[name] = (tensor, Field(description=row.doc))
            continue
        found[name] = (_input_type(row, tensor), Field(default=None, description=row.doc))
        for other in () if plain else row.others(called.dialect):
            found[other] = (
                _input_type(row, tensor),
                Field(default=None, description=f"Another spelling of `{name}`."),
            )
    return found


def _input_type(row: TensorRow, tensor: Any) -> Any:
    size = Annotated[int, Field(strict=True, ge=0, le=2**31 - 1, examples=[1])]
    sizes = Annotated[list[size], Field(max_length=MAX_DIMS, examples=[[2, 1, 2, 2]])]
    return (sizes | tensor | None) if row.dtypes == "s32" else (tensor | None)
