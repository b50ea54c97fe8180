"""What the tools take and return: references to tensors, and the schemas of structured results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from convgrad._dtypes import DTYPES
from convgrad._errors import InvalidParams, TooLarge
from convgrad._events import Array

__all__ = [
    "Attributes", "Begun", "Computed", "Described", "Explained", "Inputs", "NextCase", "Signed", "TensorRef",
    "Validated", "Verdict", "seeded", "seeded_bytes",
]  # fmt: skip

_SEEDED, _DIMS = 1 << 24, 8


class TensorRef(BaseModel):
    """A tensor that is somewhere else: exactly one of `handle`, `path` and `seed`; or `dtype` and `shape` alone."""

    model_config = ConfigDict(extra="forbid")

    handle: str | None = Field(default=None, description="Of a service: what POST /v1/tensors or a tool returned.")
    path: str | None = Field(default=None, description="Over stdio: a .npy file, relative to the allowed folder.")
    seed: int | None = Field(
        default=None,
        ge=0,
        description="Made by numpy.random.default_rng(seed).integers(-8, 9, shape, 'int8').astype(dtype).",
    )
    dtype: str | None = Field(default=None, description="f32 (default), f16, bf16 or f64; of a file only for bf16.")
    shape: list[int] | None = Field(default=None, description="With seed, or where no values are needed.")

    def given(self) -> dict[str, Any]:
        """Return the members that are given; raises `InvalidParams` unless they name one tensor."""
        found = self.model_dump(exclude_none=True)
        named = [name for name in ("handle", "path", "seed") if name in found]
        if len(named) > 1 or (named in ([], ["seed"]) and "shape" not in found):
            raise InvalidParams("a tensor must be one of handle, path, seed with shape, or dtype with shape")
        return found if named and named != ["seed"] else {"dtype": "f32", **found}


Attributes = Annotated[dict[str, Any], Field(description="As `describe` lists them, such as strides and pads_begin.")]
Inputs = Annotated[
    dict[str, TensorRef | list[int]],
    Field(description="By name, such as src and diff_dst; weights_shape is a list of integers."),
]


def seeded_bytes(given: Mapping[str, Any]) -> int:
    """Return the bytes of the tensor of a seed; raises `InvalidParams`, and `TooLarge` beyond 2**24 elements."""
    shape, dtype = given["shape"], DTYPES.get(given["dtype"])
    if dtype is None or min(shape, default=0) < 0 or len(shape) > _DIMS:
        raise InvalidParams(f"a seed needs a dtype of f32, f16, bf16 or f64, and at most {_DIMS} sizes of at least 0")
    if (count := int(np.prod(shape, dtype=object))) > _SEEDED:
        raise TooLarge(f"a seed may make {_SEEDED} elements, but the shape has {count}", data={"limit": _SEEDED})
    return count * dtype.numpy.itemsize


def seeded(given: Mapping[str, Any]) -> Array:
    """Return the tensor of a seed; raises as `seeded_bytes` does."""
    seeded_bytes(given)
    values = np.random.default_rng(given["seed"]).integers(-8, 9, given["shape"], "int8")
    made: Array = values.astype(DTYPES[given["dtype"]].numpy)
    return made


class Described(BaseModel):
    """Either all operations or one: attributes, inputs, outputs and layouts."""

    operations: list[dict[str, Any]] | None = None
    operation: dict[str, Any] | None = None


class Validated(BaseModel):
    """Whether a call is valid: its outputs, attributes and cost, or every broken rule."""

    valid: bool
    outputs: dict[str, Any] = {}
    resolved: dict[str, Any] = {}
    plan: dict[str, Any] = {}
    errors: list[dict[str, Any]] = []


class Verdict(BaseModel):
    """A judged result. A failed one has the broken rule with both numbers, the cause, the place, and one element."""

    passed: bool
    op: str = ""
    output: str = ""
    shape: list[int] = []
    rule: dict[str, Any] | None = Field(default=None, description="The first broken rule: measured, and its limit.")
    reason: str | None = Field(default=None, description="The line that explains most.")
    causes: list[str] = Field(default=[], description="Faults that the errors match.")
    where: dict[str, Any] | None = Field(default=None, description="What the wrong elements have in common.")
    hints: list[str] = []
    element: dict[str, Any] | None = Field(
        default=None, description="The worst element and the largest products it sums."
    )
    outcome: str | None = Field(default=None, description="Of a case of a check without a result.")


class Computed(BaseModel):
    """The outputs of a call as references, its resolved attributes and statistics."""

    outputs: dict[str, Any]
    resolved: dict[str, Any]
    stats: dict[str, Any]


class Explained(BaseModel):
    """What one element sums: ranges of positions that are read together, along each axis."""

    element: list[int]
    terms: int
    sums: list[dict[str, Any]]
    text: str


class Begun(BaseModel):
    """A check that has begun."""

    check: str
    cases: int | None = None
    case_s: float | None = Field(default=None, description="Seconds to answer a case.")
    key_id: str | None = None


class NextCase(BaseModel):
    """A case to answer; `case` is null after the last one."""

    check: str
    case: int | None
    cases: int
    op: str | None = None
    dtype: str | None = None
    attributes: dict[str, Any] = {}
    inputs: dict[str, Any] = {}
    outputs: dict[str, Any] = {}
    generate: dict[str, Any] | None = None


class Signed(BaseModel):
    """The outcome of a check, and where its signed record is."""

    check: str
    verdict: str
    passed: bool
    counts: dict[str, int]
    failed: list[dict[str, Any]] = Field(description="The first cases that did not pass.")
    signature: dict[str, Any]
    record: str = Field(description="Path or page of the record.")
