"""Problems to try a kernel on: one call of an operation as a few integers, and what a kernel takes of them.

Both families of operations share one geometry. `wide` is the spatial size of the tensor that the taps move over: `src`
of Convolution, `dst` of ConvTranspose. `narrow` is the other one:

    narrow = (wide + pads_begin + pads_end - extent) // strides + 1,    extent = (kernel - 1) * dilations + 1

and the remainder of the division is the `output_padding` of ConvTranspose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from math import prod
from typing import Any

import numpy as np

__all__ = [
    "DTYPES",
    "OPS",
    "Problem",
    "Takes",
    "fitted",
]

Ints = tuple[int, ...]

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

    def reformatted(self, problem: Problem) -> Problem | None:
        """Return the problem in formats that the kernel takes, without a bias it doesn't; None if it needs more."""
        found = self.limited(problem)
        free = {name: getattr(problem, name) for name in ("data_format", "weights_format", "bias")}
        return found if found is not None and replace(found, **free) == problem else None


def _json_of(record: Problem | Takes) -> dict[str, Any]:
    """Return the fields of a record, with lists for tuples."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(record).items()}


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
