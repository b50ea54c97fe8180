"""The rules that a result is judged by, and what they measured; `verify.model` says what is expected.

0. `exact`: where every partial sum is exact, an element has the bits of the rounded reference.
1. `mean_square`: errors, as shares of what is expected of each element, are in the mean no larger than expected.
2. `largest`: no element is off by more than half a unit and 8 standard deviations of summing.
3. `hypotheses`: the errors are not those that a known fault predicts (`verify.hypotheses`).

The model assumes sums in a random order. Data may be harder: the same number again and again, whose roundings all have
one direction, or stretches of one sign. So before rule 1 or 2 fails a result, some elements are summed naively, in
order, in the accumulator's dtype. What such a sum gets wrong, an honest kernel may get wrong too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil, inf, isfinite, sqrt

import numpy as np
import numpy.typing as npt

from kernels.dtypes import DTYPES
from kernels.plan import Stop, Storage
from kernels.problem import ConvProblem
from kernels.reference import REFERENCE, narrow, widen
from verify.blocks import Block as Cut
from verify.blocks import blocks, within
from verify.layout import is_bias
from verify.model import SIGMAS, Model, accumulation_slack, rounding_slack, ulp
from verify.stopping import until
from verify.terms import products_of

__all__ = ["Block", "Compared", "Shares", "Tally", "judge"]

Array = npt.NDArray[np.float64]
Shares = npt.NDArray[np.float32]

_SAMPLED = 1024
"""Elements of a block that tell how much a rule can see."""

_WORST = 32
"""Elements whose own sums may excuse them."""

_WITNESSES = 48
"""Elements, spread over the result, that are summed naively."""

_WITNESSED = 1 << 24
"""Products of all elements that are summed naively, a second or two."""

_TORN, _TORN_PRODUCTS = 256, 1 << 20
"""Elements of a block, and their products, that are looked at to tell whether both signs overflow."""

_FEW = 4
"""Elements that are summed naively however long their sums are."""

_COUNTED = 1 << 18
"""Elements that different values are counted among."""


@dataclass(frozen=True)
class Compared:
    """What a report is about: the call, the result to verify, and what it should be (see `verify.sums.Sums`)."""

    problem: ConvProblem
    inputs: Sequence[Storage]
    result: Storage
    exact: Array
    low: Array | None
    spread: Array
    explain: bool = False

    @cached_property
    def terms(self) -> Array:
        """How many products each element sums, in a shape that broadcasts to the result."""
        return REFERENCE.terms(self.problem)


@dataclass
class Block:
    """Elements of a result beside what they should be; all arrays have one shape."""

    stored: Storage
    rounded: Storage
    equal: npt.NDArray[np.bool_]  # a NaN equals any NaN
    got: Array
    nearest: Array
    exact: Array
    error: Array  # without sign; infinite where Inf or NaN is wrong or missing
    rounding: Array  # error of the rounded reference
    step: Array
    sigma: Array
    spread: Array
    exactly: npt.NDArray[np.bool_]  # every partial sum is exact
    unknown: npt.NDArray[np.bool_]  # the accumulator may have overflowed on the way

    @property
    def measures(self) -> tuple[Array, ...]:
        """What `Tally.sums` sums."""
        return self.error, self.rounding, self.step / sqrt(12), self.sigma, self.spread, self.exact

    def allowed(self, dtype: str) -> Array:
        """Return the largest error that rule 2 allows."""
        smallest, huge = 2.0 ** (4 - DTYPES[dtype].largest), 2.0 ** (DTYPES[dtype].largest - 1)
        size = np.abs(self.exact)
        border = (size < smallest) | (size > huge * (1 - 2.0**-8) * 2)
        return self.step * np.where(border, 1.5, 0.5) + SIGMAS * self.sigma

    def share(self, allowed: Array) -> Array:
        """Return the errors as shares of what is allowed, infinite where a wrong element should be exact."""
        with np.errstate(invalid="ignore", over="ignore"):
            share = self.error / allowed
        share[(self.error == 0) | self.unknown] = 0.0
        share[self.exactly] = np.where(self.equal[self.exactly], 0.0, np.inf)
        share[np.isnan(share)] = np.inf
        return share


def _block(compared: Compared, model: Model, part: Cut) -> Block:
    dtype = compared.problem.dtype
    exact, spread = compared.exact[part], compared.spread[part]
    stored, rounded = compared.result[part], narrow(exact, dtype)
    got, nearest = widen(stored, dtype), widen(rounded, dtype)
    low = 0.0 if compared.low is None else compared.low[part]
    few = compared.terms[within(part, compared.terms.shape)]
    # An overflow counts as the first number that is too large, so that a sum just below it may overflow too.
    huge = inf if dtype == "f64" else 2.0 ** DTYPES[dtype].largest
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.abs((np.clip(got, -huge, huge) - exact) - low)
        rounding = np.abs((nearest - exact) - low)
        equal = (got == nearest) | (np.isnan(got) & np.isnan(nearest))
        error[~np.isfinite(exact) | np.isnan(got)] = np.inf
        error[equal & ~np.isfinite(got)] = 0.0  # an Inf is as far off as the exact value is large, but right
        reach = np.abs(exact) + SIGMAS * sqrt(model.coherence) * spread
        limit, magnitudes = 2.0**128 if dtype != "f64" else inf, np.sqrt(few) * spread
        exactly = np.isfinite(exact) & (magnitudes < min(model.exact_below, limit))
        unknown = ~np.isfinite(got) & np.isfinite(nearest) & (reach >= limit)
        # A sum that is too large may be NaN or the other Inf where the products of the other sign overflow as well.
        torn = np.isfinite(exact) & np.isinf(nearest) & ~equal & ~np.isfinite(got)
        torn &= magnitudes - np.abs(exact) >= 2 * limit
    most = int(max(1, min(_TORN, _TORN_PRODUCTS // max(1.0, float(few.max(initial=1.0))))))
    places = np.argwhere(torn)
    for at in places[:: ceil(len(places) / most) or 1]:
        torn[tuple(at)] = _against(compared, part, at) >= limit
    unknown |= torn
    sigma = model.summing(exact, spread, few)
    return Block(
        stored, rounded, equal, got, nearest, exact, error, rounding, ulp(exact, dtype), sigma, spread, exactly, unknown
    )


def _against(compared: Compared, part: Cut, at: npt.NDArray[np.int64]) -> float:
    """Return the magnitude of the sum of an element's products whose sign is not that of the whole sum."""
    index = tuple([int(x) + (each.start or 0) for x, each in zip(at, part, strict=True)])
    products = products_of(compared.problem, compared.inputs, index) * np.sign(compared.exact[index])
    return -float(products[products < 0].sum())


@dataclass
class Element:
    """One element: its error in units of what is expected, its part in the sums of rule 1, whether rule 2 fails it."""

    index: tuple[int, ...]
    size: float
    sums: Array
    failed: bool


@dataclass
class Tally:
    """What the rules measured: sums over all judged elements, in units of each element's expected error."""

    elements: int = 0
    exact: int = 0
    exact_failed: int = 0
    judged: int = 0
    failed: int = 0  # by rule 2
    unknown: int = 0
    worst_share: float = 0.0
    distinct: float = inf
    sums: Array = field(default_factory=lambda: np.zeros(6))
    """Of squares: error, rounding of the reference, expected rounding, summing, root of q, and exact sum."""
    visible: float = 0.0
    """Sum of the logarithms of the share of a sum that may be missing in one element, for `visible_of` elements."""
    visible_of: int = 0
    worst: list[Element] = field(default_factory=list)
    witnessed: float = 1.0
    """How much harder this data is to sum than in a random order, as a factor of the standard deviation."""

    @property
    def independent(self) -> float:
        """Number of elements whose errors are independent: those of equal sums are equal."""
        return max(1.0, min(float(self.judged), self.distinct))

    @property
    def mean_square(self) -> tuple[float, float]:
        """The mean square of the errors in units of what is expected, and its limit."""
        count = max(1, self.judged)
        error, rounded, rounding, summing, *_ = self.sums.tolist()
        # Where sums lie between numbers is known: integers that are rounded, for example, are often halfway.
        once = max(rounded, rounding_slack(self.independent) * rounding)
        # A few sums so near the middle of two numbers that an error of summing turns their rounding.
        turned = 3 * sqrt(12) * SIGMAS * sqrt(rounding * summing) / self.independent
        return error / count, (once + turned + accumulation_slack(self.independent) * summing) / count

    @property
    def mean_square_passed(self) -> bool:
        """Whether rule 1 holds."""
        measured, limit = self.mean_square
        return self.judged == 0 or measured <= limit * (1 + 1e-9)

    @property
    def bits(self) -> float | None:
        """Significant bits that the factors of the products seem to have had; None where no error shows."""
        error, rounded, rounding, _, spread, _ = self.sums.tolist()
        excess = error - max(rounded, rounding)
        if excess <= 0 or spread <= 0 or not isfinite(error):
            return None
        return 0.5 * float(np.log2(0.36 * spread / excess))

    @property
    def relative(self) -> tuple[float, float] | None:
        """The RMS error in units of that of a naive sum, and of one rounding; None where no element is judged."""
        error, rounded, rounding, summing, *_ = self.sums.tolist()
        if self.judged == 0 or rounding <= 0:
            return None
        return sqrt(error / (rounding + summing)), sqrt(error / max(rounded, 1e-3 * rounding))

    @property
    def visible_everywhere(self) -> float:
        """Share of the products of every element that rule 1 would have missed, at random."""
        limit = self.mean_square[1] * max(1, self.judged)
        *_, spread, exact = self.sums.tolist()
        return min(1.0, _missing(limit, spread, exact)) if self.judged else 0.0

    @property
    def visible_in_one(self) -> float:
        """Share of the products of one element, a typical one, that rule 2 would have missed."""
        return float(np.exp(self.visible / self.visible_of)) if self.judged else 0.0

    def add(self, block: Block, model: Model, part: Cut) -> Array:
        """Judge the elements of a block; return their errors as shares of what is allowed."""
        allowed = block.allowed(model.dtype)
        share = block.share(allowed)
        judged = np.isfinite(block.exact) & np.isfinite(block.nearest) & ~block.exactly & ~block.unknown
        failed = (share > 1) & ~block.exactly
        self.elements += share.size
        self.unknown += int(block.unknown.sum())
        self.exact += int(block.exactly.sum())
        self.exact_failed += int((block.exactly & (share > 0)).sum())
        self.judged += int(judged.sum())
        self.failed += int(failed.sum())
        self.worst_share = max(self.worst_share, float(share.max(initial=0.0)))
        if judged.any():
            measures = [each[judged] for each in block.measures]
            squares = _squares(model, *measures)
            self.sums += [float(each @ each) for each in squares]
            self._keep(squares, failed[judged], np.flatnonzero(judged), share.shape, part)
            some = slice(None, None, 1 + len(measures[0]) // _SAMPLED)
            self.visible += _log_missing(allowed[judged][some], measures[4][some], measures[5][some])
            self.visible_of += len(measures[0][some])
        return share

    def _keep(
        self, squares: Sequence[Array], failed: npt.NDArray[np.bool_], places: npt.NDArray[np.int64],
        shape: tuple[int, ...], part: Cut,
    ) -> None:  # fmt: skip
        """Keep the elements with the largest errors."""
        size = squares[0]
        least = self.worst[-1].size if len(self.worst) == _WORST else -1.0
        first = np.argpartition(-size, min(_WORST, size.size) - 1)[:_WORST]
        for at in first[size[first] > least].tolist():
            inside = np.unravel_index(int(places[at]), shape)
            index = tuple([int(x) + (each.start or 0) for x, each in zip(inside, part, strict=True)])
            sums = np.array([float(each[at]) ** 2 for each in squares])
            self.worst.append(Element(index, float(size[at]), sums, bool(failed[at])))
        self.worst.sort(key=lambda element: -element.size)
        del self.worst[_WORST:]


@np.errstate(over="ignore", invalid="ignore")
def _squares(
    model: Model, error: Array, rounding: Array, once: Array, sigma: Array, spread: Array, exact: Array
) -> list[Array]:
    """Return everything in units of the error that is expected."""
    expected = np.maximum(model.norm(once, sigma), 2.0**-1074)
    return [each / expected for each in (error, rounding, once, sigma, spread, exact)]


def _missing(limit: float, squares: float, exact: float) -> float:
    """Solve limit = x * squares + x^2 * exact: a share x of random products is missing, with their mean."""
    with np.errstate(all="ignore"):
        return float(2 * limit / (squares + np.sqrt(squares * squares + 4 * exact * limit))) if squares > 0 else 1.0


def _log_missing(allowed: Array, spread: Array, exact: Array) -> float:
    """Return the sum of the logarithms of what may be missing in each element."""
    with np.errstate(all="ignore"):
        x, y = np.square(allowed / spread), np.square(exact / spread)
        shares = np.clip(np.nan_to_num(2 * x / (1 + np.sqrt(1 + 4 * x * y)), nan=1.0), 2.0**-1000, 1.0)
        return float(np.log(shares).sum())


def judge(compared: Compared, share: Shares, see: Callable[[Block], None], stop: Stop) -> tuple[Model, Tally]:
    """Apply rules 0 to 2.

    Writes to `share`, which has the shape of the result, the error of each element as a share of what is allowed;
    `see` gets all elements once.
    """
    model = Model.of(compared.problem, _coherence(compared.exact, compared.spread, stop))
    model = replace(model, exact_below=model.integers * _unit(compared, model.integers, stop))
    tally = _tally(compared, model, share, see, stop)
    if (tally.failed == 0 and tally.mean_square_passed) or tally.judged == 0:
        return model, tally
    distinct, harder = _distinct(compared.exact), _witnesses(compared, model, stop)
    model = replace(model, scale=harder)
    again = _tally(compared, model, share, lambda _: None, stop)
    again.distinct, again.witnessed = distinct, harder
    if again.failed or not again.mean_square_passed:
        _excuse(compared, model, again, share, stop)
    return model, again


def _tally(compared: Compared, model: Model, share: Shares, see: Callable[[Block], None], stop: Stop) -> Tally:
    tally = Tally()
    for part in until(stop, blocks(compared.exact.shape)):
        block = _block(compared, model, part)
        see(block)
        share[part] = tally.add(block, model, part)
    return tally


def _coherence(exact: Array, spread: Array, stop: Stop) -> float:
    """Return the mean of r^2 / q: 1 for random signs, more where products are alike."""
    total, count = 0.0, 0
    for part in until(stop, blocks(exact.shape)):
        some = np.isfinite(exact[part]) & (spread[part] > 0)
        with np.errstate(over="ignore", invalid="ignore"):
            total += float(np.square(exact[part][some] / spread[part][some]).sum())
        count += int(some.sum())
    return total / count if count and isfinite(total) else 1.0


def _unit(compared: Compared, integers: float, stop: Stop) -> float:
    """Return the largest power of two that all products are multiples of.

    It may be larger than that where no sum of products that are not all zero is below `integers` of it.
    """
    problem = compared.problem
    least = inf  # bound of the smallest sum of magnitudes
    for part in until(stop, blocks(compared.exact.shape)):
        few, spread = compared.terms[within(part, compared.terms.shape)], compared.spread[part]
        least = min(least, float((np.sqrt(few) * spread)[spread > 0].min(initial=inf)))
    units, found = [inf] * len(compared.inputs), inf
    for place, values in until(stop, _chunks(compared)):
        units[place] = min(units[place], _unit_of(values))
        found = min(units)
        if not is_bias(problem):
            found = min(units[0] * units[1], *units[2:], inf)
        if found * integers <= least:
            break
    return found


def _chunks(compared: Compared) -> Iterator[tuple[int, Array]]:
    """Yield the inputs piece by piece, the first piece of each first."""
    flat, size = [tensor.reshape(-1) for tensor in compared.inputs], 1 << 16
    for start in range(0, max(each.size for each in flat), size):
        for place, each in enumerate(flat):
            if start < each.size:
                yield place, widen(each[start : start + size], compared.problem.dtype)


def _unit_of(values: Array) -> float:
    """Return the largest power of two that all finite values are multiples of; infinite where all are zero."""
    values = values[np.isfinite(values) & (values != 0)]
    if not values.size:
        return inf
    mantissa, exponent = np.frexp(values)
    bits = np.ldexp(mantissa, 53).astype(np.int64)
    lowest = np.log2((bits & -bits).astype(np.float64)) + exponent - 53
    return float(np.ldexp(1.0, int(lowest.min())))


def _distinct(exact: Array) -> float:
    """Return how many different sums there are, but for their sign; infinite where nearly all differ."""
    flat = exact.reshape(-1)[:_COUNTED]
    found = np.unique(np.abs(flat)).size
    return float(found) if found < 0.9 * flat.size else inf


def _witnesses(compared: Compared, model: Model, stop: Stop) -> float:
    """Return the factor by which naive sums of some elements are worse than expected, at least 1."""
    size = compared.exact.size
    count = min(size, _count(compared, _WITNESSES))
    ratios = []
    for at in until(stop, np.linspace(0, size - 1, count).astype(np.int64).tolist()):
        index = tuple([int(x) for x in np.unravel_index(at, compared.exact.shape)])
        own = _own(compared, model, index)
        if own is not None and own[1] > 0 and isfinite(own[0]):
            ratios.append(own[0] / own[1])
    return max(1.0, sqrt(float(np.mean(np.square(ratios))))) if ratios else 1.0


def _count(compared: Compared, most: int) -> int:
    return int(min(most, max(_FEW, _WITNESSED // max(1.0, float(compared.terms.max(initial=1.0))))))


def _own(compared: Compared, model: Model, index: tuple[int, ...]) -> tuple[float, float] | None:
    """Return how large an honest error of an element may be by its own naive sums, and by the model.

    The sums run forwards, backwards, and with the axes of images and pixels, or channels and taps, in reverse order.
    """
    exact = float(compared.exact[index])
    if not isfinite(exact):
        return None
    products = products_of(compared.problem, compared.inputs, index)
    kind = np.float64 if compared.problem.dtype == "f64" else np.float32
    spread, honest = float(compared.spread[index]), 0.0
    with np.errstate(all="ignore"):
        for order in (products.reshape(-1), products.reshape(-1)[::-1], products.T.reshape(-1)):
            sums = np.add.accumulate(order.astype(kind), dtype=kind).astype(np.float64)
            if not sums.size:
                continue
            walk = model.unit * sqrt(0.18) * float(np.hypot(np.linalg.norm(sums), spread))
            honest = max(honest, walk, abs(float(sums[-1]) - exact))
    terms = np.full(1, float(products.size))
    return honest, float(model.summing(np.full(1, exact), np.full(1, spread), terms)[0])


def _excuse(compared: Compared, model: Model, tally: Tally, share: Shares, stop: Stop) -> None:
    """Judge the worst elements by their own naive sums, where those are worse than expected."""
    for element in until(stop, tally.worst[: _count(compared, _WORST)]):
        own = _own(compared, model, element.index)
        if own is None or own[0] <= own[1]:
            continue
        block = _block(compared, model, tuple([slice(at, at + 1) for at in element.index]))
        block.sigma[...] = own[0] if isfinite(own[0]) else np.inf
        share[element.index] = block.share(block.allowed(model.dtype)).item()
        tally.failed -= int(element.failed and share[element.index] <= 1)
        if np.isfinite(element.sums).all():
            squares = _squares(model, *block.measures)
            tally.sums += np.nan_to_num([each.item() ** 2 for each in squares]) - element.sums
    tally.worst_share = float(share.max(initial=0.0))
