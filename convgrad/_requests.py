"""What a client asks for, before it is encoded: `_http.py` sends it to a service, `_local.py` has it computed here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from convgrad._tensors import Tensor

if TYPE_CHECKING:
    from convgrad._graphs import Dump, GraphInputs

__all__ = [
    "CheckHealth",
    "CheckMethod",
    "Compute",
    "Describe",
    "GetJob",
    "GetJobResult",
    "GetTolerance",
    "Inputs",
    "ListOperations",
    "NextCase",
    "OnUpload",
    "Request",
    "RunGraph",
    "SubmitJob",
    "SubmitResult",
    "Validate",
    "ValidateGraph",
    "Verify",
]

Inputs = Mapping[str, "Tensor | Sequence[int] | Mapping[str, Any]"]
"""Tensors by name. `weights_shape` is a list of integers; `validate` also takes `{"dtype", "shape"}`."""

OnUpload = Callable[[int, int], None]
"""Called with the number of bytes of a request sent so far, and in total."""


@dataclass(frozen=True, slots=True)
class Compute:
    """Compute an operation; `whole` if only the outputs are wanted, and no events."""

    op: str
    inputs: Inputs
    attributes: Mapping[str, Any]
    options: Mapping[str, Any]
    whole: bool = False
    on_upload: OnUpload | None = None


@dataclass(frozen=True, slots=True)
class _Call:
    op: str
    inputs: Inputs
    attributes: Mapping[str, Any]
    options: Mapping[str, Any]


class Verify(_Call):
    """Verify a result, which is among the inputs under the name of an output."""

    __slots__ = ()


class GetTolerance(_Call):
    """Return the tolerance of the results of an operation."""

    __slots__ = ()


class Validate(_Call):
    """Check an operation by the dtypes and shapes of its tensors."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class RunGraph:
    """Compute a dumped graph."""

    graph: Dump
    inputs: GraphInputs
    outputs: Sequence[int] | None
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ValidateGraph:
    """Check a dumped graph."""

    graph: Dump
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ListOperations:
    """List the operations."""


@dataclass(frozen=True, slots=True)
class Describe:
    """Return the table of an operation."""

    op: str


@dataclass(frozen=True, slots=True)
class CheckHealth:
    """Report whether calls are accepted."""


@dataclass(frozen=True, slots=True)
class CheckMethod:
    """A method of sealed checks that takes and returns JSON: `check.begin`, `check.submit` without a result, .."""

    method: str
    params: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NextCase:
    """Return the case of a sealed check that is to be answered, with its tensors or, with `seed`, without."""

    check: str
    seed: bool


@dataclass(frozen=True, slots=True)
class SubmitResult:
    """Submit the kernel's result of a case."""

    check: str
    case: int
    output: str
    result: Tensor


@dataclass(frozen=True, slots=True)
class SubmitJob:
    """Have the service keep a request and compute it later; with the same key it is the same job."""

    request: Compute | Verify | GetTolerance | RunGraph
    idempotency_key: str


@dataclass(frozen=True, slots=True)
class GetJob:
    """Return the state of a job (`get`), cancel or delete one (`cancel`), or list one's own (`list`)."""

    what: str
    job: str = ""


@dataclass(frozen=True, slots=True)
class GetJobResult:
    """Return the result of a job of this kind: `compute`, `verify`, `tolerance` or `graph`."""

    job: str
    kind: str


Request = (
    Compute
    | Verify
    | GetTolerance
    | Validate
    | RunGraph
    | ValidateGraph
    | ListOperations
    | Describe
    | CheckHealth
    | CheckMethod
    | NextCase
    | SubmitResult
    | SubmitJob
    | GetJob
    | GetJobResult
)
