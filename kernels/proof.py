"""Small exact problems that every compiled function must get right on this processor before it computes a call.

Integers are so small that every sum is exact: all paths must agree with NumPy in float64 in every bit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice, product
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.dtypes import DTYPES
from kernels.emit.brgemm import FLUSH, FLUSH_FIRST, MICRO, SKIPS, Batch, Element, micro_entries, micro_table
from kernels.emit.brgemm import ROWS as MICRO_ROWS
from kernels.emit.depthwise import (
    DTYPES_IN_PLACE,
    GROUP_LINES,
    GROUP_PIXELS,
    KEPT_LINES,
    KERNEL_LINE,
    LINES,
    PIXELS,
    TAPS,
    KernelLine,
    depthwise_entry,
    tile_sizes,
)
from kernels.emit.dots import BEGIN, BLOCKS, DOWN, END, STAGED, TILE, dot_table
from kernels.plan import Storage, box
from kernels.problem import ConvProblem
from kernels.reference import REFERENCE, bias_of, narrow, single, sums_of, widen
from kernels.registry import compute
from kernels.target import target

__all__ = ["prove"]

Sums = npt.NDArray[np.float64]

_BATCH = ctypes.CFUNCTYPE(None, ctypes.c_int64)

POSITIONS = 5
"""Pixels of a line that a tile of a depthwise gradient sums."""

STORED = [name for name in DTYPES if name != "f64"]
"""What all kernels take."""

PROBLEMS = 60
"""Random problems of each operation, some hundred microseconds each."""


def prove(part: int = 0, parts: int = 1) -> Iterator[str]:
    """Run each micro-kernel, then problems of every operation; yield the name of each before it runs.

    With several `parts` this one runs every `parts`-th of them. Raises ArithmeticError for the first wrong result.
    """
    for name, is_right in islice(_trials(np.random.default_rng(5)), part, None, parts):
        yield name
        if not is_right():
            raise ArithmeticError(f"{name} is wrong")


def _trials(rng: np.random.Generator) -> Iterator[tuple[str, Callable[[], bool]]]:
    """Name what is tried, with what tries it."""
    for dtype, rows in product(DTYPES_IN_PLACE, range(1, 1 + TAPS + KEPT_LINES)):
        address = depthwise_entry("taps", dtype)
        yield f"depthwise gradient in {dtype}, tile {rows}", partial(_try_taps, dtype, rows, address, rng)
    for name, vectors in micro_entries():
        address = int(micro_table()[MICRO[name] + vectors - 1])
        for rows in range(1, MICRO_ROWS[name][vectors] + 1):
            yield f"micro-kernel {name}, {rows} x {vectors}", partial(_try_batch, name, vectors, rows, address, rng)
    for across, down in enumerate(DOWN if STAGED else (), 1):
        for tiles in range(1, down + 1):
            yield f"tile products, {tiles} x {across}", partial(_try_tiles, tiles, across, rng)
    entries = [("pixels", dtype, 1, LINES, PIXELS) for dtype in DTYPES_IN_PLACE]
    for name, limits in GROUP_PIXELS.items():
        entries.append(("groups", name, target().lanes // (1 if name == "one_dots" else 2), GROUP_LINES, limits))
    for kind, dtype, channels, of_strides, limits in entries:
        for stride, rows in product(of_strides, tile_sizes(limits)):
            for taps in of_strides[stride]:
                name = f"line of {taps} taps in {dtype}, stride {stride}, for {rows} {kind}"
                entry = kind, dtype
                yield name, partial(_try_line, entry, channels, (taps, stride), rows, rng)
    for number, problem in enumerate(_problems(np.random.default_rng(5))):  # the same in every part
        yield f"problem {number}, {problem}", partial(_try_problem, number, problem, rng)


def _try_problem(number: int, problem: ConvProblem, rng: np.random.Generator) -> bool:
    """Compute a problem, with the reference too, and compare with NumPy."""
    inputs = [_integers(rng, shape, problem.dtype) for shape in problem.input_shapes]
    turn = number // len(STORED)  # dtypes take turns, and each meets all that follows
    if turn % 4 == 3 and problem.algorithm == "direct":  # Inf and NaN take other paths
        inputs[0].view(f"u{inputs[0].itemsize}").reshape(-1)[:1] = DTYPES[problem.dtype].infinity
    expected = single(_in_numpy(problem, inputs), problem.dtype)
    results = compute(problem, *inputs, workers=1 + turn % 3), compute(problem, *inputs, reference=True)
    return all(np.array_equal(single(each, problem.dtype), expected, equal_nan=True) for each in results)


def _in_numpy(problem: ConvProblem, inputs: Sequence[Storage]) -> Storage:
    """Compute a problem without anything that is compiled here; sums of integers are the same in any order."""

    def multiply_add(sums: Sums, rows: Sums, columns: Sums) -> None:
        sums[0] += rows @ columns.transpose(0, 2, 1)

    output = np.empty(problem.output_shape, problem.output_dtype)
    for unit in REFERENCE.units(problem, 1)[0]:
        with np.errstate(invalid="ignore"):
            found = sums_of(problem, unit, inputs, _never, multiply_add=multiply_add)
            assert found is not None
            if problem.bias:
                found += bias_of(problem, widen(inputs[-1], problem.dtype))
        box(output, unit)[...] = narrow(found[0], problem.dtype)
    return output


def _never() -> bool:
    return False


def _integers(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Storage:
    """Draw integers that are exact in every dtype, and so are their sums of a few hundred products in f32."""
    return narrow(rng.integers(-3, 4, shape).astype(np.float64), dtype)


def _call_batch(address: int, elements: npt.NDArray[np.void], **values: int) -> None:
    """Call a micro-kernel with a `Batch` of elements."""
    batch = np.zeros(1, Batch.dtype)
    for name, value in {"elements": elements.ctypes.data, "count": len(elements), **values}.items():
        batch[name] = value
    _BATCH(address)(batch.ctypes.data)


def _try_batch(kind: str, vectors: int, rows: int, address: int, rng: np.random.Generator) -> bool:
    """Sum two elements, for each rows that an element may leave out (see `kernels.emit.brgemm`)."""
    lanes = vectors * target().lanes
    steps = 3
    pair, parts = (2, np.uint16) if kind in ("dots", "pairs") else (1, np.float32)
    wide = lanes if kind == "lanes" else pair
    a, b = (
        rng.integers(-3, 4, shape).astype(np.float32)
        for shape in ((2, rows, steps, wide), (2, vectors, steps, lanes // vectors, pair))
    )
    stored = [each if pair == 1 else (each.view(np.uint32) >> 16).astype(parts) for each in (a, b)]
    start, sums, totals = (
        rng.integers(-9, 10, lanes).astype(np.float32),
        np.zeros((rows, lanes), np.float32),
        np.zeros((rows, lanes), np.float32),
    )
    if kind == "lanes":
        products = (a * b[:, 0, :, :, 0][:, None]).sum(2)
    else:
        products = np.einsum("emkp,evklp->emvl", a.reshape(2, rows, steps, pair), b).reshape(2, rows, lanes)
    for case in range(1 + 2 * min(SKIPS, rows - 1)):
        left = slice(case // 2 + 1, rows) if case % 2 else slice(0, rows - case // 2)
        for flush in (0, FLUSH_FIRST):
            elements = np.zeros(2, Element.dtype)
            for number, element in enumerate(elements):
                element["a"], element["b"] = number * stored[0].strides[0], number * stored[1].strides[0]
                element["steps"], element["case"], element["flush"] = steps, case * number, flush * (1 - number)
            _call_batch(
                address, elements, rows=rows, a=stored[0].ctypes.data, a_row=stored[0].strides[1],
                b=stored[1].ctypes.data, b_vector=stored[1].strides[1], b_step=stored[1].strides[2],
                a_step=stored[0].strides[2], c=sums.ctypes.data, c_row=sums.strides[0],
                next=sums.ctypes.data, start=start.ctypes.data, totals=totals.ctypes.data if flush else 0,
                totals_row=totals.strides[0], apart=int(flush > 0), valid=target().lanes, vectors=1,
            )  # fmt: skip
            expected = start + products[0]
            expected[left] += products[1][left]
            if not np.array_equal(sums, expected):
                return False
    return True


def _try_tiles(down: int, across: int, rng: np.random.Generator) -> bool:
    """Sum two elements of three steps on tile registers, to a line and to the sums of that."""
    rows, lanes, table, nothing = TILE * down, TILE * across, dot_table(), ctypes.CFUNCTYPE(None)
    whole = [
        rng.integers(-3, 4, shape).astype(np.float32) for shape in ((2, 3, rows, 16, 2), (across, 2, 3, 16, TILE, 2))
    ]
    products = np.einsum("ekmpi,vekpli->mvl", *whole).reshape(rows, lanes)
    a, b = ((each.view(np.uint32) >> 16).astype(np.uint16) for each in whole)
    start, sums = rng.integers(-9, 10, lanes).astype(np.float32), np.zeros((rows, lanes), np.float32)
    elements = np.zeros(2, Element.dtype)
    elements["a"][1], elements["b"][1], elements["steps"] = a.strides[0], b.strides[1], 3
    nothing(int(table[BEGIN]))()
    for first, row in ((start, 0), (sums, sums.strides[0])):
        _call_batch(
            int(table[BLOCKS + across - 1]), elements, rows=rows - 5, a=a.ctypes.data, a_row=a.strides[2],
            a_step=a.strides[1], b=b.ctypes.data, b_vector=b.strides[0], b_step=b.strides[2], c=sums.ctypes.data,
            c_row=sums.strides[0], start=first.ctypes.data, start_row=row,
        )  # fmt: skip
    nothing(int(table[END]))()
    return np.array_equal(sums, start + 2 * products)


def _try_line(
    entry: tuple[str, str], channels: int, sizes: tuple[int, int], rows: int, rng: np.random.Generator
) -> bool:
    """Sum two lines of taps for two vectors of groups, with each number of columns outside."""
    (kind, name), (taps, stride), one = entry, sizes, np.zeros(1, KernelLine.dtype)
    pair, dtype = (1, name) if name in DTYPES else (2, "bf16")
    columns, lanes, steps = (rows - 1) * stride + taps, 2 * target().lanes, channels // pair or 1
    one["taps"], one["stride"], one["steps"] = taps, stride, steps
    src, start = _integers(rng, (2, columns, lanes), dtype), _integers(rng, (lanes,), "f32")
    weights = _integers(rng, (2, taps, steps, lanes, pair), "f32" if pair == 1 else dtype)
    sums = np.zeros((rows, lanes), src.dtype if kind == "pixels" else np.float32)
    lane, step = np.arange(lanes)[:, None], np.arange(steps)[:, None, None]
    met = lane // channels * channels + pair * step + np.arange(pair)
    for low, high in {(0, columns), (taps // 2, columns), (0, columns - taps // 2)}:
        left = range(low, high)
        elements = np.zeros(2, Element.dtype)
        elements["a"], elements["b"] = np.arange(2) * src.strides[0], np.arange(2) * weights.strides[0]
        elements["case"][1], elements["steps"], elements["flush"][0] = low, (columns, len(left)), FLUSH
        _call_batch(
            depthwise_entry(*entry), elements, rows=rows, a=src.ctypes.data, a_row=src.strides[1],
            b=weights.ctypes.data, c=sums.ctypes.data, c_row=sums.strides[0], start=start.ctypes.data, vectors=2,
            last=4 * target().lanes, b_vector=weights.strides[1], b_step=weights.strides[2],
            indirection=one.ctypes.data,
        )  # fmt: skip
        expected = np.tile(start, (rows, 1))
        for line, row, tap in np.ndindex(2, rows, taps):
            if line == 0 or row * stride + tap in left:
                values = single(src[line, row * stride + tap], dtype)[met]
                expected[row] += (single(weights[line, tap], "f32" if pair == 1 else dtype) * values).sum((0, 2))
        if not np.array_equal(single(sums, dtype if kind == "pixels" else "f32"), expected):
            return False
    return True


def _try_taps(dtype: str, rows: int, address: int, rng: np.random.Generator) -> bool:
    """Sum a few taps over a line of positions, for three vectors of adjacent groups (see `kernels.emit.depthwise`)."""
    taps = KERNEL_LINE * (rows - TAPS) if rows > TAPS else rows
    lanes, lines = 3 * target().lanes, -(-taps // KERNEL_LINE)
    narrow = _integers(rng, (POSITIONS, lanes), dtype)
    wide = _integers(rng, (lines, POSITIONS + KERNEL_LINE, lanes), dtype)
    sums = np.zeros((taps, lanes), np.float32)
    places = np.array([divmod(tap, KERNEL_LINE) for tap in range(taps)])
    expected = np.array(
        [(single(narrow, dtype) * single(wide, dtype)[h, w : w + POSITIONS]).sum(0) for h, w in places], np.float32
    )
    offsets = np.concatenate([places @ np.array(wide.strides[:2]), np.arange(taps) * sums.strides[0]]).astype(np.int64)
    elements = np.zeros(2, Element.dtype)
    elements["steps"], elements["flush"] = (2, POSITIONS - 2), (FLUSH, 0)
    elements["a"][1] = elements["b"][1] = 2 * narrow.strides[0]
    _call_batch(
        address, elements, rows=rows, a=wide.ctypes.data, a_step=wide.strides[1], b=narrow.ctypes.data,
        b_step=narrow.strides[0], c=sums.ctypes.data, c_row=4 * target().lanes, vectors=3,
        indirection=offsets.ctypes.data,
    )  # fmt: skip
    return np.array_equal(sums, expected)


def _problems(rng: np.random.Generator) -> Iterator[ConvProblem]:
    """Draw problems that together use every compiled function: few and many channels, groups, strides, layouts."""

    def pick(*options: Any) -> Any:
        return options[int(rng.integers(len(options)))]

    def problem(op: Any, dtype: Any, channels: tuple[int, int], groups: int, rank: int, many: bool) -> ConvProblem:
        kernel = tuple(pick(1, 2, 3) for _ in range(rank))
        strides, dilations = (tuple(pick(1, 1, 2) for _ in range(rank)) for _ in range(2))
        pads = tuple(int(rng.integers(k)) for k in kernel)
        narrow = tuple(pick(7, 8, 11) if many else pick(1, 3, 5) for _ in range(rank))
        wide = tuple(
            max(1, (x - 1) * s + (k - 1) * d + 1 - 2 * p)
            for x, s, k, d, p in zip(narrow, strides, kernel, dilations, pads, strict=True)
        )
        src, dst = (narrow, wide) if op.startswith("ConvT") else (wide, narrow)
        return ConvProblem(
            op=op, dtype=dtype, n=pick(1, 2, 3), src_channels=channels[0] * groups, dst_channels=channels[1] * groups,
            groups=groups, src_spatial=src, dst_spatial=dst, kernel=kernel, strides=strides, dilations=dilations,
            pads_begin=pads, data_format=pick("NCX", "NXC"), weights_format=pick("XIO", "OIX", "IOX", "XOI"),
            groups_axis=pick("I", "O"), bias=op in ("ConvTranspose", "Convolution") and pick(False, True),
        )  # fmt: skip

    few, some, large = (1, 2, 3, 5), (7, 8, 16, 17), (32, 40, 48)
    for op in ("BiasAdd", "BiasAddBackward"):
        for number in range(PROBLEMS):
            named: dict[str, Any] = {"op": op, "dtype": STORED[number % len(STORED)]}
            spatial = tuple(pick(1, 3, 8, 40) for _ in range(int(rng.integers(4))))
            n, channels, layout = pick(1, 2, 5), pick(1, 3, 17, 64), pick("NCX", "NXC")
            yield ConvProblem.of_bias(**named, n=n, channels=channels, spatial=spatial, data_format=layout)
    ops = "ConvolutionBackwardWeights", "ConvTransposeBackwardWeights", "ConvTranspose", "Convolution"
    for op in ops:
        for number in range(PROBLEMS):
            dtype: Any = STORED[number % len(STORED)]
            kind = number // len(STORED) % 5
            if kind == 0:
                channels, groups = (pick(*few), pick(*few)), pick(1, 2, 3)
            elif kind == 1:  # depthwise
                channels, groups = (1, pick(1, 2)), pick(target().lanes, 2 * target().lanes, 20)
            elif kind == 2:  # vectors of several groups
                channels, groups = pick((2, 2), (4, 4), (8, 8)), pick(5, 21)
            else:
                channels, groups = (pick(*some, *large), pick(*some, *large)), pick(1, 1, 2)
            made = problem(op, dtype, channels, groups, pick(1, 2, 2, 3), many=kind < 3)
            yield made if made.macs < 1 << 22 else problem(op, dtype, channels, groups, 1, many=False)
    yield from _for_dots(ops)
    yield from _for_winograd(ops)


def _for_dots(ops: tuple[Any, ...]) -> Iterator[ConvProblem]:
    """Return problems of many channels and pixels, which products of bf16 compute where there are any."""
    channels = (16, 16), (32, 48), (48, 32), (64, 24), (80, 16)
    for number, (op, of) in enumerate(product(ops, channels) if target().dots else ()):
        yield _same(op, "bf16", of, (5, 72), data_format=("NCX", "NXC")[number % 2])


def _for_winograd(ops: tuple[Any, ...]) -> Iterator[ConvProblem]:
    """Return problems that Winograd computes: one vector of channels or more of either tensor, odd and even sizes."""
    for number, (op, of, dtype) in enumerate(product(ops, ((16, 16), (17, 40), (40, 17), (96, 32)), ("f32", "f16"))):
        size = ((5, 8), (7, 9))[number // 2 % 2]
        yield _same(op, dtype, of, size, data_format=("NCX", "NXC")[number // 4 % 2], algorithm="winograd")


def _same(op: Any, dtype: Any, channels: tuple[int, int], size: tuple[int, int], **more: Any) -> ConvProblem:
    """Return a problem of 3x3 kernels whose tensors have one size."""
    return ConvProblem(
        op=op, dtype=dtype, n=2, src_channels=channels[0], dst_channels=channels[1], groups=1, src_spatial=size,
        dst_spatial=size, kernel=(3, 3), strides=(1, 1), dilations=(1, 1), pads_begin=(1, 1), weights_format="OIX",
        **more,
    )  # fmt: skip
