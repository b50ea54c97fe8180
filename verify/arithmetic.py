"""What a kernel may say of its arithmetic, and what its honest errors are then.

By default products are formed of the inputs as they are and added in f32, for f64 in f64. A kernel may say otherwise:

* its products are of inputs that are rounded to TF32, bf16 or f16 first. The result is judged by the exact sums of the
  inputs that are rounded so, to nearest or toward zero, whichever fits: by the same rules, and as strictly.
* each input is split into several narrow numbers, and the smallest products are left out (3xtf32, bf16x3, bf16x6):
  each product is off by `noise` of itself.
* sums are kept in another dtype, or in f32 and cut instead of rounded, as tensor cores do, or the sums of so many
  segments are added in another dtype: see `verify.model`.
* Winograd's algorithm multiplies the errors of a sum by the norms of its matrices (`growth`); an FFT spreads the errors
  of the largest sums over all of a plane.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, partial
from math import inf, lcm, log2, prod, sqrt

import numpy as np
import numpy.typing as npt

from kernels.dtypes import DTYPES
from kernels.plan import Storage
from kernels.problem import ConvProblem
from kernels.reference import narrow, widen
from verify.blocks import blocks

__all__ = [
    "PLAIN",
    "PRODUCTS",
    "Arithmetic",
    "Reading",
    "Rounding",
    "round_bits",
    "truncate_bits",
]

Array = npt.NDArray[np.float64]
Rounding = Callable[[Array], Array]

_UNITS = {"f64": 2.0**-53, "f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8}


def round_bits(values: Array, digits: int) -> Array:
    """Round to so many significant bits, to nearest even."""
    bits, step = values.view(np.int64), np.int64(1) << (53 - digits)
    half = (step >> 1) - 1 + ((bits & step) != 0)  # one more if the last digit that stays is odd
    rounded: Array = ((bits + half) & -step).view(np.float64)
    return rounded


def truncate_bits(values: Array, digits: int) -> Array:
    """Cut to so many significant bits."""
    return (values.view(np.int64) & -(np.int64(1) << (53 - digits))).view(np.float64)


@dataclass(frozen=True)
class Reading:
    """One way to read the inputs, by its name in reports."""

    name: str
    rounding: Rounding

    def read(self, tensor: Storage, dtype: str, into: Storage) -> None:
        """Write the tensor as it is read, in its own dtype, which holds what is narrower."""
        for part in blocks(tensor.shape):
            values = widen(tensor[part], dtype)
            with np.errstate(over="ignore", invalid="ignore"):
                into[part] = narrow(np.where(np.isfinite(values), self.rounding(values), values), dtype)


def _narrowed(values: Array, digits: int, how: str) -> Array:
    """Round f32 values to so many significant bits, subnormal ones to fewer."""
    bits, dropped = values.astype(np.float32).view(np.uint32).astype(np.int64), 24 - digits
    half = 0 if how == ", truncated" else 1 << (dropped - 1)
    if not how:
        bits = bits - 1 + (bits >> dropped & 1)
    return ((bits + half) >> dropped << dropped).astype(np.uint32).view(np.float32).astype(np.float64)


def _readings(name: str, digits: int) -> tuple[Reading, ...]:
    ways = ("", ", halves away from zero", ", truncated")
    return tuple([Reading(name + how, partial(_narrowed, digits=digits, how=how)) for how in ways])


@dataclass(frozen=True)
class Products:
    """What products are formed of: `readings` if inputs are rounded, `noise` as a share of each product."""

    text: str
    readings: tuple[Reading, ...] = ()
    noise: float = 0.0
    digits: int = 0
    """Inputs of so many significant bits are multiplied exactly, where inputs are split."""


PRODUCTS = {
    "f32": Products("f32 products"),
    "tf32": Products("TF32 products", _readings("TF32", 11)),
    "bf16": Products("bf16 products", _readings("bf16", 8)),
    "f16": Products("f16 products", (Reading("f16", lambda values: widen(narrow(values, "f16"), "f16")),)),
    "3xtf32": Products("products of two TF32 each", (), 2.0**-21, 11),
    "bf16x3": Products("products of two bf16 each", (), 2.0**-16, 8),
    "bf16x6": Products("products of three bf16 each", (), 2.0**-22, 8),
}
"""What products may be formed of, by name."""

_WINOGRAD = re.compile(r"winograd F\((\d{1,2}), ?(\d{1,2})\)")


@dataclass(frozen=True)
class Arithmetic:
    """What a kernel does, by its own account.

    `products` is one of the `PRODUCTS`; `sum` is the dtype that sums are kept in, or `f32 truncated`; the sums of
    `segments` parts are added in `segment_sum`; `algorithm` is `direct`, `fft` or `winograd F(m, r)`, with tiles of m
    elements of dst for r taps along each axis that it transforms.
    """

    products: str = "f32"
    sum: str = "f32"
    segments: int = 1
    segment_sum: str = "f32"
    algorithm: str = "direct"

    @classmethod
    def usual(cls, dtype: str) -> Arithmetic:
        """Return what is assumed of a kernel that says nothing."""
        return cls("f32", "f64", 1, "f64") if dtype == "f64" else cls()

    @property
    def text(self) -> str:
        """The arithmetic in words."""
        products = PRODUCTS[self.products].text
        if (self.products, self.sum) == ("f32", "f64"):  # rounded to f32 they would make the largest errors
            products = "f64 products"
        words = [products, f"{' '.join(reversed(self.sum.split()))} sums"]
        if self.segments > 1:
            words.append(f"{self.segments} segments added in {self.segment_sum}")
        if self.algorithm != "direct":
            words.append(self.algorithm.replace("winograd", "Winograd's").replace("fft", "an FFT"))
        return ", ".join(words)

    @property
    def readings(self) -> tuple[Reading, ...]:
        """The ways in which the inputs may be read; empty where they are read as they are."""
        return PRODUCTS[self.products].readings

    @property
    def noise(self) -> float:
        """The standard deviation of the errors of a product, as a share of it, beside its rounding to f32."""
        return PRODUCTS[self.products].noise

    @property
    def digits(self) -> int:
        """Split inputs of so many significant bits are multiplied exactly."""
        return PRODUCTS[self.products].digits

    @property
    def kept(self) -> str:
        """The dtype that sums are kept in."""
        return self.sum.partition(" ")[0]

    @property
    def truncates(self) -> bool:
        """Whether sums are cut to that dtype, not rounded."""
        return self.kept != self.sum

    @property
    def unit(self) -> float:
        """Half a unit in the last place of 1 in the dtype that sums are kept in."""
        return _UNITS[self.kept]

    @property
    def segment_unit(self) -> float:
        """The same in the dtype that segments are added in; 0 if there are none."""
        return _UNITS[self.segment_sum] if self.segments > 1 else 0.0

    @property
    def least(self) -> float:
        """The smallest number of the dtype that sums are kept in."""
        return 2.0 ** DTYPES[self.kept].smallest

    @property
    def limit(self) -> float:
        """The first power of two beyond what sums are kept in."""
        kinds = {self.kept, self.segment_sum} if self.segments > 1 else {self.kept}
        return inf if kinds == {"f64"} else min(2.0 ** DTYPES[kind].largest for kind in kinds if kind != "f64")

    @property
    def narrowest(self) -> float:
        """The largest unit of any sum."""
        return max(self.unit, self.segment_unit)

    def growth(self, problem: ConvProblem) -> Array:
        """Return by how much the algorithm multiplies the errors of a sum: for each tap of a gradient, else the most.

        The array broadcasts to the result.
        """
        tile = self._tile
        if tile is None:
            growth = _fft_growth(problem) if self.algorithm == "fft" else 1.0
            return np.full((1,) * len(problem.output_shape), growth)
        found = _growth(*tile)
        transformed = [size == tile[1] for size in problem.kernel]
        if problem.computes != "diff_weights":
            return np.full((1,) * len(problem.output_shape), max(found[0]) ** sum(transformed))
        shape = [1] * len(problem.output_shape)
        first = problem.weights_format.index("X")
        total = np.ones(shape)
        for axis, some in enumerate(transformed):
            if some:
                along = list(shape)
                along[first + axis] = tile[1]
                total = total * np.reshape(found[1], along)
        return total

    @property
    def exact_factor(self) -> float:
        """How many times larger partial sums may be than direct ones, in their common unit; infinite if never exact."""
        if self.algorithm == "fft":
            return inf
        return 1.0 if self._tile is None else _exact_factor(*self._tile)

    def reach(self, problem: ConvProblem) -> tuple[int, ...]:
        """Return how far along each spatial axis of a result, pixels or taps, errors come from other elements' sums."""
        sizes = problem.dst_spatial if problem.forward else problem.kernel
        if self.algorithm == "fft":
            return sizes
        tile = self._tile
        if tile is None:
            return (0,) * len(sizes)
        far = sum(tile) - 2 if problem.forward else tile[1]
        return tuple([far if size == tile[1] else 0 for size in problem.kernel])

    @property
    def tile_size(self) -> int:
        """Elements of dst of a tile along an axis that Winograd transforms; 1 for other algorithms."""
        return 1 if self._tile is None else self._tile[0]

    @property
    def _tile(self) -> tuple[int, int] | None:
        found = _WINOGRAD.fullmatch(self.algorithm)
        return None if found is None else (int(found[1]), int(found[2]))


PLAIN = Arithmetic()
"""Products and sums in f32."""

Matrix = list[list[Fraction]]


def _points(count: int) -> list[Fraction]:
    """Return the points that are used most: 0, 1, -1, 2, -2, 1/2, -1/2, ..; the last one of a tile is infinity."""
    found = [Fraction(0)]
    for base in (1, 2, 3, 4, 5):
        found += [Fraction(base), Fraction(-base)]
        if base > 1:
            found += [Fraction(1, base), Fraction(-1, base)]
    return found[:count]


@cache
def _matrices(m: int, r: int) -> tuple[Matrix, Matrix, Matrix]:
    """Return A^T (m x n), G (n x r) and B^T (n x n) of F(m, r), with n = m + r - 1 (Lavin and Gray, 2016)."""
    n = m + r - 1
    points = _points(n - 1)
    others = [[p for p in points if p != point] for point in points]
    scale = [prod([point - p for p in rest], start=Fraction(1)) for point, rest in zip(points, others, strict=True)]
    output = [[point**row for point in points] + [Fraction(int(row == m - 1))] for row in range(m)]
    weights = [[point**tap / each for tap in range(r)] for point, each in zip(points, scale, strict=True)]
    weights.append([Fraction(int(tap == r - 1)) for tap in range(r)])
    data = [_expanded(rest) for rest in others] + [_expanded(points)]
    return output, weights, [row + [Fraction(0)] * (n - len(row)) for row in data]


def _expanded(roots: Sequence[Fraction]) -> list[Fraction]:
    """Return the coefficients of the polynomial with these roots, the constant first."""
    found = [Fraction(1)]
    for root in roots:
        shifted, scaled = [Fraction(0), *found], [-root * each for each in found] + [Fraction(0)]
        found = [a + b for a, b in zip(shifted, scaled, strict=True)]
    return found


@cache
def _growth(m: int, r: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the growth of errors along an axis: for each of the m elements of dst, and for each of the r taps."""
    found = []
    for size, other in ((m, r), (r, m)):  # a gradient is F(r, m), too, with the roles of dst and the taps exchanged
        a, g, b = (np.array([[float(x) for x in row] for row in matrix]) for matrix in _matrices(size, other))
        one = np.sqrt(np.square(a) @ (np.square(b).sum(1) * np.square(g).sum(1)) / other)
        found.append(tuple(np.maximum(one, one[::-1]).tolist()))  # points at infinity may be at either end
    return found[0], found[1]


@cache
def _exact_factor(m: int, r: int) -> float:
    denominators, factor = 1, 1.0
    for matrix in _matrices(m, r):
        denominators *= lcm(*(each.denominator for row in matrix for each in row))
        factor *= max(sum(map(abs, row)) for row in matrix)
    if denominators & (denominators - 1):  # no powers of two alone
        return inf
    return float(factor * denominators) ** 2


def _fft_growth(problem: ConvProblem) -> float:
    """Return the growth of errors by transforms of a whole plane."""
    dims = problem.dims
    size = prod(max(a, b) + kernel for a, b, kernel in zip(dims.src, dims.dst, dims.kernel, strict=True))
    return sqrt(log2(max(2, size)))
