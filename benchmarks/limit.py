"""The processor's limit: f32 multiply-adds per second when it does nothing else."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.emit.compiler import jit
from kernels.speed import TileLoop
from kernels.target import target

__all__ = ["measure_limit"]

CHAINS = 12
"""Independent sums: more than latency times throughput anywhere (4 or 5 cycles, 2 per cycle), within 16 registers."""

_I64 = ir.IntType(64)


def _emit(typingctx: Any, count: Any, address: Any) -> Any:  # noqa: ARG001 -- Numba fixes the parameters
    """Do `count` rounds of `CHAINS` independent vector multiply-adds on the two vectors at `address`."""

    insert: Any = cgutils.get_or_insert_function

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:  # noqa: ARG001
        count, address = values
        lane = ir.VectorType(ir.FloatType(), target().lanes)
        kind = ir.FunctionType(lane, [lane] * 3)
        fma = insert(builder.module, kind, f"llvm.fma.v{lane.count}f32")
        pointer = builder.inttoptr(address, lane.as_pointer())
        a, b = (builder.load(builder.gep(pointer, [_I64(i)]), align=4) for i in range(2))
        before, block = builder.block, builder.append_basic_block("round")
        after = builder.append_basic_block("done")
        builder.branch(block)
        builder.position_at_end(block)
        index = builder.phi(_I64)
        sums = [builder.phi(lane) for _ in range(CHAINS)]
        results = [builder.call(fma, [a, b, each]) for each in sums]
        following = builder.add(index, _I64(1))
        index.add_incoming(_I64(0), before)
        index.add_incoming(following, block)
        for start, (phi, result) in enumerate(zip(sums, results, strict=True)):
            # each starts from a different value: equal sums would be computed only once
            phi.add_incoming(ir.Constant(lane, [float(start)] * target().lanes), before)
            phi.add_incoming(result, block)
        builder.cbranch(builder.icmp_signed("<", following, count), block, after)
        builder.position_at_end(after)
        total = results[0]
        for result in results[1:]:
            total = builder.fadd(total, result)
        builder.store(total, builder.gep(pointer, [_I64(2)]), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


_intrinsic: Any = intrinsic
_multiply_add = _intrinsic(_emit)


@jit
def registers(count: int, address: int) -> None:
    _multiply_add(count, address)


class _Registers:
    """Independent multiply-adds, operands in registers."""

    def __init__(self) -> None:
        self._memory = np.full(3 * target().lanes, 1e-9, np.float32)
        self.flops = 2 * CHAINS * target().lanes

    def __call__(self, count: int) -> None:
        registers(count, self._memory.ctypes.data)


def _rate(make: type[_Registers] | type[TileLoop], threads: int, seconds: float, rounds: int) -> float:
    """Return the best GFLOP/s of `threads` threads together over some rounds of about `seconds`."""
    work = make()
    work(1 << 10)
    begin = time.perf_counter()
    work(1 << 16)
    count = max(1 << 10, int(seconds * (1 << 16) / (time.perf_counter() - begin)) >> 10 << 10)
    barrier = threading.Barrier(threads)

    def once(_: int) -> float:
        own = make()
        barrier.wait()
        begin = time.thread_time()  # not wall time: the limit is no lower when others use the processor too
        own(count)
        return own.flops * count / (time.thread_time() - begin)

    with ThreadPoolExecutor(threads) as pool:
        return max(sum(pool.map(once, range(threads))) for _ in range(rounds)) / 1e9


def measure_limit(threads: int, seconds: float = 0.01, rounds: int = 50) -> dict[str, float]:
    """Return the limit of `threads` threads at once, in GFLOP/s of f32.

    `registers`: independent multiply-adds; `tile`: the kernels' tile from L1; `gflops`: the larger one, which is
    the limit. Each is the best of `rounds`, since other load can only lower it.
    """
    found = {
        "registers": _rate(_Registers, threads, seconds, rounds),
        "tile": _rate(TileLoop, threads, seconds, rounds),
    }
    return found | {"gflops": max(found.values())}
