"""Verification of full-size layers in a fraction of the time: by random projections (Freivalds, 1977).

With random signs s over the src channels and t over the dst channels, t . dW . s for each tap is the gradient of the
projected tensors, of one channel each: (I + O) multiply-adds for each pixel and projection, and one for each tap, not
I O. A forward result is projected over its images and channels. A wrong element changes every projection; errors that
are independent add up to a projection whose variance is the sum of theirs. So the mean square and the largest of the
projected errors are judged by the model of an honest sum, and sums of integers stay exact.

Where a projected result fails, projections over the other channels alone say which dst channel is worst, and a part of
the result with that channel is judged in full.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, prod

import numpy as np
import numpy.typing as npt

from kernels.arena import arena
from kernels.dtypes import DTYPES
from kernels.plan import Stop, Storage
from kernels.problem import ConvProblem
from kernels.reference import channels_first, single, widen
from verify.arithmetic import PLAIN, Arithmetic
from verify.blocks import blocks, largest_within
from verify.evaluate import evaluate
from verify.layout import along_channels, in_data_order, is_bias, pixel_axes
from verify.model import EXACT, Model, accumulation_slack, ulp
from verify.parts import Part, part_of
from verify.signed import add_products, add_signed
from verify.stopping import until
from verify.terms import term_counts

__all__ = ["Projected", "Projection", "is_projectable", "projected_macs"]

Array = npt.NDArray[np.float64]

_MANY, _FEW = 16, 12
"""Projections of results with few and with many positions (taps or pixels).

Two exchanged channels, or images, are not seen by a projection in which they have the same sign: by 12 once in 4,096.
"""

_POSITIONS = 256
_BLOCK = 1 << 22
"""Values of a tensor that are projected at a time."""

_KEPT = 1 << 20
"""Values of projected planes up to which a thread keeps their memory."""

_BLOCKS = 32
"""Most blocks, each with sums of its own."""

_ROUNDING = 3.0
"""Largest square of a rounding error over its expectation: sums may lie halfway between numbers everywhere."""


def is_projectable(problem: ConvProblem) -> bool:
    """Whether projections are cheaper than the whole reference, and precise enough."""
    convolves = not is_bias(problem) and problem.dtype != "f64"
    return convolves and problem.n > 0 and 2 * projected_macs(problem) < problem.macs


def projected_macs(problem: ConvProblem) -> int:
    """Return about how many multiply-adds projections take."""
    projection = Projection(problem, 0)
    tensors = sum(map(prod, problem.input_shapes)) + prod(problem.output_shape)
    return (projection.count + 1) * (tensors + projection.problem.macs // (projection.count + 1))


@dataclass(frozen=True)
class Projection:
    """The random projections of a problem, drawn from a seed."""

    original: ConvProblem
    seed: int
    arithmetic: Arithmetic = PLAIN

    @property
    def count(self) -> int:
        """Number of projections."""
        return _MANY if prod(self.positions) <= _POSITIONS else _FEW

    @property
    def positions(self) -> tuple[int, ...]:
        """Taps or pixels of the result, which are not projected."""
        return self.original.dst_spatial if self.original.forward else self.original.kernel

    @property
    def problem(self) -> ConvProblem:
        """The problem that computes all projections, and sums of squares as one more, each group of each apart."""
        many, one = (self.count + 1) * self.original.groups, self.original
        return replace(
            one, dtype="f64", n=1 if one.forward else one.n, data_format="NCX", weights_format="OIX", groups_axis="I",
            groups=many, src_channels=(self.count + 1) * one.src_channels if one.forward else many, dst_channels=many,
            bias=False,
        )  # fmt: skip

    @property
    def blocks(self) -> int:
        """Number of blocks of images that the work is cut into; their sums take less memory than the tensors."""
        one = self.original
        size = max(prod(one.src_shape), prod(one.dst_shape))
        return min(_BLOCKS, one.n, max(1, min(ceil(size / _BLOCK), size // (4 * self.slots))))

    @property
    def slots(self) -> int:
        """Values that each block writes: its sums, and three of `_facts`."""
        one, places = self.original, prod(self.positions)
        if not one.forward:
            return (2 * self.count + 3) * places + 3
        return (self.count + 1) * one.src_channels * prod(one.src_spatial) + (self.count + 2) * places + 3

    def signs(self, what: str, size: int) -> Array:
        """Return random signs, a row for each projection."""
        stream = {"src": 0, "dst": 1, "images": 2}[what]
        rng = np.random.default_rng([self.seed, stream])
        return np.where(rng.integers(0, 2, (self.count, size)) == 0, -1.0, 1.0)

    def images(self, block: int) -> slice:
        """Return the images of a block."""
        n = self.original.n
        return slice(n * block // self.blocks, n * (block + 1) // self.blocks)

    def run(self, block: int, inputs: Sequence[Storage], result: Storage, slot: Array, stop: Stop) -> None:
        """Write the sums of a block. Tensors with images may be PyTorch's, on a GPU: they are projected there."""
        images, data = self.images(block), inputs[:1] if self.original.forward else inputs
        slot[-3:] = _facts([tensor[images] for tensor in data], self.original.dtype)
        (self._forward if self.original.forward else self._weights)(block, inputs, result, slot[:-3], stop)

    def _weights(self, block: int, inputs: Sequence[Storage], result: Storage, slot: Array, stop: Stop) -> None:
        """Write the projected gradient of some images; that of the result with the first block."""
        one, count, places = self.original, self.count, prod(self.positions)
        exact = np.zeros((count + 1, places))
        found = [
            _room(name, (count + 1, one.groups, prod(size)))
            for name, size in (("src", one.src_spatial), ("dst", one.dst_spatial))
        ]
        signs = [self._by_group("src"), self._by_group("dst")]
        wide, narrow = (found[place] for place in one.places)
        for image in range(self.images(block).start, self.images(block).stop):
            for tensor, each, sums in zip(inputs, signs, found, strict=True):
                add_signed(_lines(tensor[image], one), one.dtype, each, sums[:-1], sums[-1], fresh=True)
            add_products(one.dims, wide, narrow, exact, stop)
        slot[:] = 0
        rows = slot.reshape(2 * count + 3, places)
        rows[: count + 1] = exact
        if block == 0:
            values = _weight_taps(widen(result, one.dtype), one)  # groups, O, I, taps
            s, t = signs
            with np.errstate(invalid="ignore", over="ignore"):
                rows[count + 1 : 2 * count + 1] = np.einsum("pgo,goik,pgi->pk", t, values, s, optimize=True)
                rows[-2] = np.square(values).sum((0, 1, 2))
                rows[-1] = np.square(_weight_taps(ulp(widen(result, one.dtype), one.dtype), one)).sum((0, 1, 2))

    def _by_group(self, what: str) -> Array:
        """Return the signs of channels as (projections, groups, channels of a group)."""
        one = self.original
        size = one.src_channels if what == "src" else one.dst_channels
        return self.signs(what, size).reshape(self.count, one.groups, -1)

    def _forward(self, block: int, inputs: Sequence[Storage], result: Storage, slot: Array, stop: Stop) -> None:
        """Write the projected src of some images, and their projected results."""
        one, count, images = self.original, self.count, self.images(block)
        pixels = prod(one.dst_spatial)
        size = one.src_channels * prod(one.src_spatial)
        src, of_result = slot[: (count + 1) * size].reshape(count + 1, size), slot[(count + 1) * size :]
        rows = of_result.reshape(count + 2, pixels)
        slot[:] = 0
        over_images, t = self.signs("images", one.n), self.signs("dst", one.dst_channels)
        given = inputs[0][images].reshape(images.stop - images.start, size)
        to, signs = src.reshape(count + 1, 1, size), over_images[:, None, images]
        step = max(1, _BLOCK // len(given))
        for start in until(stop, range(0, size, step)):
            some = slice(start, start + step)
            add_signed(given[:, some], one.dtype, signs, to[:count, :, some], to[count, :, some])
        by_position, parts = rows.reshape(count + 2, 1, pixels), (slice(count), count, count + 1)
        for image in until(stop, range(images.start, images.stop)):
            signs = (over_images[:, image, None] * t)[:, None]
            add_signed(_lines(result[image], one), one.dtype, signs, *(by_position[at] for at in parts))
        rows[-1] *= 4.0 ** (1 - DTYPES[one.dtype].digits)  # units in the last place

    def judge(self, inputs: Sequence[Storage], slots: Array, stop: Stop, difficulty: float | None = None) -> Projected:
        """Judge the projected errors; with a `difficulty` of sums whose elements, judged by themselves, pass.

        What is lost may then be the same share of all sums, and so of their projections.
        """
        one, count, places = self.original, self.count, prod(self.positions)
        total, facts = slots[:, :-3].sum(0), slots[:, -3:].max(0)
        if one.forward:
            size = one.src_channels * prod(one.src_spatial)
            src = total[: (count + 1) * size].reshape(count + 1, *one.src_shape[1:])
            if one.data_format == "NXC":
                src = np.ascontiguousarray(np.moveaxis(src, -1, 1))
            src = src.reshape(1, -1, *one.src_spatial)
            sums = evaluate(self.problem, [src, self._projected_weights(inputs[1])], stop)
            exact = sums.reshape(count + 1, one.groups, places).sum(1)
            rows = total[(count + 1) * size :].reshape(count + 2, places)
            got, squares, steps = rows[:count], rows[count], rows[count + 1]
            if one.bias:
                bias = widen(inputs[2], one.dtype)
                over_images, t = self.signs("images", one.n), self.signs("dst", one.dst_channels)
                exact[:count] += (over_images.sum(1) * (t @ bias))[:, None]
                exact[count] += one.n * float(bias @ bias)
        else:
            rows = total.reshape(2 * count + 3, places)
            exact, got, squares, steps = rows[: count + 1], rows[count + 1 : -2], rows[-2], rows[-1]
        terms = np.broadcast_to(term_counts(one).reshape(-1), (places,))
        many = prod(one.output_shape) // max(1, places)
        if one.forward:
            more = _facts(inputs[1:], one.dtype)
            facts = np.array([facts[0], max(more[0], more[1]), max(facts[2], more[2])])
        # sums that no rounding can change, in the result nor in its projections
        largest = float(terms.max(initial=0.0)) * facts[0] * facts[1]
        said = self.arithmetic
        most = EXACT * min(2.0 ** DTYPES[one.dtype].digits, 1 / said.narrowest / said.exact_factor)
        exactly = facts[2] == 0 and largest < most and largest * many < 2.0**53
        exactly &= not said.noise or max(facts[0], facts[1]) < 2.0**said.digits
        errors = got - exact[:count]
        if difficulty is not None:
            squares = np.maximum(squares, np.square(exact[:count]))
        return Projected.of(
            one, said, errors, exact[count], squares, steps / 12, terms, many, difficulty or 1.0, exactly=bool(exactly)
        )

    def _projected_weights(self, weights: Storage) -> Array:
        """Return the weights projected over dst channels, and the sums of their squares, as OIX of the problem."""
        one, count = self.original, self.count
        values = _weight_taps(widen(weights, one.dtype), one)  # groups, O, I, taps
        t = self.signs("dst", one.dst_channels).reshape(count, one.groups, -1)
        both = np.concatenate([np.einsum("pgo,goik->pgik", t, values, optimize=True), np.square(values).sum(1)[None]])
        return np.ascontiguousarray(both).reshape(self.problem.weights_shape)

    def suspect(self, inputs: Sequence[Storage], result: Storage, stop: Stop) -> Part:
        """Return the part with the worst dst channel."""
        one, signs = self.original, np.random.default_rng([self.seed, 3])
        dst = one.dst_channels
        if one.forward:
            over = signs.integers(0, 2, one.n) * 2.0 - 1.0
            exact, got = 0.0, 0.0
            for image in until(stop, range(one.n)):
                exact = exact + over[image] * widen(inputs[0][image : image + 1], one.dtype)
                got = got + over[image] * widen(result[image : image + 1], one.dtype)
            wide = [np.asarray(exact), *(widen(each, one.dtype) for each in inputs[1:2])]
            sums = evaluate(replace(one, n=1, dtype="f64", bias=False), wide, stop)
            if one.bias:
                sums = sums + over.sum() * along_channels(one, widen(inputs[2], one.dtype))
            errors = np.abs(np.asarray(got) - sums).max((0, *pixel_axes(one)))
            channel = int(np.argmax(np.nan_to_num(errors, nan=np.inf)))
            around = in_data_order(one, 0, channel, (0,) * one.rank)
            return part_of(one, inputs, around, 1, one_dst=True)
        s = (signs.integers(0, 2, one.src_channels) * 2.0 - 1.0).reshape(one.groups, -1)
        total = np.zeros((one.groups, dst // one.groups, prod(one.kernel)))
        smaller = replace(
            one, n=1, dtype="f64", data_format="NCX", weights_format="OIX", groups_axis="I", src_channels=one.groups
        )  # fmt: skip
        for image in range(one.n):
            src = np.einsum("gi,gix->gx", s, _pixels(inputs[0][image : image + 1], one)).reshape(
                1, -1, *one.src_spatial
            )
            other = _pixels(inputs[1][image : image + 1], one).reshape(1, dst, *one.dst_spatial)
            sums = evaluate(smaller, [np.ascontiguousarray(src), np.ascontiguousarray(other)], stop)
            total += sums.reshape(total.shape)
        with np.errstate(invalid="ignore", over="ignore"):
            taps = np.einsum("gi,goik->gok", s, _weight_taps(widen(result, one.dtype), one))
        worst = np.argmax(np.nan_to_num(np.abs(taps - total), nan=np.inf).max(2).reshape(-1))
        group, o = divmod(int(worst), dst // one.groups)
        letters = {"I": 0 if one.groups_axis == "I" else group * (one.src_channels // one.groups), "O": o, "X": 0}
        if one.groups_axis == "I":
            letters["O"] = group * (dst // one.groups) + o
        around = tuple(
            [each for letter in one.weights_format
             for each in ((0,) * one.rank if letter == "X" else (letters[letter],))]
        )  # fmt: skip
        return part_of(one, inputs, around, 1, one_dst=True)


@dataclass(frozen=True)
class Projected:
    """Projected errors in units of what is expected, and the limits of an honest result."""

    exact: bool | None
    mean_square: tuple[float, float]
    largest: tuple[float, float]
    every_element: float
    one_element: float

    @property
    def passed(self) -> bool:
        """Whether the projected errors are those of an honest result."""
        if self.exact is not None:
            return self.exact
        return all(measured <= limit for measured, limit in (self.mean_square, self.largest))

    @classmethod
    def of(
        cls,
        problem: ConvProblem,
        arithmetic: Arithmetic,
        errors: Array,
        squares: Array,
        results: Array,
        once: Array,
        terms: Array,
        many: int,
        difficulty: float,
        *,
        exactly: bool,
    ) -> Projected:
        """Judge errors by projection and position, given sums over all elements of a position.

        `squares` sums the squared products, `results` the squared results, also by projection, `once` the variances of
        the roundings.
        """
        count, places = errors.shape
        with np.errstate(all="ignore"):
            some, results = squares > 0, np.atleast_2d(results)
            share = results[:, some] / squares[some]
            coherence = float(np.nan_to_num(np.mean(share), nan=1.0)) if some.any() else 1.0
            likely = np.maximum(results, coherence * squares)
            model = Model.of(problem, arithmetic, coherence)
            of_sum, of_spread, rest = model.weights(terms)
            from_sum = np.array([_sources(problem, arithmetic, each) for each in likely])
            from_spread = _sources(problem, arithmetic, squares)
            growth = np.square(difficulty * np.broadcast_to(model.growth.reshape(-1), (places,)))
            summing = growth * (of_sum * from_sum + of_spread * from_spread + rest * many)
            expected = once + summing + 2.0**-1000
            slack = accumulation_slack(count * places)
            allowed = np.maximum(slack, 4.0) * (summing + _ROUNDING / 4 * once)
            sizes = np.square(errors) / expected
            measured, limit = float(np.mean(sizes)), float(np.mean(allowed / expected))
            # each position alone: the mean of few squares, among many
            alone = accumulation_slack(count) * (summing.mean(0) + _ROUNDING / 4 * once)
            by_place = np.nan_to_num(np.square(errors).mean(0) / (alone + 2.0**-1000), nan=np.inf)
            typical = float(np.mean(squares / expected))
            every = min(1.0, limit / typical) if typical > 0 else 1.0
            one = float(np.median(alone / np.maximum(squares / many, 2.0**-1000)))
        measured = measured if np.isfinite(measured) else np.inf
        if exactly:
            return cls(not errors.any(), (measured, limit), (float(by_place.max(initial=0.0)), 1.0), 0.0, 0.0)
        return cls(None, (measured, limit), (float(by_place.max(initial=0.0)), 1.0), every, min(1.0, one))


def _sources(problem: ConvProblem, arithmetic: Arithmetic, values: Array) -> Array:
    """Return for each position the largest value among those that an algorithm computes together."""
    found = values.reshape(problem.dst_spatial if problem.forward else problem.kernel)
    for axis, far in enumerate(arithmetic.reach(problem)):
        found = largest_within(found, axis, far) if far else found
    return found.reshape(-1)


def _facts(tensors: Sequence[Storage], dtype: str) -> Array:
    """Return the largest magnitude of the first tensor and of the others, and 0; 0, 0, 1 if not all are integers."""
    largest = [0.0, 0.0]
    for place, tensor in enumerate(tensors):
        for part in blocks(tensor.shape):
            integers, most = _fact(tensor[part], dtype)
            if not integers:
                return np.array([0.0, 0.0, 1.0])
            largest[min(place, 1)] = max(largest[min(place, 1)], most)
    return np.array([*largest, 0.0])


def _fact(tensor: Storage, dtype: str) -> tuple[bool, float]:
    """Return whether all values are integers, or Inf, and the largest magnitude."""
    if not isinstance(tensor, np.ndarray):
        from kernels.gpu.projections import facts  # loads PyTorch

        return facts(tensor)
    values = single(tensor, dtype)
    return not (values != np.rint(values)).any(), float(np.abs(values).max(initial=0.0))


def _room(name: str, shape: tuple[int, ...]) -> Array:
    """Return room for projected planes, which is kept for the next block unless it is large."""
    size = prod(shape)
    if size > _KEPT:
        return np.empty(shape)
    return arena(f"projected {name}", 2 * size)[: 2 * size].view(np.float64).reshape(shape)


def _lines(image: Storage, problem: ConvProblem) -> Storage:
    """View an image as (channels, pixels)."""
    if problem.data_format == "NCX":
        return image.reshape(len(image), -1)
    return image.reshape(-1, image.shape[-1]).T


def _pixels(tensor: Storage, problem: ConvProblem) -> Array:
    """Return one image as (groups, channels of a group, pixels)."""
    found = channels_first(widen(tensor, problem.dtype), problem, problem.groups)[0]
    return np.ascontiguousarray(found).reshape(*found.shape[:2], -1)


def _weight_taps(weights: Array, problem: ConvProblem) -> Array:
    """Return weights as (groups, O of a group, I of a group, taps)."""
    x = problem.weights_format.index("X")
    taps = prod(problem.kernel)
    flat = weights.reshape(*weights.shape[:x], taps, *weights.shape[x + problem.rank :])
    order = [problem.weights_format.index(letter) for letter in "OIX"]
    o, i = problem.dst_channels // problem.groups, problem.src_channels // problem.groups
    oix = flat.transpose(order)
    if problem.groups_axis == "I":
        return oix.reshape(problem.groups, o, i, taps)
    return oix.reshape(o, problem.groups, i, taps).transpose(1, 0, 2, 3)
