"""Problems to try: a plain description, generators of random ones, exact integer data, and real layers.

A `Case` is one operation call in the specification's terms. It makes its own data and its attributes as a caller
would send them, and gets the answer from the oracle; the tests of each part convert it to what that part reads.
`random_case` draws random ones from a seeded generator.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from math import isqrt, prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests import naive

Ints = tuple[int, ...]
Tensor = npt.NDArray[Any]
Pick = Callable[[Sequence[Any]], Any]

OPS = (
    "ConvolutionBackwardWeights", "ConvTransposeBackwardWeights", "ConvTranspose", "Convolution",
    "ConvolutionBackwardData", "ConvTransposeBackwardData", "BiasAdd", "BiasAddBackward",
)  # fmt: skip
WITH_WEIGHTS = OPS[:6]
FORMATS = ("XIO", "OIX", "IOX", "XOI")
EXACT_SUM = 1 << 22  # f32 holds every integer up to 2**24; the margin is for kernels that split a product
EXACT_F64 = 1 << 52
WIDEST = {"f32": 2048, "f16": 32, "bf16": 128, "f64": 1 << 24}  # f16 would overflow more often than not


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call: I and O are `src_channels` and `dst_channels`; a dilation of 1 is dense."""

    name: str = "random"
    op: str = "ConvolutionBackwardWeights"
    dtype: str = "f32"
    n: int = 1
    src_channels: int = 1
    dst_channels: int = 1
    groups: int = 1
    src_spatial: Ints
    dst_spatial: Ints
    kernel: Ints
    strides: Ints = ()
    dilations: Ints = ()
    pads_begin: Ints = ()
    pads_end: Ints = ()
    output_padding: Ints = ()
    data_format: str = "NCX"
    weights_format: str = "OIX"
    groups_axis: str = "I"
    bias: bool = False
    seed: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        rank = len(self.kernel)
        for key, fill in (
            ("strides", 1), ("dilations", 1), ("pads_begin", 0), ("pads_end", 0), ("output_padding", 0),
        ):  # fmt: skip
            object.__setattr__(self, key, getattr(self, key) or (fill,) * rank)
        self._check()

    def _check(self) -> None:
        """Check the case against the specification's shape rule: a wrong case must not look like a wrong kernel."""
        assert self.src_channels % self.groups == 0
        assert self.dst_channels % self.groups == 0
        for axis in range(len(self.kernel)):
            s, b, e = self.strides[axis], self.pads_begin[axis], self.pads_end[axis]
            extent = (self.kernel[axis] - 1) * self.dilations[axis] + 1
            if self.transposed:
                expected = s * (self.src_spatial[axis] - 1) + extent - b - e + self.output_padding[axis]
                assert self.output_padding[axis] < s, self
            else:
                assert self.src_spatial[axis] + b + e >= extent, self
                expected = (self.src_spatial[axis] + b + e - extent) // s + 1
            assert self.dst_spatial[axis] == expected, f"axis {axis}: dst {expected} expected: {self}"

    @property
    def transposed(self) -> bool:
        """Return whether the operation belongs to ConvTranspose."""
        return self.op.startswith("ConvTranspose")

    @property
    def forward(self) -> bool:
        """Return whether the result is dst."""
        return self.op in ("ConvTranspose", "Convolution", "BiasAdd")

    @property
    def of_bias(self) -> bool:
        """Whether the operation has no weights; src and dst have one shape, and each channel is a group."""
        return self.op.startswith("BiasAdd")

    @property
    def data_gradient(self) -> bool:
        """Whether the result is diff_src."""
        return self.op.endswith("BackwardData")

    @property
    def src_shape(self) -> Ints:
        """Return the shape of src."""
        return self._data_shape(self.src_channels, self.src_spatial)

    @property
    def dst_shape(self) -> Ints:
        """Return the shape of dst and diff_dst."""
        return self._data_shape(self.dst_channels, self.dst_spatial)

    @property
    def weights_shape(self) -> Ints:
        """Return the shape of weights and diff_weights, the axis `groups_axis` divided by groups."""
        divide = {"I": 1, "O": 1, self.groups_axis: self.groups}
        sizes: dict[str, Ints] = {
            "I": (self.src_channels // divide["I"],),
            "O": (self.dst_channels // divide["O"],),
            "X": self.kernel,
        }
        return tuple(size for letter in self.weights_format for size in sizes[letter])

    @property
    def input_shapes(self) -> dict[str, Ints]:
        """Return the shapes of the inputs by name, in the kernels' order."""
        if self.data_gradient:
            return {"diff_dst": self.dst_shape, "weights": self.weights_shape}
        if self.op == "BiasAddBackward":
            return {"diff_dst": self.dst_shape}
        if not self.forward:
            return {"src": self.src_shape, "diff_dst": self.dst_shape}
        shapes = {"src": self.src_shape} | ({} if self.of_bias else {"weights": self.weights_shape})
        return shapes | ({"bias": (self.dst_channels,)} if self.bias else {})

    @property
    def output_shape(self) -> Ints:
        """Return the shape of the result."""
        if self.data_gradient:
            return self.src_shape
        if self.op == "BiasAddBackward":
            return (self.dst_channels,)
        return self.dst_shape if self.forward else self.weights_shape

    @property
    def output_name(self) -> str:
        """Name of the result."""
        if self.data_gradient:
            return "diff_src"
        if self.op == "BiasAddBackward":
            return "diff_bias"
        return "dst" if self.forward else "diff_weights"

    @property
    def shape_name(self) -> str | None:
        """Name of the attribute, or input, that is the shape of the result."""
        return next((name for name in ("weights_shape", "dst_shape") if name in self.attributes()), None)

    @property
    def macs(self) -> int:
        """Return the nominal number of multiply-adds."""
        pixels = self.src_spatial if self.transposed else self.dst_spatial
        channels = self.src_channels * self.dst_channels // self.groups
        return self.n * prod(pixels) * prod(self.kernel) * channels

    @property
    def sum_length(self) -> int:
        """Return the largest number of terms summed for one element of the result, bias included."""
        if self.forward:
            return 1 + (not self.of_bias) * self.src_channels // self.groups * prod(self.kernel)
        if self.data_gradient:
            return self.dst_channels // self.groups * prod(self.kernel)
        return self.n * prod(self.src_spatial if self.transposed else self.dst_spatial)

    def attributes(self) -> dict[str, Any]:
        """Return the attributes as a caller sends them, under their new names."""
        if self.of_bias:
            return {"data_format": self.data_format}
        sent: dict[str, Any] = {
            key: list(getattr(self, key)) for key in ("strides", "pads_begin", "pads_end", "dilations")
        }
        sent |= {key: getattr(self, key) for key in ("groups", "data_format", "weights_format")}
        if self.transposed:
            sent["output_padding"] = list(self.output_padding)
        if self.op == "ConvolutionBackwardData":
            sent["dst_shape"] = list(self.src_shape)
        elif not (self.forward or self.data_gradient):
            sent["weights_shape"] = list(self.weights_shape)
        return sent

    def inputs(self) -> dict[str, Tensor]:
        """Return integer inputs in the case's dtype, such that f32 holds every partial sum exactly, or f64 for f64.

        The ranges are as wide as that and the dtype allow, so that f16 and bf16 results need rounding, including ties,
        and those of f64 are beyond f32.
        """
        assert self.sum_length <= EXACT_SUM, f"sums of {self.sum_length} products can't be exact"
        rng = np.random.default_rng(self.seed)
        bound = (EXACT_F64 if self.dtype == "f64" else EXACT_SUM) // max(1, self.sum_length)
        first = min(WIDEST[self.dtype], isqrt(bound))
        second = min(WIDEST[self.dtype], bound // first)
        limits = {"src": first, "weights": second, "diff_dst": second, "bias": first * second}
        if self.data_gradient or self.of_bias:
            limits |= {"diff_dst": first, "bias": first}
        return {
            name: naive.round_to(self.dtype, rng.integers(-limits[name], limits[name] + 1, shape))
            for name, shape in self.input_shapes.items()
        }

    def floats(self) -> dict[str, Tensor]:
        """Return normally distributed inputs in the case's dtype."""
        rng = np.random.default_rng(self.seed)
        return {
            name: naive.round_to(self.dtype, rng.standard_normal(shape)) for name, shape in self.input_shapes.items()
        }

    def mirrored(self) -> Case:
        """Return the call of the other operation with src and dst swapped; a weight gradient is then the same sum."""
        family, other = ("ConvTranspose", "Convolution") if self.transposed else ("Convolution", "ConvTranspose")
        op = other + self.op.removeprefix(family)
        padding = []
        for axis in range(len(self.kernel)):
            extent = (self.kernel[axis] - 1) * self.dilations[axis] + 1
            pads = self.pads_begin[axis] + self.pads_end[axis]
            shortest = self.strides[axis] * (self.dst_spatial[axis] - 1) + extent - pads
            padding.append(self.src_spatial[axis] - shortest)
        return replace(
            self, op=op, src_channels=self.dst_channels, dst_channels=self.src_channels, src_spatial=self.dst_spatial,
            dst_spatial=self.src_spatial, output_padding=() if self.transposed else tuple(padding),
            groups_axis="I" if self.transposed else "O",
            weights_format=self.weights_format.translate(str.maketrans("IO", "OI")),
        )  # fmt: skip

    def adjoint(self) -> Case:
        """Return the forward operation on diff_dst that is the same sum as this gradient with respect to src."""
        assert self.data_gradient
        op = "Convolution" if self.transposed else "ConvTranspose"
        return replace(self.mirrored(), op=op, groups_axis="I" if self.groups_axis == "O" else "O")

    def exact(self, inputs: dict[str, Tensor]) -> naive.Array:
        """Return the oracle's result in float64."""
        shared: dict[str, Any] = {
            key: getattr(self, key)
            for key in ("strides", "pads_begin", "dilations", "groups", "data_format", "weights_format")
        }
        shared["groups_axis"] = self.groups_axis
        if self.op == "BiasAddBackward":
            return naive.bias_gradient(inputs["diff_dst"], data_format=self.data_format)
        if self.op == "BiasAdd":
            return naive.bias_add(inputs["src"], inputs["bias"], data_format=self.data_format)
        if self.forward:
            tensors = (inputs["src"], inputs["weights"], inputs.get("bias"))
            forward = naive.conv_transpose if self.transposed else naive.convolution
            return forward(*tensors, dst_spatial=self.dst_spatial, **shared)
        if self.data_gradient:
            return naive.bwd_data(
                self.op, inputs["diff_dst"], inputs["weights"], src_spatial=self.src_spatial, **shared
            )
        return naive.bwd_weights(self.op, inputs["src"], inputs["diff_dst"], kernel=self.kernel, **shared)

    def expected(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return the oracle's result, rounded once to the case's dtype."""
        return self.rounded(self.exact(inputs))

    def rounded(self, values: Tensor) -> Tensor:
        """Round to the case's dtype, to nearest even."""
        return naive.round_to(self.dtype, values)

    def _data_shape(self, channels: int, spatial: Ints) -> Ints:
        return (self.n, channels, *spatial) if self.data_format == "NCX" else (self.n, *spatial, channels)


def random_case(rng: np.random.Generator, macs: int = 60_000, longer: int = 1, *, small: bool = False) -> Case:
    """Draw a valid case of at most about `macs` multiply-adds, with images `longer` times as long.

    A third of them, or all where they are to be `small`, are made of small numbers.
    """

    def pick(options: Sequence[Any]) -> Any:
        return options[int(rng.integers(len(options)))]

    op = pick(OPS)
    if op.startswith("BiasAdd"):
        return _of_bias(pick, op, macs)
    transposed = op.startswith("ConvTranspose")
    rank, small = pick([1, 2, 2, 2, 3]), small or pick([False, False, True])
    axes = [_small_axis(pick, transposed) if small else _axis(pick, transposed, rank, longer) for _ in range(rank)]
    columns = list(zip(*axes, strict=True))
    groups, src_channels, dst_channels = _few_channels(pick) if small else _channels(pick)
    case = Case(
        op=op, dtype=pick(["f32", "f32", "bf16", "f16"]), n=pick([1] * 8 + [2] * 6 + [3, 3, 5, 5, 9, 0]), groups=groups,
        src_channels=src_channels, dst_channels=dst_channels, src_spatial=columns[0], dst_spatial=columns[1],
        kernel=columns[2], strides=columns[3], dilations=columns[4], pads_begin=columns[5], pads_end=columns[6],
        output_padding=columns[7], data_format=pick(["NCX", "NXC"]), weights_format=pick(FORMATS),
        groups_axis=pick(["O", "I"]) if transposed and groups > 1 else ("O" if transposed else "I"),
        bias=op in ("ConvTranspose", "Convolution") and pick([False, True]), seed=pick(range(1 << 16)),
    )  # fmt: skip
    return fit(case, macs)


def _of_bias(pick: Pick, op: str, macs: int) -> Case:
    """Draw a case of BiasAdd or BiasAddBackward, whose images have at least two axes."""
    rank = pick([2, 2, 3] if op == "BiasAddBackward" else [1, 2, 2, 3])
    spatial = tuple(pick([5, 1, 2, 3, 4, 7, 8, 9, 16, 33]) for _ in range(rank))
    channels = pick([1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 33, 65])
    return fit(
        Case(
            op=op, dtype=pick(["f32", "f32", "bf16", "f16"]), n=pick([1, 1, 1, 2, 2, 3, 5, 9, 0]),
            src_channels=channels, dst_channels=channels, groups=channels, src_spatial=spatial, dst_spatial=spatial,
            kernel=(1,) * rank, data_format=pick(["NCX", "NXC"]), bias=op == "BiasAdd", seed=pick(range(1 << 16)),
        ),
        macs,
    )  # fmt: skip


def _axis(pick: Pick, transposed: bool, rank: int, longer: int) -> Ints:
    """Draw (src, dst, kernel, stride, dilation, pads_begin, pads_end, output_padding) of one axis."""
    size = pick([5, 1, 2, 3, 4, 6, 7, 8, 9, 11, 13, 17, 34] if rank < 3 else [4, 1, 2, 3, 5, 6])
    size = size * longer - pick(range(longer))
    kernel = pick([3, 1, 1, 2, 3, 4, 5, 7, 12] if rank < 3 else [2, 1, 3, 4])
    stride = pick([1, 1, 2, 2, 3, 5])
    dilation = pick([1, 1, 1, 2, 3, 17])
    extent = (kernel - 1) * dilation + 1
    pads = [0, 0, 1, 1, 2, 3, extent // 2, extent, extent + 3]
    begin, end = min(pick(pads), 40), min(pick(pads), 40)
    extra = pick([0, 0, *range(stride)]) if transposed else 0
    return _valid_axis(transposed, size, kernel, stride, dilation, begin, end, extra)


def _small_axis(pick: Pick, transposed: bool) -> Ints:
    """Draw an axis of small numbers: each of them is often equal to another one, or just beyond it.

    So strides are patches without overlap or with gaps, and pads, which are uneven, as long as the kernel or longer.
    """
    size, kernel, dilation = pick([5, 1, 1, 2, 3, 4, 6, 7, 8, 9]), pick([2, 1, 1, 3]), pick([1, 1, 2])
    stride = pick([1, 2, 3, (kernel - 1) * dilation + 1])
    begin, end = pick([*[(0, 0)] * 8, (1, 1), (0, 1), (1, 0), (2, 1), (1, 3), (3, 0), (0, 2), (3, 3)])
    extra = pick(range(stride)) if transposed else 0
    return _valid_axis(transposed, size, kernel, stride, dilation, begin, end, extra)


def _valid_axis(
    transposed: bool, size: int, kernel: int, stride: int, dilation: int, begin: int, end: int, extra: int
) -> Ints:
    """Return an axis with pads that leave at least one dst position: Convolution's are raised, the other's reduced."""
    extent = (kernel - 1) * dilation + 1
    if not transposed:
        end = max(end, extent - size - begin)
        return size, (size + begin + end - extent) // stride + 1, kernel, stride, dilation, begin, end, 0
    full = stride * (size - 1) + extent + extra
    begin = min(begin, full - 1)
    end = min(end, full - 1 - begin)
    return size, full - begin - end, kernel, stride, dilation, begin, end, extra


def _few_channels(pick: Pick) -> Ints:
    """Draw (groups, I, O), few of them or now and then more on one side."""
    groups = pick([1, 1, 1, 1, 2, 3, 16, 32])
    src, dst = (1, pick([1, 1, 2])) if groups > 8 else (pick([1, 1, 2, 3, 4, 17]), pick([5, 1, 2, 3, 4, 17]))
    return groups, groups * src, groups * dst


def _channels(pick: Pick) -> Ints:
    """Draw (groups, I, O): plain, grouped, depthwise, or with a multiplier; sizes around those of tiles."""
    kind = pick(["plain", "plain", "plain", "grouped", "depthwise", "multiplier", "reducer"])
    sizes = [1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 24, 31, 32, 33, 40, 64, 65]
    if kind == "plain":
        return 1, pick(sizes), pick(sizes)
    if kind == "grouped":
        groups = pick([2, 3, 4, 8])
        return groups, groups * pick(sizes[:12]), groups * pick(sizes[:12])
    groups = pick([2, 3, 7, 8, 15, 16, 17, 24, 33])
    many = groups * pick([2, 3, 4])
    return {"depthwise": (groups, groups, groups), "multiplier": (groups, groups, many)}.get(
        kind, (groups, many, groups)
    )


def fit(case: Case, macs: int) -> Case:
    """Reduce the batch, then the channels, until the case is small enough to run thousands of them."""
    if case.macs > macs and case.n > 1:
        case = replace(case, n=1)
    while case.macs > macs and (case.src_channels > case.groups or case.dst_channels > case.groups):
        if case.src_channels >= case.dst_channels:
            case = replace(case, src_channels=max(1, case.src_channels // case.groups // 2) * case.groups)
        else:
            case = replace(case, dst_channels=max(1, case.dst_channels // case.groups // 2) * case.groups)
    while case.macs > macs and case.groups > 1:
        half = case.groups // 2
        src, dst = case.src_channels // case.groups * half, case.dst_channels // case.groups * half
        case = replace(case, groups=half, src_channels=src, dst_channels=dst)
    return case


def real_layers() -> Iterator[Case]:
    """Yield the layers of `benchmarks/shapes.json`, with the batch as published."""
    path = Path(__file__).parent.parent / "benchmarks" / "shapes.json"
    for row in json.loads(path.read_text()):
        known = {each.name for each in fields(Case)} & row.keys()
        plain: dict[str, Any] = {key: tuple(row[key]) if isinstance(row[key], list) else row[key] for key in known}
        yield Case(**plain, groups_axis="O" if row["op"].startswith("ConvTranspose") else "I")
