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

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf, isfinite, sqrt

import numpy as np
import numpy.typing as npt

from kernels.plan import Stop
from kernels.reference import widen
from verify import orders
from verify.arithmetic import round_bits
from verify.blocks import Block as Cut
from verify.blocks import blocks, within
from verify.compared import Block, Compared, block_of
from verify.layout import is_bias
from verify.model import SIGMAS, UNIFORM, Model, accumulation_slack, rounding_slack
from verify.naive import affordable, difficulty, own_errors
from verify.stopping import until

__all__ = ["Shares", "Tally", "hardest", "judge", "log_missing", "model_of"]

Array = npt.NDArray[np.float64]
Shares = npt.NDArray[np.float32]

_SAMPLED = 1024
"""Elements of a block that tell how much a rule can see."""

_WORST = 32
"""Elements whose own sums may excuse them."""

_NEAR = 256
"""Elements that an order must explain before the whole result is summed in it."""

_COUNTED = 1 << 18
"""Elements that different values are counted among."""


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
    order: str | None = None
    """The order of summing that explains the errors, where a random one does not."""

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
    def passed(self) -> bool:
        """Whether rules 0 to 2 hold."""
        return self.exact_failed == 0 and self.failed == 0 and self.mean_square_passed

    @property
    def bits(self) -> float | None:
        """Significant bits that the factors of the products seem to have had; None where no error shows."""
        error, rounded, rounding, _, spread, _ = self.sums.tolist()
        excess = error - max(rounded, rounding)
        if excess <= 0 or spread <= 0 or not isfinite(error):
            return None
        return 0.5 * float(np.log2(0.36 * spread / excess))

    @property
    def visible_bits(self) -> float | None:
        """Significant bits of products that rule 1 would have found too few, had all products so many; None if none."""
        spread = float(self.sums[4])
        limit = self.mean_square[1] * max(1, self.judged)
        return 0.5 * float(np.log2(0.36 * spread / limit)) if self.judged and 0 < spread < inf and limit > 0 else None

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
            self.visible += log_missing(allowed[judged][some], measures[4][some], measures[5][some])
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
            sums = np.square([float(each[at]) for each in squares])
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


def log_missing(allowed: Array, spread: Array, exact: Array) -> float:
    """Return the sum of the logarithms of the share of the products that may be missing in each element."""
    with np.errstate(all="ignore"):
        x, y = np.square(allowed / spread), np.square(exact / spread)
        shares = np.clip(np.nan_to_num(2 * x / (1 + np.sqrt(1 + 4 * x * y)), nan=1.0), 2.0**-1000, 1.0)
        return float(np.log(shares).sum())


def judge(
    compared: Compared, share: Shares, see: Callable[[Block], None], stop: Stop, *, closely: bool = True
) -> tuple[Model, Tally]:
    """Apply rules 0 to 2; before a result fails by size, look `closely` whether its data are hard to sum.

    Writes to `share`, which has the shape of the result, the error of each element as a share of what is allowed;
    `see` gets all elements once.
    """
    model = model_of(compared, stop)
    tally = _tally(compared, model, share, see, stop)
    if tally.passed or tally.judged == 0 or not closely:
        return model, tally
    distinct = _distinct(compared.exact)
    for name, harder in _harder(compared, model, stop, tally.worst[0].index):
        shares = np.zeros_like(share)
        found = _tally(compared, harder, shares, lambda _: None, stop)
        found.distinct, found.order = distinct, name
        if found.passed:
            share[...] = shares
            found.witnessed = _mean_ratio(harder.growth, model.growth)
            return harder, found
    tally.distinct = distinct
    model = replace(model, growth=model.growth * difficulty(compared, model, stop))
    again = _tally(compared, model, share, lambda _: None, stop)
    again.distinct = distinct
    again.witnessed = _mean_ratio(model.growth, np.ones(1))
    if not again.passed:
        _excuse(compared, model, again, share, stop)
    return model, again


def model_of(compared: Compared, stop: Stop) -> Model:
    """Return the model of an honest result, in a random order."""
    model = Model.of(compared.problem, compared.arithmetic, _coherence(compared.exact, compared.spread, stop))
    if model.integers and _multiplied_exactly(compared, stop):
        unit = _unit(compared, model.integers, stop)
        if unit >= compared.arithmetic.least:  # smaller products are rounded, some to -0
            return replace(model, exact_below=model.integers * unit)
    return model


def hardest(compared: Compared, model: Model, stop: Stop) -> Model:
    """Return the model of a result that is as hard to sum, element by element, as in the hardest order of any kernel.

    That is any order that `judge` excuses: a random one, those of `verify.orders`, and one product after the other.
    """
    if not compared.exact.size:
        return model
    growth = model.growth * difficulty(compared, model, stop)
    for _, harder in _models(compared, model, stop, orders.most_work(compared.problem)):
        growth = np.maximum(growth, harder.growth)
    return replace(model, growth=growth)


def _harder(compared: Compared, model: Model, stop: Stop, worst: tuple[int, ...]) -> Iterator[tuple[str, Model]]:
    """Yield models of an honest result that is harder to sum than in a random order, each with its name.

    They are tried on some elements around the worst one before the whole result is.
    """
    near, left, likely = compared.near(worst, _NEAR), orders.most_work(compared.problem), set()
    of_near = replace(model, growth=near.arithmetic.growth(near.problem))
    for name, harder in _models(near, of_near, stop, left):
        tally = _tally(near, harder, np.zeros(near.exact.shape, np.float32), lambda _: None, stop)
        tally.distinct = _distinct(near.exact)
        if tally.passed:
            likely.add(name)
    if likely:
        yield from _models(compared, model, stop, left, likely)


def _models(
    compared: Compared, model: Model, stop: Stop, left: int, only: Collection[str] | None = None
) -> Iterator[tuple[str, Model]]:
    problem, shape, usual = compared.problem, compared.exact.shape, model.growth
    with np.errstate(all="ignore"):
        own = [np.maximum(_sigmas(compared, model), 2.0**-1074)]
    tiles = f"the tiles of {compared.arithmetic.algorithm}"
    spread = None
    if only is None or tiles in only:
        spread = orders.tile_spread(problem, compared.inputs, compared.arithmetic, stop)
    if spread is not None:
        wider = replace(compared, spread=np.broadcast_to(spread, shape))
        yield tiles, _grown(model, own[0], _sigmas(wider, model))
    if compared.arithmetic.algorithm != "direct":
        return
    for order in orders.orders(problem, compared.inputs, compared.spread, compared.terms, stop, left=left, only=only):
        with np.errstate(all="ignore"):
            summed = sqrt(UNIFORM) * model.unit * np.sqrt(order.walk + np.square(compared.spread))
        yield order.name, _grown(model, own[0], np.broadcast_to(usual, shape) * summed)


def _sigmas(compared: Compared, model: Model) -> Array:
    exact, spread = compared.sources
    growth = np.broadcast_to(model.growth, exact.shape)
    return model.summing(exact, spread, np.broadcast_to(compared.terms, exact.shape), growth)


def _grown(model: Model, own: Array, other: Array) -> Model:
    """Return the model whose standard deviations are the larger of two."""
    with np.errstate(all="ignore"):
        times = np.nan_to_num(other / own, nan=1.0, posinf=1.0)
    return replace(model, growth=model.growth * np.maximum(1.0, times))


def _mean_ratio(one: Array, other: Array) -> float:
    return float(sqrt(np.mean(np.square(one / other))))


def _tally(compared: Compared, model: Model, share: Shares, see: Callable[[Block], None], stop: Stop) -> Tally:
    tally = Tally()
    for part in until(stop, blocks(compared.exact.shape)):
        block = block_of(compared, model, part)
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


def _multiplied_exactly(compared: Compared, stop: Stop) -> bool:
    """Whether products are as exact as the arithmetic's sums: where inputs are split, those of few digits are."""
    said = compared.arithmetic
    return not said.noise or all(
        (round_bits(values, said.digits) == values)[np.isfinite(values)].all()
        for _, values in until(stop, _chunks(compared))
    )


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


def _excuse(compared: Compared, model: Model, tally: Tally, share: Shares, stop: Stop) -> None:
    """Judge the worst elements by their own naive sums, up to one that fails even so: then the result does."""
    for element in until(stop, tally.worst[: affordable(compared, _WORST)]):
        own = own_errors(compared, model, element.index)
        if own is None or own[0] <= own[1]:
            if element.failed:
                break
            continue
        block = block_of(compared, model, tuple([slice(at, at + 1) for at in element.index]))
        block.sigma[...] = own[0] if isfinite(own[0]) else np.inf
        share[element.index] = block.share(block.allowed(model.dtype)).item()
        tally.failed -= int(element.failed and share[element.index] <= 1)
        if np.isfinite(element.sums).all():
            squares = _squares(model, *block.measures)
            tally.sums += np.nan_to_num([each.item() ** 2 for each in squares]) - element.sums
        if share[element.index] > 1:
            break
    tally.worst_share = float(share.max(initial=0.0))
