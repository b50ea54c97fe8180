"""The judge of a kernel's results: the service's verification."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from convgrad._arithmetic import fitting
from convgrad._check.cases import Array, Case
from convgrad._check.problems import Problem
from convgrad._client import Client
from convgrad._report import Report

__all__ = ["Judge", "as_read"]

_ORDERED = ("images", "split", "channels")
"""Relations that compare sums whose order differs: honest ones may, unless they are plain."""


class Judge:
    """Verifies results on a service. Its methods raise what `Client` raises.

    `arithmetic` is what the kernel declares (`Client.verify`). A case is judged by the members that mean something for
    its problem: with ``products=tf32`` those in f16, for example, are judged as plain.
    """

    def __init__(self, client: Client, arithmetic: Mapping[str, Any] | None = None) -> None:
        self._client = client
        self._arithmetic = arithmetic or {}

    def declared(self, problem: Problem) -> dict[str, Any]:
        """Return what the kernel declares that means something for a problem."""
        return fitting(self._arithmetic, problem)

    def unfit(self, problem: Problem) -> tuple[str, ...]:
        """Return the relations that an honest kernel need not keep."""
        said = self.declared(problem)
        more = ("doubled",) if "f16" in said.values() else ()  # which overflows
        return (*_ORDERED, *more) if said else ()

    def verify(self, case: Case, inputs: Mapping[str, Array], result: Array) -> Report:
        """Return the report on a result of a case."""
        problem = case.problem
        more: Any = {"output": problem.output, "arithmetic": self.declared(problem) or None}
        return self._client.verify(problem.op, inputs, result, problem.attributes(), **more)

    def reference(self, problem: Problem, inputs: Mapping[str, Array]) -> Array:
        """Return the result of the float64 reference, rounded once."""
        return self._client.run(problem.op, inputs, problem.attributes(), reference=True)


def as_read(values: Array, name: str | None) -> Array:
    """Return f32 values in the way that a report names: as TF32 or bf16, to nearest or truncated, or as f16."""
    kind, _, how = (name or "").partition(", ")
    if not kind:
        return values
    if kind == "f16":
        return values.astype(np.float16).astype(np.float32)
    bits, dropped = values.view(np.uint32).astype(np.int64), {"TF32": 13, "bf16": 16}[kind]
    half = 1 << (dropped - 1)
    more = {"truncated": 0, "halves away from zero": half}.get(how, half - 1 + (bits >> dropped & 1))
    read: Array = ((bits + more) >> dropped << dropped).astype(np.uint32).view(np.float32)
    return np.where(np.isfinite(values), read, values)
