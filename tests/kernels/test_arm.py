"""The code for 64-bit Arm, checked in its instructions, which can be generated on any processor."""

from __future__ import annotations

import re

import llvmlite.binding as llvm
import pytest
from llvmlite import ir

from kernels.emit import simd
from kernels.emit.brgemm import Batch
from kernels.emit.depthwise import TAPS, Tile
from kernels.target import KNOWN, Target

TRIPLE = "aarch64-linux-gnu"


@pytest.fixture(name="arm")
def _arm(monkeypatch: pytest.MonkeyPatch) -> Target:
    """An Arm processor as the target of emitted vectors."""
    described = next(known for known in KNOWN if known.name == "neoverse-n1")
    monkeypatch.setattr(simd, "target", lambda: described)
    return described


def _hot_loop(rows: int, lanes: int, dtype: str) -> list[str]:
    """Return the instructions of the loop with the most multiply-adds in a tile of taps."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    module = ir.Module()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [simd.I64]), "tile")
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    Tile(builder, simd.fields(builder, function.args[0], Batch), dtype, lanes).taps(rows, 0)
    builder.ret_void()
    machine = llvm.Target.from_triple(TRIPLE).create_target_machine(cpu="neoverse-n1", opt=3)
    parsed = llvm.parse_assembly(str(module))
    parsed.triple, parsed.data_layout = TRIPLE, str(machine.target_data)
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    passes.getModulePassManager().run(parsed, passes)
    # a block ends at a label or a branch
    blocks = re.split(r"^\.LBB\w+:.*$|^\tc?b[.nz].*$", machine.emit_assembly(parsed), flags=re.MULTILINE)
    hottest = max(blocks, key=lambda block: block.count("\tfmla\t"))
    return [line.strip() for line in hottest.splitlines() if line.startswith("\t")]


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_direct_tiles_fill_the_registers(arm: Target, dtype: str) -> None:
    """Nine taps that are read in place spill nothing, and f16 is converted by its own instruction."""
    code = _hot_loop(TAPS, arm.lanes, dtype)
    assert not [line for line in code if "[sp" in line]
    assert any(line.startswith("fcvtl") for line in code) == (dtype == "f16")
