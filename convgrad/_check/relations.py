"""Metamorphic relations: between several results of one kernel, and they must hold whatever the right result is.

Each needs another call, whose result follows from that of the first, and compares all bits. Those that change the
order of sums are for data whose sums are exact in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from convgrad._check.cases import EXACT, Array, Case
from convgrad._check.problems import Problem

__all__ = ["RELATIONS", "Relation", "applicable", "same_bits"]

Run = Callable[[Problem, dict[str, Array]], Array]
Axes = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Relation:
    """A relation: it holds for the cases that it `fits`; `expect` yields pairs of results that must have equal bits.

    `text` completes "the result is not right when ..".
    """

    text: str
    fits: Callable[[Case], bool]
    expect: Callable[[Case, dict[str, Array], Array, Run], Iterator[tuple[Array, Array]]]


def same_bits(one: Array, other: Array) -> bool:
    """Whether two results have the same bits; a NaN equals any NaN."""
    if one.tobytes() == other.tobytes():
        return True
    with np.errstate(invalid="ignore"):
        wide, wider = one.astype(np.float64), other.astype(np.float64)
    nan = np.isnan(wide) & np.isnan(wider)
    plain = np.array_equal(wide[~nan], wider[~nan])
    return plain and bool((np.signbit(wide[~nan]) == np.signbit(wider[~nan])).all())


def applicable(case: Case) -> list[str]:
    """Return the names of the relations that fit a case."""
    return [name for name, relation in RELATIONS.items() if relation.fits(case)]


def _images(case: Case, inputs: dict[str, Array], result: Array, run: Run) -> Iterator[tuple[Array, Array]]:
    """With the images in reverse order."""
    other = run(case.problem, {name: values[::-1] if _is_data(name) else values for name, values in inputs.items()})
    yield _unsigned(other), _unsigned(result[::-1] if _is_data(case.problem.output) else result)


def _split(case: Case, inputs: dict[str, Array], result: Array, run: Run) -> Iterator[tuple[Array, Array]]:
    """With the first image alone, and then all others."""
    parts = []
    for some in (slice(0, 1), slice(1, None)):
        cut = {name: values[some] if _is_data(name) else values for name, values in inputs.items()}
        parts.append(run(replace(case.problem, n=len(cut[next(iter(cut))])), cut))
    if _is_data(case.problem.output):
        yield _unsigned(np.concatenate(parts)), _unsigned(result)
    else:
        with np.errstate(invalid="ignore", over="ignore"):
            yield _unsigned(parts[0] + parts[1]), _unsigned(result)


def _unsigned(values: Array) -> Array:
    """Turn -0 into 0: in another order a sum of zeros may have the other sign."""
    unsigned: Array = values + values.dtype.type(0)
    return unsigned


def _channels(case: Case, inputs: dict[str, Array], result: Array, run: Run) -> Iterator[tuple[Array, Array]]:
    """With the channels of src and dst rotated by one."""
    problem = case.problem
    other = run(problem, {name: _rotated(problem, name, values) for name, values in inputs.items()})
    yield _unsigned(other), _unsigned(_rotated(problem, problem.output, result))


def _rotated(problem: Problem, name: str, values: Array) -> Array:
    if _is_data(name):
        return np.roll(values, 1, 1 if problem.data_format == "NCX" else -1)
    if name.endswith("bias"):
        return np.roll(values, 1)
    letters = problem.weights_format.replace("X", "X" * problem.rank)
    return np.roll(values, 1, (letters.index("I"), letters.index("O")))


def _doubled(case: Case, inputs: dict[str, Array], result: Array, run: Run) -> Iterator[tuple[Array, Array]]:
    """With twice the first factor, and twice the bias."""
    scaled = {next(iter(inputs)), "bias"}
    two = result.dtype.type(2)
    other = run(case.problem, {name: values * two if name in scaled else values for name, values in inputs.items()})
    yield other, result * two


def _zeros(case: Case, inputs: dict[str, Array], result: Array, run: Run) -> Iterator[tuple[Array, Array]]:
    """With zeros for the first factor and the bias."""
    zeros = {next(iter(inputs)), "bias"}
    other = run(case.problem, {n: np.zeros_like(v) if n in zeros else v for n, v in inputs.items()})
    yield np.abs(other), np.zeros_like(result)


def _is_data(name: str) -> bool:
    return name.removeprefix("diff_") in ("src", "dst")


def _is_exact(case: Case) -> bool:
    return case.kind in EXACT and case.problem.n > 0


def _doubles(case: Case) -> bool:
    """Whether doubling is exact; in f16 it may overflow, or a result that was rounded to a subnormal be finer."""
    return case.problem.dtype != "f16" and case.kind in (*EXACT, "normal", "positive", "smooth")


RELATIONS: dict[str, Relation] = {
    "zeros": Relation("one factor is zero: it must be zero", lambda case: case.kind != "special", _zeros),
    "doubled": Relation("one factor is doubled: it must be twice the result", _doubles, _doubled),
    "images": Relation(
        "the images come in reverse order", lambda case: _is_exact(case) and case.problem.n > 1, _images
    ),
    "split": Relation(
        "the batch is split and the results are joined",
        lambda case: _is_exact(case) and case.problem.n > 1 and case.problem.dtype in ("f32", "f64"),
        _split,
    ),
    "channels": Relation(
        "the channels are rotated by one",
        lambda case: _is_exact(case) and (case.problem.groups == 1 or case.problem.of_bias),
        _channels,
    ),
}  # fmt: skip
"""The relations by name."""
