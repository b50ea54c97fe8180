"""Problems that are split among workers by channels, slabs and chunks, and whether their bits depend on that.

    python -m tests.kernels.workers COUNT

prints, for each dtype, how many of COUNT random gradients (and a fifth as many forward operations) were split in which
way, and how many differ between 1, 2, 3 and 7 workers. `CONVGRAD_CPU_IMITATE` chooses the path.

Units, slabs and chunks are made so small that problems of a few million multiply-adds are split like large ones.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kernels import plan
from kernels.cache import CACHE
from kernels.registry import by_name
from kernels.target import target
from tests.kernels.harness import Tensor, compute, problem_of
from tests.kernels.sizes import resize
from tests.naive import round_to
from tests.problems import FORMATS, Case

WORKERS = (1, 2, 3, 7)

MOST_MACS = 8_000_000
"""The approximate maximum for a case."""

Constants = Mapping[str, Mapping[str, Any]]

SMALL = {
    "unit_macs": 30_000, "slab_bytes": 16 << 10, "most_slab_bytes": 48 << 10,
    "lane_slab_bytes": 16 << 10, "least_slab_macs": 100_000, "block_positions": 128, "chunk_macs": 50_000,
    "chunk_positions": 64, "cached_chunk_positions": 64, "dot_slab_bytes": 16 << 10,
}  # fmt: skip
DOTS: Constants = {"kernels.gradient.dots.unit": {"LEAST_USE": 0.0}}
FORWARD: Constants = {"kernels.forward.amx": {"MOST_CYCLES": np.inf, "SPEED": 1}}


@contextmanager
def small_units(*, by_channels: bool = False) -> Iterator[None]:
    """Make units, slabs and chunks small; split gradients `by_channels`, or by pixels where they are small.

    With `by_channels` forward operations are split in the first order of axes, channels before lines, though workers
    wait.
    """
    every = [DOTS] if target().dots else []
    every += [FORWARD] if target().dots == "amx" else []
    with pytest.MonkeyPatch.context() as patch:
        resize(patch, **SMALL, shared_sums_bytes=1 if by_channels else 1 << 20)
        if by_channels:
            patch.setattr("kernels.forward.tiles.WAITING", np.inf)
        for module, constants in (item for each in every for item in each.items()):
            for name, value in constants.items():
                patch.setattr(f"{module}.{name}", value)
        CACHE.clear()
        yield
    CACHE.clear()


def large_case(rng: np.random.Generator, dtype: str, *, forward: bool = False) -> Case:
    """Draw a problem of a few million multiply-adds: all kinds of groups, layouts, strides and numbers of images."""

    def pick(*options: Any) -> Any:
        return options[int(rng.integers(len(options)))]

    many = pick(False, False, True)  # images of small maps
    rank = pick(1, 2, 2, 2, 3)
    sizes = [int(rng.integers(*((4, 9) if many else (200, 900) if rank == 1 else (9, 33) if rank == 2 else (5, 12))))
             for _ in range(rank)]  # fmt: skip
    kernel = tuple(pick(1, 2, 3, 3, 5) if rank < 3 else pick(1, 2, 3) for _ in range(rank))
    strides, dilations = (tuple(pick(1, 1, 2) for _ in range(rank)) for _ in range(2))
    extents = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    pads = tuple(extent // 2 if size >= extent else extent for size, extent in zip(sizes, extents, strict=True))
    dst = [
        (size + 2 * pad - extent) // stride + 1
        for size, pad, extent, stride in zip(sizes, pads, extents, strides, strict=True)
    ]
    channels = [pick(16, 24, 33, 48, 64, 72, 80, 112) for _ in range(2)]
    kind = pick("plain", "plain", "plain", "grouped", "depthwise")
    groups = {"plain": 1, "grouped": pick(2, 3, 5), "depthwise": pick(16, 24, 48, 80)}[kind]
    if kind == "depthwise":
        channels = [1, pick(1, 1, 2)]
    case = Case(
        dtype=dtype, n=int(rng.integers(17, 50)) if many else int(rng.integers(2, 6)), groups=groups,
        src_channels=channels[0] * groups, dst_channels=channels[1] * groups, src_spatial=tuple(sizes),
        dst_spatial=tuple(dst), kernel=kernel, strides=strides, dilations=dilations, pads_begin=pads, pads_end=pads,
        data_format=pick("NCX", "NXC"), weights_format=pick(*FORMATS), seed=int(rng.integers(1 << 16)),
    )  # fmt: skip
    while case.macs > MOST_MACS and case.n > 2:
        case = replace(case, n=case.n - 1)
    case = case if case.macs <= 2 * MOST_MACS else replace(case, src_channels=groups * max(1, channels[0] // 3))
    if forward:
        case = case if rng.integers(2) else case.mirrored()
        return replace(case, op=case.op.removesuffix("BackwardWeights"), bias=pick(False, True))
    return pick(case, case.mirrored())  # type: ignore[no-any-return]


def rough(case: Case) -> dict[str, Tensor]:
    """Return inputs of mixed magnitudes; two images almost cancel, so that rounding errors show in every result."""
    rng = np.random.default_rng(case.seed)
    reach = 3 if case.dtype == "f16" else 8
    values = {
        name: rng.standard_normal(shape) * np.exp2(rng.integers(-reach, reach + 1, shape))
        for name, shape in case.input_shapes.items()
    }
    if not case.forward:
        first, second = rng.choice(case.n, 2, replace=False)
        values["src"][first] *= 16
        values["src"][second], values["diff_dst"][second] = -values["src"][first], values["diff_dst"][first]
    return {name: round_to(case.dtype, each) for name, each in values.items()}


def cuts(case: Case) -> set[str]:
    """Return how the plans for several workers split a case: by channels, slabs (of a unit), chunks, or dst pixels."""
    problem = problem_of(case)
    found = set()
    for workers in WORKERS[1:]:
        chosen = plan(problem, workers=workers)
        parts = [unit.part for unit in chosen.units if unit.stage == 0]
        if case.forward:
            found |= {"channels"} if len({part[2:6] for part in parts}) > 1 else set()
            found |= {"pixels"} if len({part[:2] + part[6:] for part in parts}) > 1 else set()
            continue
        schedule: Any = by_name(chosen.kernel).schedule(problem)  # type: ignore[attr-defined]
        found |= {"channels"} if len({part[:4] for part in parts}) > 1 else set()
        found |= {"chunks"} if chosen.stages == 2 else set()
        found |= {"slabs"} if len(schedule.slabs) > max(part[5] for part in parts) else set()
    return found


def differs(case: Case) -> bool:
    """Return whether the bits of a case depend on the number of workers."""
    inputs = rough(case)
    return len({compute(case, inputs, workers=workers).tobytes() for workers in WORKERS}) > 1


def survey(
    rng: np.random.Generator, dtype: str, count: int, *, forward: bool = False
) -> tuple[Counter[str], list[Case]]:
    """Count how `count` random cases are split, and which kernels take them; also return those whose bits differ."""
    counted: Counter[str] = Counter()
    wrong = []
    for number in range(count):
        with small_units(by_channels=number % 2 == 1):
            case = large_case(rng, dtype, forward=forward)
            found = cuts(case)
            counted.update(found)
            counted["cut"] += bool(found - {"slabs"})
            counted[plan(problem_of(case)).kernel] += 1
            if differs(case):
                wrong.append(case)
    return counted, wrong


def main(count: int) -> None:
    """Print a line for each dtype and direction."""
    for forward in (False, True):
        for dtype in ("bf16", "f16", "f32"):
            some = count // 5 if forward else count
            counted, wrong = survey(np.random.default_rng([101, forward]), dtype, some, forward=forward)
            what = ", ".join(f"{name} {number}" for name, number in sorted(counted.items()))
            print(f"{dtype} {'forward' if forward else 'gradients'}: {len(wrong)} of {some} differ; {what}")
            for case in wrong[:3]:
                print("   ", case)


if __name__ == "__main__":
    main(int(sys.argv[1]))
