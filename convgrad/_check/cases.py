"""Cases: a problem with its data, drawn from a seed.

    case = draw(seed, number, Takes(ops=["Convolution"], dtypes=["f32"]))
    case.problem.op, case.problem.attributes(), case.inputs()

The same seed, number and `Takes` give the same case with the same bits, whichever cases were drawn before. Nothing of
a case can be derived from others without the seed, so a service can keep it (use 128 random bits) and send the inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isqrt, prod
from typing import Any

import numpy as np
import numpy.typing as npt

from convgrad._check.covering import LEVELS, covering, random_problem
from convgrad._check.named import LAYERS, TRAPS, layer, trap
from convgrad._check.problems import Problem, Takes
from convgrad._dtypes import dtype as dtype_of

__all__ = ["DIGITS", "EXACT", "KINDS", "MACS", "SOURCES", "Case", "draw"]

Array = npt.NDArray[Any]
Generator = np.random.Generator

MACS = 100_000
"""Multiply-adds of a random problem, at most."""

SOURCES = ("random", "traps", "layers")
"""Where problems come from."""

_EXACT_SUM = {"f64": 1 << 52}
_WIDEST = {"f32": 4096, "f16": 32, "bf16": 128, "f64": 1 << 24}
"""Largest integers of the inputs: in f16 larger ones would overflow more often than not."""

_RANGE = {"f32": (-126, 127), "f16": (-14, 15), "bf16": (-126, 127), "f64": (-1022, 1023)}
"""Exponents of the smallest and the largest normal number."""

DIGITS = {"f32": 23, "f16": 10, "bf16": 7, "f64": 52}


@dataclass(frozen=True)
class Case:
    """A problem and the `kind` of its data, one of `KINDS`; `name` is that of a trap or a layer, or `random`."""

    problem: Problem
    kind: str
    seed: int
    number: int = 0
    name: str = "random"

    def inputs(self) -> dict[str, Array]:
        """Return the inputs by name, in the dtype of the problem; C-contiguous and writeable."""
        rng = np.random.default_rng([self.seed, self.number, 1])
        with np.errstate(over="ignore"):
            made = KINDS[self.kind](self.problem, rng)
            dtype = dtype_of(self.problem.dtype).numpy
            return {name: np.ascontiguousarray(made[name].astype(dtype)) for name in self.problem.input_shapes}

    def as_json(self) -> dict[str, Any]:
        """Return the fields as JSON."""
        return {"problem": self.problem.as_json(), "kind": self.kind, "seed": self.seed,
                "number": self.number, "name": self.name}  # fmt: skip

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Case:
        """Return the case that `as_json` described; raises `ValueError` for anything else."""
        try:
            return cls(**{**data, "problem": Problem.from_json(data["problem"])})
        except (TypeError, KeyError) as error:
            raise ValueError("a case must have the fields of `Case`") from error

    def __str__(self) -> str:
        return f"case {self.number} ({self.kind}, {self.name}): {self.problem}"


def draw(
    seed: int,
    number: int,
    takes: Takes,
    *,
    macs: int = MACS,
    sources: Sequence[str] = SOURCES,
    kinds: Sequence[str] | None = None,
    names: Sequence[str] = (),
) -> Case:
    """Draw a case by its number, from 0 on.

    Operations and dtypes take turns. Two of three problems are rows of a covering array, the third one is a trap or a
    layer. They have at most about `macs` multiply-adds, the first ones an eighth of it, each eighth 20 times as many
    and layers 10 times. `kinds` of data are by default all, `names` those of the traps or layers to choose from.
    """
    op = takes.ops[number % len(takes.ops)]
    dtype = takes.dtypes[number // len(takes.ops) % len(takes.dtypes)]
    turn = number // (len(takes.ops) * len(takes.dtypes))
    rng, fixed = np.random.default_rng([seed, number, 0]), np.random.default_rng([seed, 2])
    named = names or [*(TRAPS if "traps" in sources else ()), *(LAYERS if "layers" in sources else ())]
    share = 3 if named and not names and "random" in sources else 1
    choose = covering(fixed, turn - turn // 3 if share == 3 else turn)
    kind = choose([kind for kind in KINDS if kind in (kinds or KINDS) for _ in range(_SHARE[kind])])
    if turn < 2 and "integers" in (kinds or KINDS):  # which show most mistakes
        kind = "integers"
    if named and turn % share == share - 1:
        for at in np.roll(fixed.permutation(len(named)), -(turn // share)):
            name = named[int(at)]
            problem = trap(name, op, dtype, takes) if name in TRAPS else layer(name, op, dtype, takes, macs * 10)
            if problem is not None:
                return Case(problem, kind, seed, number, name)
    most = macs // 8 if turn < LEVELS else macs * 20 if turn % 8 == 7 else macs
    return Case(random_problem(rng, takes, op, dtype, most, choose), kind, seed, number)


def _integers(problem: Problem, rng: Generator) -> dict[str, Array]:
    """Integers so small that every partial sum is exact, and as large as that allows.

    In a quarter of the cases the factors are positive and near the largest, so that the sums have all digits; in
    another they are so small that many sums are zero.
    """
    bound = _EXACT_SUM.get(problem.dtype, (1 << 24) - 1) // max(1, problem.sum_length + problem.bias)
    widest = _WIDEST[problem.dtype]
    first = max(1, min(widest, isqrt(bound)))
    second = max(1, min(widest, bound // first))
    if problem.of_bias and widest**2 > bound:  # nothing is multiplied
        first = bound
    names = [name for name in problem.input_shapes if name != "bias"]
    limits = dict(zip(names, (first, second), strict=False)) | {"bias": first * second if problem.bias else first}
    share = int(rng.integers(4))
    near = share == 0 and min(limits.values()) > 3
    limits = {name: min(limit, 2) if share == 1 else limit for name, limit in limits.items()}
    return {
        name: rng.integers(limits[name] * 3 // 4 if near else -limits[name], limits[name] + 1, shape)
        for name, shape in _shapes(problem)
    }


def _normal(problem: Problem, rng: Generator) -> dict[str, Array]:
    """Normally distributed numbers."""
    return {name: rng.standard_normal(shape) for name, shape in _shapes(problem)}


def _positive(problem: Problem, rng: Generator) -> dict[str, Array]:
    """Numbers from 0 to 1, as after an activation; sums of them don't cancel."""
    return {name: rng.random(shape) for name, shape in _shapes(problem)}


def _smooth(problem: Problem, rng: Generator) -> dict[str, Array]:
    """Long waves with a little noise: neighbours are alike, as in images."""
    found = {}
    for name, shape in _shapes(problem):
        phase: Any = rng.random() * 6
        for axis, size in enumerate(shape):
            steps = np.arange(size) * rng.uniform(0.5, 3) / max(1, size)
            phase = phase + np.expand_dims(steps, [other for other in range(len(shape)) if other != axis])
        found[name] = np.broadcast_to(np.cos(phase) + 0.5, shape) + 0.02 * rng.standard_normal(shape)
    return found


def _scaled(problem: Problem, rng: Generator, result: int, skew: int = 0) -> dict[str, Array]:
    """Normally distributed numbers whose sums have magnitudes of about 2 ** `result`.

    The first factor is 2 ** `skew` times as large as otherwise, and the second one as much smaller.
    """
    found = _normal(problem, rng)
    low, high = _RANGE[problem.dtype]
    names = [name for name in found if name != "bias"]
    if len(names) == 1:
        return {name: np.ldexp(values, min(result, high - 3)) for name, values in found.items()}
    each = result - (max(1, problem.sum_length).bit_length() - 1) / 2
    parts = [each / 2 + skew, each / 2 - skew]
    for name, exponent in zip(names, parts, strict=True):
        found[name] = np.ldexp(found[name], int(np.clip(exponent, low, high - 3)))
    if "bias" in found:
        found["bias"] = np.ldexp(found["bias"], min(result, high - 3))
    return found


def _huge(problem: Problem, rng: Generator) -> dict[str, Array]:
    """Sums near the largest number, or factors of very different magnitudes."""
    high = _RANGE[problem.dtype][1]
    return _scaled(problem, rng, high - 5) if rng.integers(2) else _scaled(problem, rng, 0, high * 3 // 4)


def _tiny(problem: Problem, rng: Generator) -> dict[str, Array]:
    """Sums a little above the smallest normal number."""
    return _scaled(problem, rng, _RANGE[problem.dtype][0] + 6)


def _subnormals(problem: Problem, rng: Generator) -> dict[str, Array]:
    """One factor of subnormal numbers, the other large, so that the sums are normal."""
    low, high = _RANGE[problem.dtype]
    found = _normal(problem, rng)
    names = [name for name in found if name != "bias"]
    few = min(DIGITS[problem.dtype], 10)
    steps = rng.integers(-(2**few) + 1, 2**few, found[names[0]].shape).astype(np.float64)
    found[names[0]] = np.ldexp(steps, low - DIGITS[problem.dtype])
    for name in names[1:]:
        found[name] = np.ldexp(found[name], high - 6)
    if "bias" in found:
        found["bias"] = np.ldexp(found["bias"], low + (0 if problem.of_bias else high - 6))
    return found


def _special(problem: Problem, rng: Generator) -> dict[str, Array]:
    """Integers with a few Inf and NaN, most of them in the first and last rows, pixels and channels."""
    found = {name: values.astype(np.float64) for name, values in _integers(problem, rng).items()}
    for name in list(found)[: 1 + int(rng.integers(2))]:
        values = found[name]
        for _ in range(int(rng.integers(1, 4)) if values.size else 0):
            at = tuple(int(rng.choice([0, size - 1, rng.integers(size)])) for size in values.shape)
            values[at] = rng.choice([np.inf, -np.inf, np.nan])
    return found


def _impulse(problem: Problem, rng: Generator) -> dict[str, Array]:
    """Zeros of both signs with a single one, and integers that differ: the result shows what is wired where."""
    found: dict[str, Array] = {}
    for name, shape in _shapes(problem):
        found[name] = np.arange(prod(shape)).reshape(shape) % 251 - 125.0
    first, shape = _shapes(problem)[0]
    found[first] = np.copysign(0.0, rng.integers(2, size=shape) - 0.5)
    if found[first].size:
        found[first][tuple(int(rng.integers(size)) for size in shape)] = 1
    return found


def _shapes(problem: Problem) -> list[tuple[str, tuple[int, ...]]]:
    return list(problem.input_shapes.items())


KINDS: dict[str, Callable[[Problem, Generator], dict[str, Array]]] = {
    "integers": _integers,
    "impulse": _impulse,
    "normal": _normal,
    "positive": _positive,
    "smooth": _smooth,
    "huge": _huge,
    "tiny": _tiny,
    "subnormals": _subnormals,
    "special": _special,
}
"""The kinds of data."""

EXACT = ("integers", "impulse")
"""Kinds whose sums are exact in any order, so that every bit of the result counts."""

_SHARE = {"integers": 9, "impulse": 3, "normal": 6, "positive": 2, "smooth": 2, "huge": 2, "tiny": 2,
          "subnormals": 2, "special": 3}  # fmt: skip
"""Levels of the covering array that each kind has."""
