"""Run kernels on tensors that end, or begin, next to inaccessible memory: ``python -m ... SEED COUNT``.

A single byte read or written out of bounds crashes the process. `test_memory.py` runs this in a separate process,
whose last line of output names the case that crashed.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels import arena, plan, run_unit, storage_dtype
from tests import naive
from tests.kernels.harness import Tensor, assert_same_bits, problem_of, stored
from tests.kernels.poison import poisoned
from tests.problems import Case, random_case
from tests.traps import TRAPS

_mprotect = ctypes.CDLL(None, use_errno=True).mprotect


def fenced(shape: tuple[int, ...], dtype: npt.DTypeLike, *, at_end: bool) -> Tensor:
    """Return a tensor whose last byte (`at_end`) or first byte touches an inaccessible page."""
    count = int(np.prod(shape, dtype=np.int64))
    nbytes = count * np.dtype(dtype).itemsize
    page = mmap.PAGESIZE
    inner = max(1, -(-nbytes // page)) * page
    memory = mmap.mmap(-1, inner + 2 * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for fence in (start, start + page + inner):
        if _mprotect(ctypes.c_void_p(fence), ctypes.c_size_t(page), 0):
            raise OSError(ctypes.get_errno(), "mprotect")
    offset = page + (inner - nbytes if at_end else 0)
    tensor: Tensor = np.frombuffer(memory, dtype, count, offset).reshape(shape)
    return tensor


def fenced_arena(name: str, floats: int) -> tuple[Tensor, int]:
    """Return scratch memory as `kernels.arena` does, whose last cache line touches an inaccessible page."""
    array = fenced((-(-(floats + 16) // 16) * 16,), np.float32, at_end=True)
    arena._local.held[name] = array, array.ctypes.data
    return arena._local.held[name]


def run(case: Case, *, at_end: bool, workers: int) -> None:
    """Compute a case between guard pages and compare it with the oracle."""
    inputs = case.inputs()
    problem = problem_of(case)
    chosen = plan(problem, workers=workers)
    arrays = []
    for tensor in map(stored, inputs.values()):
        copy = fenced(tensor.shape, tensor.dtype, at_end=at_end)
        copy[...] = tensor
        arrays.append(copy)
    output = fenced(problem.output_shape, storage_dtype(case.dtype), at_end=at_end)
    scratch: Any = fenced((chosen.scratch_bytes,), np.uint8, at_end=at_end) if chosen.scratch_bytes else None
    for memory in (output, scratch):
        if memory is not None:
            memory.view(np.uint8)[...] = 0xFF
    for unit in chosen.units:
        assert run_unit(chosen, unit, arrays, output, scratch)
    assert_same_bits(output.view(naive.DTYPES[case.dtype]), case.expected(inputs), case)


ONE_PIXEL = [  # which is of both data formats at once, and dst is not
    Case(
        op="Convolution", groups=groups, src_channels=channels, dst_channels=channels, src_spatial=(1, 1),
        dst_spatial=(2, 2), kernel=(2, 2), pads_begin=(1, 1), pads_end=(1, 1),
    )
    for groups, channels in ((17, 17), (5, 20))
]  # fmt: skip
"""More lanes than a vector has, and not whole vectors."""

FAR_PHASES = Case(
    op="ConvolutionBackwardData", n=3, src_channels=8, dst_channels=16, groups=8, src_spatial=(9, 9),
    dst_spatial=(6, 14), kernel=(1, 3), strides=(2, 2), dilations=(3, 17), pads_begin=(0, 35), pads_end=(2, 17),
    data_format="NCX", weights_format="XOI", groups_axis="I",
)  # fmt: skip
"""Dst positions side by side whose taps are far from each other in src."""


def main(seed: int, count: int) -> None:
    """Run `ONE_PIXEL`, `FAR_PHASES`, the smaller traps and `count` random cases, at both ends."""
    rng = np.random.default_rng(seed)
    arena._hold = fenced_arena
    cases = [*ONE_PIXEL, FAR_PHASES, *(trap for trap in TRAPS if trap.macs < 200_000)]
    cases += [random_case(rng, macs=20_000) for _ in range(count)]
    for case in cases:
        for at_end in (True, False):
            print(f"at_end={at_end} {case}", flush=True)
            with poisoned():
                run(case, at_end=at_end, workers=int(rng.integers(1, 4)))
    print("done", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
