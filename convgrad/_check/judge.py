"""The judge of a kernel's results: the service's verification."""

from __future__ import annotations

from collections.abc import Mapping

from convgrad._check.cases import Array, Case
from convgrad._check.problems import Problem
from convgrad._client import Client
from convgrad._report import Report

__all__ = ["Judge"]


class Judge:
    """Verifies results on a service. Its methods raise what `Client` raises."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def verify(self, case: Case, inputs: Mapping[str, Array], result: Array) -> Report:
        """Return the report on a result of a case."""
        problem = case.problem
        return self._client.verify(problem.op, inputs, result, problem.attributes(), output=problem.output)

    def reference(self, problem: Problem, inputs: Mapping[str, Array]) -> Array:
        """Return the result of the float64 reference, rounded once."""
        return self._client.run(problem.op, inputs, problem.attributes(), reference=True)
