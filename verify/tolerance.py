"""Tolerances to take along: the largest honest error of each element, and the smallest (atol, rtol) that contains all.

Rule 2 of `verify.rules` is about errors from the exact sum. A test compares with the reference, which is rounded, so

    tolerance = |reference - exact| + half an ULP + 8 standard deviations of summing in the hardest order (`hardest`)

and where a kernel declares that it rounds its inputs, as far as the sums of rounded inputs are away, in the worst way.
Sums that are exact have a tolerance of 0, and so have those that are Inf or NaN. It is infinite where any value may be
honest: the accumulator may overflow, or the sum is at the border to Inf.

Of all pairs with atol + rtol * |reference| >= tolerance for every element, the smallest is the one that allows least in
the mean over the elements. In the plane of |reference| and tolerance it is the line above all points that is lowest at
the mean of |reference|: the edge of their upper hull there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, exp, floor, inf, log10, prod
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.dtypes import DTYPES
from kernels.plan import Plan, Stop, Storage
from kernels.problem import ConvProblem, storage_dtype
from kernels.reference import narrow
from kernels.registry import register
from verify.arithmetic import PLAIN, Arithmetic
from verify.blocks import blocks
from verify.compared import Block, Compared, block_of
from verify.reading import Inputs, choices, deviations
from verify.report import as_json
from verify.rules import hardest, log_missing, model_of
from verify.stopping import until
from verify.unit import REPORT_BYTES, Verification, VerifyKernel, in_full, write_output

__all__ = ["TOLERANCE", "places_of", "plan_tolerance", "reading_macs", "smallest_pair", "wide_dtype"]

Array = npt.NDArray[np.float64]

_SHOWN = 8
"""Most places of NaN and Inf that a report has."""

_ROUNDS = 100
"""Most edges of the hull that are tried; some ten are enough."""

_MARGIN = 1 + 2.0**-20
"""What `atol + rtol * |reference|` may lose when it is computed in f32."""


@dataclass(frozen=True)
class ToleranceTask(Verification):
    """The tolerance of a problem's results: the output is a report, the reference and the tolerances.

    `arithmetic` leaves out how inputs are rounded, which `declared` has: the sums are those of the inputs as they are.
    """

    declared: Arithmetic = PLAIN

    @property
    def input_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the inputs: there is no result."""
        return self.problem.input_shapes

    def result_of(self, inputs: object) -> Storage:  # noqa: ARG002
        """Return a result of NaN, in the memory of one: what it is excused for, any value is."""
        one: Storage = narrow(np.full(1, np.nan), self.dtype)
        return np.broadcast_to(one, self.problem.output_shape)

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Bytes of the output."""
        return (REPORT_BYTES + 2 * prod(self.problem.output_shape) * DTYPES[wide_dtype(self.dtype)].size,)


def wide_dtype(dtype: str) -> str:
    """Return the dtype of reference and tolerances: any machine reads f32, which holds f16 and bf16."""
    return "f64" if dtype == "f64" else "f32"


def reading_macs(problem: ConvProblem, declared: Arithmetic) -> int:
    """Return the multiply-adds of the sums of rounded inputs."""
    return problem.macs * len(list(choices(declared))) if declared.readings else 0


def plan_tolerance(problem: ConvProblem, *, workers: int = 1, arithmetic: Arithmetic | None = None) -> Plan:
    """Plan the tolerance of results of a kernel with this arithmetic."""
    said = arithmetic or Arithmetic.usual(problem.dtype)
    summed = replace(said, products="f32") if said.readings else said
    return in_full(ToleranceTask(problem, summed, declared=said), TOLERANCE.name, workers)


def places_of(shape: Sequence[int], dtype: str) -> tuple[slice, slice]:
    """Return where reference and tolerances of a result are in the output of a finished task, in `wide_dtype`."""
    size = prod(shape) * DTYPES[wide_dtype(dtype)].size
    return slice(REPORT_BYTES, REPORT_BYTES + size), slice(REPORT_BYTES + size, REPORT_BYTES + 2 * size)


class ToleranceKernel(VerifyKernel):
    """Computes the units of `plan_tolerance`: the sums as a verification does, then the tolerances."""

    name = "tolerance"

    def _report(self, task: Verification, compared: Compared, room: Inputs, output: Storage, stop: Stop) -> None:  # noqa: ARG002
        assert isinstance(task, ToleranceTask)
        kind = storage_dtype(wide_dtype(task.dtype))
        reference, tolerance = (
            output[place].view(kind).reshape(compared.exact.shape)
            for place in places_of(compared.exact.shape, task.dtype)
        )
        write_output(as_json(_measure(task, compared, reference, tolerance, stop)), output)


@np.errstate(all="ignore")
def _measure(
    task: ToleranceTask, compared: Compared, reference: npt.NDArray[Any], tolerance: npt.NDArray[Any], stop: Stop
) -> dict[str, Any]:
    """Write reference and tolerances; return the report."""
    model = model_of(compared, stop)
    hard = hardest(compared, model, stop)
    off = deviations(compared.problem, task.declared, compared.inputs, compared.exact, stop)
    exactly, exact, spread, missing = 0, compared.exact, compared.spread, (_Missing(), _Missing())
    for part in until(stop, blocks(exact.shape)):
        block = block_of(compared, hard, part)
        tolerance[part] = _rounded_up(_tolerances(block, off[part], task.dtype), tolerance.dtype)
        reference[part] = block.nearest
        exactly += int((tolerance[part] == 0)[np.isfinite(block.exact)].sum())
    atol, rtol = smallest_pair(reference, tolerance, stop)
    for part in until(stop, blocks(exact.shape)):
        pair = atol + rtol * np.abs(reference[part].astype(np.float64))
        for each, allowed in zip(missing, (tolerance[part].astype(np.float64), pair), strict=True):
            each.add(exact[part], spread[part], allowed)
    nan, infinite, open_ = np.isnan(reference), np.isinf(reference), np.isinf(tolerance)
    said, products = task.declared, int(compared.terms.max(initial=0))
    return {
        "dtype": task.dtype,
        "shape": list(reference.shape),
        "elements": reference.size,
        "atol": atol,
        "rtol": rtol,
        "exact": exactly,
        "largest": float(tolerance[~open_].max(initial=0.0)),
        "difficulty": float(np.sqrt(np.mean(np.square(hard.growth / model.growth)))) if atol or rtol else 1.0,
        "arithmetic": said.text,
        "detection": {
            "one_element": missing[0].share, "one_element_of_pair": missing[1].share, "products": products
        },
        "not_finite": _places(nan, infinite),
        "unbounded": int(open_.sum()),
        "text": _sentence(atol, rtol, said, products, task.dtype),
    }  # fmt: skip


def _tolerances(block: Block, off: Array, dtype: str) -> Array:
    """Return the largest honest errors of some elements from the rounded reference."""
    honest = block.allowed(dtype) + off
    found = np.where(block.exactly, off, honest + block.rounding)
    huge = inf if dtype == "f64" else 2.0 ** DTYPES[dtype].largest
    at_border = np.abs(np.abs(block.exact) - huge) <= honest
    found[block.unknown | at_border | np.isnan(found)] = np.inf
    settled = ~np.isfinite(block.exact) | (~np.isfinite(block.nearest) & ~at_border & ~block.unknown)
    return np.where(settled, 0.0, found)


def _rounded_up(values: Array, kind: np.dtype[Any]) -> npt.NDArray[Any]:
    """Round to a dtype, up, and by one more unit for a comparison that is computed in this dtype."""
    found = values.astype(kind)
    for _ in range(2):
        found = np.nextafter(found, kind.type(np.inf))
    return np.where(values == 0, kind.type(0), found)


class _Missing:
    """The share of the products of a typical element that may be missing unseen."""

    def __init__(self) -> None:
        self._logarithms, self._count = 0.0, 0

    def add(self, exact: Array, spread: Array, allowed: Array) -> None:
        """Add the elements that are allowed any error."""
        some = np.isfinite(exact) & (spread > 0) & (allowed > 0)
        self._logarithms += log_missing(allowed[some], spread[some], exact[some])
        self._count += int(some.sum())

    @property
    def share(self) -> float:
        """The geometric mean; 0 where no error is allowed."""
        return exp(self._logarithms / self._count) if self._count else 0.0


def smallest_pair(reference: npt.NDArray[Any], tolerance: npt.NDArray[Any], stop: Stop) -> tuple[float, float]:
    """Return (atol, rtol) with atol + rtol * |reference| >= tolerance, the pair that allows least in the mean.

    Elements whose reference or tolerance is not finite do not count. Both are rounded up to four digits.
    """
    counts = np.isfinite(reference) & np.isfinite(tolerance)
    sizes, least = np.abs(reference[counts].astype(np.float64)), tolerance[counts].astype(np.float64)
    if not least.any():
        return 0.0, 0.0
    middle = float(sizes.mean())
    below = sizes <= middle
    left, right = (int(np.where(side, least, -np.inf).argmax()) for side in (below, ~below))
    slope = 0.0
    for _ in until(stop, range(_ROUNDS if not below.all() else 0)):
        slope = (least[right] - least[left]) / (sizes[right] - sizes[left])
        above = least - slope * sizes
        at = int(above.argmax())
        if above[at] <= max(above[left], above[right]):
            break
        left, right = (at, right) if below[at] else (left, at)
    slope = max(0.0, float(slope))
    if (base := float((least - slope * sizes).max())) < 0:  # a line through the origin is lower
        base, slope = 0.0, float((least / sizes).max())
    return _four_digits(base), _four_digits(slope)


def _four_digits(value: float) -> float:
    if value == 0:
        return 0.0
    value *= _MARGIN
    digits = 3 - floor(log10(value))
    return float(f"{ceil(value * 10.0**digits)}e{-digits}") if digits < 300 else value


def _places(nan: npt.NDArray[np.bool_], infinite: npt.NDArray[np.bool_]) -> dict[str, Any]:
    first = np.argwhere(nan | infinite)[:_SHOWN].tolist()
    return {"nan": int(nan.sum()), "inf": int(infinite.sum()), "first": first}


def _sentence(atol: float, rtol: float, said: Arithmetic, products: int, dtype: str) -> str:
    """Return why the pair is right."""
    if atol == rtol == 0:
        return f"every sum is exact with {said.text}: an honest result has every bit of the reference"
    words = f"half an ULP of {dtype}, and 8 standard deviations of the roundings of {products} products and their sums"
    if said.readings:
        words += ", and what rounding the inputs changes"
    return (
        f"atol={atol!r}, rtol={rtol!r} contain every honest result for these data ({said.text}): {words}, "
        "in the hardest order that kernels add in; of all such pairs this one allows least in the mean"
    )


TOLERANCE = ToleranceKernel()
register(TOLERANCE)
