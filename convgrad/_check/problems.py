"""Problems to try a kernel on: one call of an operation as a few integers, and random ones.

Both families of operations share one geometry. `wide` is the spatial size of the tensor that the taps move over: `src`
of Convolution, `dst` of ConvTranspose. `narrow` is the other one:

    narrow = (wide + pads_begin + pads_end - extent) // strides + 1,    extent = (kernel - 1) * dilations + 1

and the remainder of the division is the `output_padding` of ConvTranspose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import count
from math import prod
from typing import Any, TypeVar

import numpy as np

__all__ = [
    "DTYPES",
    "LEVELS",
    "OPS",
    "Problem",
    "Takes",
    "covering",
    "fitted",
    "random_problem",
]

Ints = tuple[int, ...]
T = TypeVar("T")

OPS = (
    "ConvolutionBackwardWeights",
    "ConvTransposeBackwardWeights",
    "ConvolutionBackwardData",
    "ConvTransposeBackwardData",
    "Convolution",
    "ConvTranspose",
    "BiasAdd",
    "BiasAddBackward",
)
DTYPES = ("f32", "f16", "bf16", "f64")
DATA_FORMATS = ("NCX", "NXC")
WEIGHTS_FORMATS = ("OIX", "XIO", "IOX", "XOI")
PER_AXIS = ("kernel", "strides", "dilations", "pads_begin", "pads_end")


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One call of an operation, without data. Raises `ValueError` if there is no such call.

    The operations on biases have no weights: their `kernel` is all ones, and `src_channels` are those of `dst`.
    """

    op: str
    dtype: str = "f32"
    n: int = 1
    groups: int = 1
    src_channels: int = 1
    dst_channels: int = 1
    wide: Ints
    kernel: Ints = ()
    strides: Ints = ()
    dilations: Ints = ()
    pads_begin: Ints = ()
    pads_end: Ints = ()
    data_format: str = "NCX"
    weights_format: str = "OIX"
    bias: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "wide", tuple(self.wide))
        for name in PER_AXIS:
            fill = 0 if name.startswith("pads") else 1
            object.__setattr__(self, name, tuple(getattr(self, name)) or (fill,) * self.rank)
        self._check()

    def _check(self) -> None:
        sizes = [len(getattr(self, name)) for name in PER_AXIS]
        if self.op not in OPS or self.dtype not in DTYPES or set(sizes) != {self.rank}:
            raise ValueError("a problem needs an operation, a dtype, and attributes of one rank")
        channels = (self.src_channels, self.dst_channels)
        smallest = (*self.wide, *self.kernel, *self.strides, *self.dilations, self.groups, *channels)
        if self.n < 0 or min(smallest) < 1 or min((*self.pads_begin, *self.pads_end), default=0) < 0:
            raise ValueError("sizes must be positive, pads at least 0")
        if any(each % self.groups for each in channels):
            raise ValueError(f"groups {self.groups} must divide {channels[0]} and {channels[1]} channels")
        if min(self._room(), default=0) < 0:
            raise ValueError("the kernel must fit the padded input")
        if self.of_bias and (self.src_channels != self.dst_channels or prod((*self.kernel, *self.strides)) != 1):
            raise ValueError("an operation on biases has no weights")
        if self.op == "BiasAddBackward" and self.rank < 2:
            raise ValueError("BiasAddBackward has at least two spatial axes")

    def _room(self) -> list[int]:
        axes = zip(self.wide, self.kernel, self.dilations, self.pads_begin, self.pads_end, strict=True)
        return [w + b + e - (k - 1) * d - 1 for w, k, d, b, e in axes]

    @property
    def rank(self) -> int:
        """Number of spatial axes."""
        return len(self.wide)

    @property
    def transposed(self) -> bool:
        """Whether the operation belongs to ConvTranspose."""
        return self.op.startswith("ConvTranspose")

    @property
    def of_bias(self) -> bool:
        """Whether the operation has no weights."""
        return self.op.startswith("BiasAdd")

    @property
    def output(self) -> str:
        """Name of the result."""
        if self.op.endswith("BackwardWeights"):
            return "diff_weights"
        return {"BiasAddBackward": "diff_bias"}.get(self.op, "diff_src" if self.op.endswith("Data") else "dst")

    @property
    def narrow(self) -> Ints:
        """Spatial size of the tensor with one pixel for each position of the taps."""
        return tuple(room // s + 1 for room, s in zip(self._room(), self.strides, strict=True))

    @property
    def output_padding(self) -> Ints:
        """Pixels at the end of the wide tensor that no tap reaches."""
        return tuple(room % s for room, s in zip(self._room(), self.strides, strict=True))

    @property
    def shapes(self) -> dict[str, Ints]:
        """Shapes of `src`, `weights`, `bias` and `dst`, whether or not the operation has them."""
        src, dst = (self.narrow, self.wide) if self.transposed else (self.wide, self.narrow)
        o_divided = self.transposed  # oneDNN's own reading of groups
        sizes = {
            "I": (self.src_channels // (1 if o_divided else self.groups),),
            "O": (self.dst_channels // (self.groups if o_divided else 1),),
            "X": self.kernel,
        }
        return {
            "src": self._data(self.src_channels, src),
            "weights": tuple(size for letter in self.weights_format for size in sizes[letter]),
            "bias": (self.dst_channels,),
            "dst": self._data(self.dst_channels, dst),
        }

    def _data(self, channels: int, spatial: Ints) -> Ints:
        return (self.n, channels, *spatial) if self.data_format == "NCX" else (self.n, *spatial, channels)

    @property
    def input_shapes(self) -> dict[str, Ints]:
        """Shapes of the inputs by name, in the order of the operation's page."""
        if self.op == "BiasAddBackward":
            names = ["diff_dst"]
        elif self.output == "diff_weights":
            names = ["src", "diff_dst"]
        elif self.output == "diff_src":
            names = ["diff_dst", "weights"]
        else:
            names = ["src", *(() if self.of_bias else ("weights",)), *(("bias",) if self.bias or self.of_bias else ())]
        return {name: self.shapes[name.removeprefix("diff_")] for name in names}

    @property
    def output_shape(self) -> Ints:
        """Shape of the result."""
        return self.shapes[self.output.removeprefix("diff_")]

    @property
    def sum_length(self) -> int:
        """The largest number of products that one element of the result sums, with the bias."""
        if self.of_bias:
            return 2 if self.op == "BiasAdd" else self.n * prod(self.wide)
        if self.output == "diff_weights":
            return self.n * prod(self.narrow)
        channels = self.dst_channels if self.output == "diff_src" else self.src_channels
        return channels // self.groups * prod(self.kernel) + self.bias

    @property
    def macs(self) -> int:
        """Nominal number of multiply-adds."""
        channels = self.dst_channels if self.of_bias else self.src_channels * self.dst_channels // self.groups
        return self.n * prod(self.narrow) * prod(self.kernel) * channels

    @property
    def work(self) -> int:
        """Multiply-adds, or the elements of all tensors if these are more."""
        return max(self.macs, sum(map(prod, (*self.input_shapes.values(), self.output_shape))))

    def attributes(self) -> dict[str, Any]:
        """Return the attributes as a caller sends them."""
        if self.of_bias:
            return {"data_format": self.data_format}
        sent: dict[str, Any] = {name: list(getattr(self, name)) for name in PER_AXIS[1:]}
        sent |= {name: getattr(self, name) for name in ("groups", "data_format", "weights_format")}
        if self.transposed:
            sent["output_padding"] = list(self.output_padding)
        if self.op == "ConvolutionBackwardData":
            sent["dst_shape"] = list(self.output_shape)
        elif self.output == "diff_weights":
            sent["weights_shape"] = list(self.output_shape)
        return sent

    def as_json(self) -> dict[str, Any]:
        """Return the fields as JSON; `from_json` reads them."""
        return _json_of(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Problem:
        """Return the problem that `as_json` described; raises `ValueError` for anything else."""
        try:
            return cls(**data)
        except TypeError as error:
            raise ValueError("a problem must have the fields of `Problem`") from error

    def __str__(self) -> str:
        parts = [f"{self.op} {self.dtype}"]
        parts += [f"{name} {list(shape)}" for name, shape in self.input_shapes.items()]
        if not self.of_bias:
            parts += [f"kernel {list(self.kernel)}"] if self.output == "diff_weights" else []
            for name in PER_AXIS[1:]:
                if set(getattr(self, name)) != {0 if name.startswith("pads") else 1}:
                    parts.append(f"{name} {list(getattr(self, name))}")
            parts += [f"groups {self.groups}"] if self.groups > 1 else []
            parts.append(self.weights_format)
        return ", ".join([*parts, self.data_format])


@dataclass(frozen=True, kw_only=True)
class Takes:
    """What a kernel takes; problems are drawn, or changed, to fit.

    `uneven_pads` are pads that differ at both ends, `empty` is a batch of no images.
    """

    ops: Sequence[str] = OPS
    dtypes: Sequence[str] = ("f32", "f16", "bf16")
    ranks: Sequence[int] = (1, 2, 3)
    data_formats: Sequence[str] = DATA_FORMATS
    weights_formats: Sequence[str] = WEIGHTS_FORMATS
    strides: bool = True
    dilations: bool = True
    pads: bool = True
    uneven_pads: bool = True
    groups: bool = True
    bias: bool = True
    empty: bool = True

    def __post_init__(self) -> None:
        if max(self.ranks) < 2:
            object.__setattr__(self, "ops", tuple([op for op in self.ops if op != "BiasAddBackward"]))
        if not self.ops:
            raise ValueError("BiasAddBackward has at least two spatial axes: takes.ranks must have 2 or 3")

    def as_json(self) -> dict[str, Any]:
        """Return the fields as JSON; `from_json` reads them."""
        return _json_of(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Takes:
        """Read a dict with some of these fields; raises `ValueError` for an unknown field or a wrong value."""
        known = {field.name: field for field in fields(cls)}
        unknown = sorted(set(data) - set(known))
        if unknown:
            raise ValueError(f"takes has no field {unknown[0]!r}: its fields are {', '.join(known)}")
        given: dict[str, Any] = {}
        for name, value in data.items():
            default = known[name].default
            if isinstance(default, bool):
                if not isinstance(value, bool):
                    raise ValueError(f"takes.{name} must be true or false")
                given[name] = value
                continue
            allowed = DTYPES if name == "dtypes" else default
            chosen = tuple(value) if isinstance(value, list | tuple) else (value,)
            if not chosen or not set(chosen) <= set(allowed):  # type: ignore[arg-type]
                raise ValueError(f"takes.{name} may only contain {', '.join(map(str, allowed))}")  # type: ignore[arg-type]
            given[name] = chosen
        return cls(**given)

    def limited(self, problem: Problem) -> Problem | None:
        """Return the problem without what the kernel does not take; None where nothing is left of it."""
        new: dict[str, Any] = {}
        if problem.op not in self.ops or problem.dtype not in self.dtypes or problem.rank not in self.ranks:
            return None
        if problem.n == 0 and not self.empty:
            new["n"] = 1
        if problem.data_format not in self.data_formats:
            new["data_format"] = self.data_formats[0]
        if problem.weights_format not in self.weights_formats:
            new["weights_format"] = self.weights_formats[0]
        if not self.strides:
            new["strides"] = ()
        if not self.dilations:
            new["dilations"] = ()
        if not self.groups and not problem.of_bias:
            new["groups"] = 1
        if not self.bias:
            new["bias"] = False
        if not self.pads:
            new |= {"pads_begin": (), "pads_end": ()}
        elif not self.uneven_pads:
            new["pads_end"] = problem.pads_begin
        if new.keys() & {"pads_begin", "pads_end"}:  # so that the kernel fits
            extents = [(k - 1) * d + 1 for k, d in zip(problem.kernel, problem.dilations, strict=True)]
            new["wide"] = tuple(map(max, problem.wide, extents))
        return replace(problem, **new) if new else problem


def _json_of(record: Problem | Takes) -> dict[str, Any]:
    """Return the fields of a record, with lists for tuples."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(record).items()}


LEVELS = 31
"""Levels of each attribute in `covering`: a prime, and at least as many as there are attributes."""


def covering(rng: np.random.Generator, row: int) -> Callable[[Sequence[T]], T]:
    """Return a function that chooses from one sequence after the other, for a row of a covering array.

    Attribute k of row (x, y, z) has level x + k y + k^2 z modulo 31, as in a Reed-Solomon code: 31 rows have each
    level of each attribute, 961 each pair of levels of two attributes, and 29,791 each triple. `rng` permutes the
    levels, the same for all rows.
    """
    x, y, z = (row // LEVELS**power % LEVELS for power in range(3))
    attributes = count(0)

    def choose(values: Sequence[T]) -> T:
        k = next(attributes)
        level = rng.permutation(LEVELS)[(x + k * y + k * k * z) % LEVELS]
        return values[int(level) % len(values)]

    return choose


# Border values of the attributes: the small ones, and those around the powers of two; frequent ones more than once.
# An `_ANY` is any number up to 300, small ones more likely.
_ANY = 0
_BORDERS = (7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257)
_SIZES = (1, 2, 3, 4, 5, 5, 6, *_BORDERS, 2, 3, 4, 9, _ANY, _ANY)
_CHANNELS = (1, 2, 3, 4, 5, 6, 1, 2, 3, 4, *_BORDERS, 12, _ANY, _ANY)
_BATCHES = (1, 2, 3, 4, 5, 6, *[1] * 6, 2, 2, 2, 3, *_BORDERS[:12], 129, 255, _ANY)
_GROUPS = (*[1] * 14, 2, 3, 4, 5, 2, *_BORDERS[:9:2], 6, 8, 16, 64, 65, 129, _ANY)
_KERNELS = (1, 2, 3, 4, 5, 6, *[1] * 4, *[3] * 5, 2, 5, *_BORDERS[:10], 65, 129, 12, _ANY)
_STEPS = (1, 2, 3, 4, 5, 6, *[1] * 9, *[2] * 3, 3, *_BORDERS[:9], 64, 129, _ANY)
# Pads by the extent of the kernel.
_PADS: tuple[Callable[[int], int], ...] = (
    *[lambda _: 0] * 9, *[lambda _: 1] * 5, *[lambda _: 2] * 2, *[lambda _: 3] * 2, *[lambda extent: extent // 2] * 4,
    *[lambda extent: extent - 1] * 3, lambda extent: extent, lambda extent: extent + 1,
    lambda _: 4, lambda _: 7, lambda _: 8, lambda _: 17,
)  # fmt: skip


def random_problem(
    rng: np.random.Generator, takes: Takes, op: str, dtype: str, macs: int, choose: Callable[[Sequence[Any]], Any]
) -> Problem:
    """Return the problem whose attributes `choose` chooses, reduced to about `macs` multiply-adds.

    What has no levels, and what is reduced first, is drawn by `rng`.
    """
    ranks = [rank for rank in takes.ranks if not (op == "BiasAddBackward" and rank == 1)]
    rank = choose([each for each in (1, 2, 2, 2, 3) if each in ranks] or ranks)
    plain = op.startswith("BiasAdd")
    formats = {"data_format": choose(takes.data_formats), "weights_format": choose(takes.weights_formats),
               "bias": choose((False, True)) and takes.bias and op in ("Convolution", "ConvTranspose")}  # fmt: skip

    def size(values: Sequence[int], taken: bool = True) -> int:
        chosen = choose(values)
        drawn = chosen if chosen != _ANY else int(np.exp(rng.uniform(0.7, 5.7)))
        return drawn if taken else 1

    sizes = {"n": size(_BATCHES), "groups": size(_GROUPS, takes.groups and not plain)}
    sizes |= {name: size(_CHANNELS, name == "I" or not plain) for name in "IO"}
    multiplier = choose((None, None, None, (1, 1), (1, 2), (3, 1)))
    if sizes["groups"] > 1 and multiplier:  # depthwise, with a multiplier, and its reverse
        sizes["I"], sizes["O"] = multiplier
    square, pads = choose((False, True)), []
    for axis in range(rank):
        sizes[f"size {axis}"] = size(_SIZES)
        sizes[f"kernel {axis}"] = size(_KERNELS, not plain)
        sizes[f"stride {axis}"] = size(_STEPS, takes.strides and not plain)
        sizes[f"dilation {axis}"] = size(_STEPS, takes.dilations and not plain)
        pads.append((choose(_PADS), choose(_PADS)))
        if square and axis:
            sizes |= {f"{name} {axis}": sizes[f"{name} 0"] for name in ("kernel", "stride", "dilation")}
            pads[axis] = pads[0]
    of_narrow, grows = rng.integers(2, size=(2, rank)).tolist()
    rest = rng.random(rank).tolist()

    def built() -> Problem:
        axes = []
        for axis, (first, last) in enumerate(pads):
            of, kernel, stride, dilation = (sizes[f"{n} {axis}"] for n in ("size", "kernel", "stride", "dilation"))
            extent = (kernel - 1) * dilation + 1
            begin, end = (min(first(extent), 300), min(last(extent), 300)) if takes.pads and not plain else (0, 0)
            end = end if takes.uneven_pads else begin
            if of_narrow[axis]:
                of = max(1, (of - 1) * stride + extent - begin - end + int(rest[axis] * stride))
            missing = max(0, extent - of - begin - end)
            if grows[axis] and takes.pads and takes.uneven_pads:
                end, missing = end + missing, 0
            axes.append((of + missing, kernel, stride, dilation, begin, end))
        wide, kernels, strides, dilations, begins, ends = zip(*axes, strict=True)
        groups = sizes["groups"]
        return Problem(op=op, dtype=dtype, n=sizes["n"], groups=groups, src_channels=groups * sizes["I"],
                       dst_channels=groups * sizes["I" if plain else "O"], wide=wide, kernel=kernels, strides=strides,
                       dilations=dilations, pads_begin=begins, pads_end=ends, **formats)  # fmt: skip

    # Most attributes stay what they are if a few others are small; those first in the order are kept the longest.
    order, kept = [str(name) for name in rng.permutation(list(sizes))], 3
    while built().work > macs:
        name = max(order[kept:], key=lambda each: sizes[each])
        if sizes[name] > 2 or not kept:
            sizes[name] //= 2
        else:
            kept -= 1
        if max(sizes.values()) == 1:
            break
    found = takes.limited(built())
    assert found is not None
    return found


def fitted(problem: Problem, macs: int) -> Problem:
    """Reduce the batch, then the channels, the groups and the length, until there are few enough multiply-adds."""
    if problem.macs > macs and problem.n > 1:
        problem = replace(problem, n=max(1, macs * problem.n // problem.macs))
    while problem.macs > macs:
        src, dst, groups = problem.src_channels, problem.dst_channels, problem.groups
        if not problem.of_bias and max(src, dst) > groups:
            fewer = max(1, max(src, dst) // groups // 2) * groups
            problem = replace(problem, src_channels=fewer) if src >= dst else replace(problem, dst_channels=fewer)
        elif src > 1 and problem.of_bias:
            problem = replace(problem, src_channels=src // 2, dst_channels=src // 2)
        elif groups > 1:
            half = groups // 2
            problem = replace(
                problem, groups=half, src_channels=src // groups * half, dst_channels=dst // groups * half
            )
        else:
            axis = int(np.argmax(problem.wide))
            try:
                shorter = (*problem.wide[:axis], problem.wide[axis] // 2, *problem.wide[axis + 1 :])
                problem = replace(problem, wide=shorter)
            except ValueError:
                return problem
    return problem
