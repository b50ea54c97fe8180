"""Addresses are integers up to the instruction that uses them, even in code that is optimised a second time."""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
import numpy as np
import pytest
from llvmlite import ir

from kernels.dtypes import KINDS
from kernels.emit import simd
from kernels.emit.intrinsics import F32
from kernels.forward.output import KEPT_BYTES, fill, write
from kernels.pack.panels import Values
from tests.naive import round_to

TARGETS = {"aarch64-linux-gnu": "neoverse-n1", "x86_64-linux-gnu": "haswell"}


def _line_copied() -> str:
    """Return a function that copies a value, addressed as in the kernels, `count` times to where it is needed."""
    module = ir.Module()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [simd.I64] * 4), "copy")
    done, line, to, count = function.args
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    source = builder.add(builder.shl(done, simd.I64(2)), line)

    def body(carried: list[Any]) -> list[Any]:
        simd.store(builder, simd.load(builder, source, simd.F32), carried[0])
        return [builder.add(carried[0], simd.I64(4))]

    simd.loop(builder, count, [to], body, "copy")
    builder.ret_void()
    return str(module)


@pytest.mark.parametrize("triple", TARGETS)
def test_code_generation_keeps_sums_whole(triple: str) -> None:
    """Code generation turns no summand of an address into a pointer: it may be zero, and indexing null is undefined.

    Numba passes code to callers in that state, and optimising it again removed the copies on 64-bit Arm.
    """
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu=TARGETS[triple], opt=3)
    module = llvm.parse_assembly(_line_copied())
    module.triple, module.data_layout = triple, str(machine.target_data)
    machine.emit_object(module)
    assert "inttoptr" in str(module)
    assert "getelementptr" not in str(module)


@pytest.mark.parametrize("lanes", [8, 16, 24])
def test_lines_of_bias_are_written(lanes: int) -> None:
    """The first two positions of each line get the bias, of one, two or three vectors."""
    bias, sums = np.arange(1, lanes + 1, dtype=np.float32), np.zeros((2, 3, lanes), np.float32)
    counts, steps = np.array([1, 1, 2, 2]), np.array([0, 0, *sums.strides[:2]])
    fill(F32, bias.ctypes.data, lanes, counts, sums.ctypes.data, steps)
    assert (sums[:, :2] == bias).all()
    assert not sums[:, 2].any()


@pytest.mark.parametrize("offset", [0, 4, 60])
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_planes_are_written_wherever_lines_of_memory_begin(dtype: str, offset: int) -> None:
    """Channels are written as planes, whether far from the end of the tensor or not, and nothing between them."""
    rng, buffer = np.random.default_rng(5), np.empty(64, np.float32)
    for run, lanes, valid in ((9, 16, 9), (70, 32, 24), (201, 16, 16), (256, 8, 8)):
        sums = rng.standard_normal((run, lanes)).astype(np.float32)
        expected = np.ascontiguousarray(round_to(dtype, sums[:, :valid].T.copy()))
        size = expected.itemsize
        counts, steps = np.array([1, 1, 1, run]), np.array([0, 0, 0, size])
        for plane, far in ((run * size, False), (run * size, True), (run * size // 64 * 64 + 64, True)):
            raw = np.full(valid * plane + 128, 0xA5, np.uint8)
            begin = -raw.ctypes.data % 64 + offset
            place = raw.ctypes.data + begin
            dst = Values(KINDS[dtype], place, steps, plane, place + 2 * KEPT_BYTES if far else 0)
            write(dst, sums.ctypes.data, lanes, valid, counts, buffer.ctypes.data)
            written = raw[begin : begin + valid * plane].reshape(valid, plane)
            assert (written[:, : run * size] == expected.view(np.uint8).reshape(valid, -1)).all()
            written[:, : run * size] = 0xA5
            assert (raw == 0xA5).all()
