"""When Winograd's algorithm is chosen: what it takes, what it costs, and which integers it sums exactly."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, prod

from kernels.costs import COSTS
from kernels.problem import ConvProblem, OpName
from kernels.target import target

__all__ = [
    "FAMILY", "Refusal", "WinogradKernel", "exact_factor", "plane_products", "plane_tiles", "refusals", "winograd_macs",
]  # fmt: skip

OPS: tuple[OpName, ...] = (
    "Convolution", "ConvTranspose", "ConvolutionBackwardWeights", "ConvTransposeBackwardWeights",
)  # fmt: skip
"""The operations of the kernels; gradients of data are computed as forward operations."""

FAMILY = "convolutions and their gradients of data and weights"

TAKEN = ("f32", "f16", "bf16")
"""Dtypes whose sums are kept in f32."""

LEAST_CHANNELS = 16
"""Channels of a group of either tensor: one vector of the widest targets. Transforms take most of the time of fewer."""

MOST_DEPTHS = 64
"""Taps along the first of three axes: each has sums of its own."""

MOST_PAD = 1 << 40
"""Padding up to which positions of tiles are far from overflow."""


@dataclass(frozen=True)
class Refusal:
    """Why a problem can't be computed by Winograd: the attribute, and a message with the rule and both numbers."""

    attribute: str
    message: str

    def __str__(self) -> str:
        """Return the message."""
        return self.message


def refusals(problem: ConvProblem) -> tuple[Refusal, ...]:
    """Return every rule that a problem breaks, in the order of its attributes; none where Winograd can take it."""
    if problem.op not in OPS:
        return (Refusal("op", f"winograd computes {FAMILY}; {problem.op} computes {problem.computes}"),)
    if problem.dtype not in TAKEN:
        return (Refusal("dtype", f"winograd takes {', '.join(TAKEN)}; dtype is {problem.dtype}"),)
    if problem.rank < 2:
        return (Refusal("kernel", f"winograd takes 2 or 3 spatial axes; kernel has {problem.rank}"),)
    found = []
    for name, rule, values in (
        ("kernel", 3, problem.kernel), ("strides", 1, problem.strides), ("dilations", 1, problem.dilations)
    ):  # fmt: skip
        for axis in (problem.rank - 2, problem.rank - 1):
            if values[axis] != rule:
                text = f"winograd takes {name} of {rule} in the last two axes; {name}[{axis}] is {values[axis]}"
                found.append(Refusal(name, text))
    if problem.rank == 3 and problem.kernel[0] > MOST_DEPTHS:
        text = f"winograd takes a kernel of up to {MOST_DEPTHS} in the first axis; kernel[0] is {problem.kernel[0]}"
        found.append(Refusal("kernel", text))
    for axis, pad in enumerate(problem.pads_begin):
        if abs(pad) > MOST_PAD:
            found.append(Refusal("pads_begin", f"winograd takes pads up to {MOST_PAD}; pads_begin[{axis}] is {pad}"))
    for name, channels in (("src", problem.src_channels), ("dst", problem.dst_channels)):
        each = channels // problem.groups
        if each < LEAST_CHANNELS:
            text = f"winograd takes at least {LEAST_CHANNELS} {name} channels of a group; there are {each}"
            found.append(Refusal(f"{name}_channels", text))
    return tuple(found)


def winograd_macs(problem: ConvProblem) -> int:
    """Count the multiply-adds: 16 for each 2x2 tile and pair of channels, where direct sums have 36."""
    dims = problem.dims
    return 16 * _tiles(problem) * dims.kernel[0] * dims.groups * dims.wide_channels * dims.narrow_channels


def exact_factor(problem: ConvProblem) -> int:
    """Return the factor F: integers up to S and G in magnitude are summed exactly if F S G is at most 2**24.

    Transformed gradients have up to 4 S and 4 G, and are summed over all tiles. In forward operations a product has up
    to 4 S times 9/4 G, in quarters, and is summed over the src channels of all taps in the first axis.
    """
    dims = problem.dims
    return 36 * dims.src_channels * dims.kernel[0] if problem.forward else 16 * _tiles(problem)


def plane_tiles(plane: Iterable[int]) -> int:
    """Count the 2x2 tiles of a plane of so many lines and columns."""
    return prod(ceil(size / 2) for size in plane)


def plane_products(plane: Iterable[int]) -> int:
    """Count the products of these tiles: the last one of an odd line or column has three along it, not four."""
    return prod(4 * ceil(size / 2) - size % 2 for size in plane)


def _tiles(problem: ConvProblem) -> int:
    """Count the 2x2 tiles of dst, or those of the narrow tensor that one sum has at the most."""
    dims = problem.dims
    depths, *plane = dims.dst if problem.forward else dims.narrow
    return dims.n * depths * plane_tiles(plane)


class WinogradKernel(ABC):
    """One of the two kernels."""

    of: tuple[str, ...]
    """What it computes (`ConvProblem.op`)."""

    def refuse(self, problem: ConvProblem) -> str | None:
        """Take what the caller has chosen it for, if the rules allow it, or what it is faster for."""
        if problem.op not in self.of:
            return f"computes {' and '.join(self.of)} only"
        if problem.algorithm == "direct":
            return "algorithm is direct"
        if broken := refusals(problem):
            return "; ".join(map(str, broken))
        return self._slower(problem) if problem.algorithm == "auto" else None

    def _slower(self, problem: ConvProblem) -> str | None:
        """Return why direct sums are chosen; None where Winograd is faster."""
        if problem.dtype == "bf16" and target().dots:
            return "algorithm is auto; this processor multiplies bf16 at least about as fast as winograd"
        cycles, direct = self.cycles(problem)
        share = cycles / max(1.0, direct)
        if share < COSTS.winograd_share:
            return None
        return (
            f"algorithm is auto; winograd pays below {COSTS.winograd_share:.0%} of direct sums' cycles, and is"
            f" estimated at {share:.0%}"
        )

    @abstractmethod
    def cycles(self, problem: ConvProblem) -> tuple[float, float]:
        """Estimate the cycles of Winograd and of direct sums."""
