"""Naive sums of some elements, one product after the other: what they get wrong, an honest kernel may get wrong too."""

from __future__ import annotations

from math import isfinite, sqrt
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from kernels.plan import Stop
from verify.arithmetic import Arithmetic
from verify.compared import Compared
from verify.layout import channel_axes
from verify.model import UNIFORM, Model, ulp
from verify.terms import products_of

__all__ = ["affordable", "difficulty", "own_errors"]

Array = npt.NDArray[np.float64]

_KINDS: dict[str, Any] = {"f64": np.float64, "f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}

_WITNESSES = 5
"""Elements of a channel that are summed naively."""

_WITNESSED = 1 << 12
"""Most elements that are summed naively."""

_WITNESSED_PRODUCTS = 1 << 24
"""Products of all elements that are summed naively, a second or two."""

_HARDER, _SOMEWHAT = 2.0, 1.25
"""How many times as large as expected the errors of naive sums are at least where channels, or all data, are hard."""

_REPEATED = 4
"""How often products must occur, on average, before equal ones are looked for."""

_CHANCE = 1.5
"""Standard deviations that one honest error may have without telling anything."""

_FEW = 4
"""Elements that are summed naively however long their sums are."""


def difficulty(compared: Compared, model: Model, stop: Stop) -> Array:
    """Return the factors by which naive sums of some elements are worse than expected, by channel.

    Each channel of the result is looked at along each of its axes of channels, as far as there is time. Where the
    median of its elements is hard to sum, it has that for its factor; all others have the root of the mean square of
    theirs.
    """
    shape, axes = compared.exact.shape, channel_axes(compared.problem)
    rng, left = np.random.default_rng(0), affordable(compared, _WITNESSED)
    ratios: dict[tuple[int, ...], float] = {}
    for axis in axes:
        for channel in np.repeat(np.arange(shape[axis]), min(_WITNESSES, left // max(1, shape[axis] * len(axes)))):
            stop()
            index = tuple([int(channel) if at == axis else int(rng.integers(size)) for at, size in enumerate(shape)])
            own = own_errors(compared, model, index)
            if own is not None and own[1] > 0 and isfinite(own[0]):
                ratios[index] = own[0] / own[1]
    hard, plain, usual = np.ones((1,) * len(shape)), dict(ratios), 1.0
    for axis in axes:
        factors = np.ones(shape[axis])
        for at in range(shape[axis]):
            of_channel = [ratio for index, ratio in ratios.items() if index[axis] == at]
            factors[at] = np.median(of_channel) if of_channel else 1.0
        factors = np.where(factors > _HARDER, factors, 1.0)
        plain = {index: ratio for index, ratio in plain.items() if factors[index[axis]] == 1}
        hard = np.maximum(hard, factors.reshape([-1 if at == axis else 1 for at in range(len(shape))]))
    if plain:
        usual = sqrt(float(np.mean(np.square(list(plain.values())))))
    return np.maximum(hard, usual if usual > _SOMEWHAT else 1.0)


def affordable(compared: Compared, most: int) -> int:
    """Return how many elements, at most so many, can be summed in a second or two."""
    return int(min(most, max(_FEW, _WITNESSED_PRODUCTS // max(1.0, float(compared.terms.max(initial=1.0))))))


def own_errors(compared: Compared, model: Model, index: tuple[int, ...]) -> tuple[float, float] | None:
    """Return how large an honest error of an element may be by its own naive sums, and by the model.

    The sums run forwards, backwards, and with the axes of images and pixels, or channels and taps, in reverse order.
    """
    exact = float(compared.exact[index])
    if not isfinite(exact):
        return None
    products = products_of(compared.problem, compared.inputs, index)
    spread, honest = float(compared.spread[index]), 0.0
    by_algorithm, growth = (
        float(np.broadcast_to(each, compared.exact.shape)[index])
        for each in (compared.arithmetic.growth(compared.problem), model.growth)
    )
    with np.errstate(all="ignore"):
        repeated = 1 + np.count_nonzero(np.diff(np.sort(products, axis=None))) <= products.size / _REPEATED
        for order in (products.reshape(-1), products.reshape(-1)[::-1], products.T.reshape(-1)):
            sums, total = _summed(order, compared.arithmetic)
            if not sums.size:
                continue
            units = ulp(sums, compared.arithmetic.kept)
            steps = _steps(order, units) if repeated else float(np.linalg.norm(units)) / sqrt(12)
            walk = float(np.hypot(steps, model.unit * sqrt(UNIFORM) * spread))
            honest = max(honest, walk, abs(total - exact) / _CHANCE)
    terms = np.full(1, float(products.size))
    from_exact, from_spread = (np.full(1, float(each[index])) for each in compared.sources)
    return by_algorithm * honest, float(model.summing(from_exact, from_spread, terms, growth)[0])


def _steps(products: Array, units: Array) -> float:
    """Return the standard deviation of the roundings of sums of few products, given the unit in the last place of each.

    The same product is rounded in the same way wherever that unit is the same, so that its errors do not cancel.
    """
    if units.size != products.size:  # sums in segments
        return float(np.linalg.norm(units)) / sqrt(12)
    _, which = np.unique(products, return_inverse=True)
    groups = np.stack([which, np.frexp(units)[1]])
    _, first, counts = np.unique(groups, axis=1, return_index=True, return_counts=True)
    return float(np.linalg.norm(counts * units[first])) / sqrt(12)


def _summed(products: Array, arithmetic: Arithmetic) -> tuple[Array, float]:
    """Return the partial sums of products that are added one after the other as declared, and the result."""
    if arithmetic.segments > 1:
        parts = [
            _accumulated(part, arithmetic.kept)
            for part in np.array_split(products, min(arithmetic.segments, max(1, products.size)))
        ]
        added = _accumulated(np.array([part[-1] for part in parts if part.size]), arithmetic.segment_sum)
        return np.concatenate(parts), float(added[-1]) if added.size else 0.0
    sums = _accumulated(products, arithmetic.kept)
    return sums, float(sums[-1]) if sums.size else 0.0


def _accumulated(values: Array, dtype: str) -> Array:
    """Return the partial sums of values that are added one after the other in a dtype."""
    kind = _KINDS[dtype]
    return np.add.accumulate(values.astype(kind), dtype=kind).astype(np.float64)
