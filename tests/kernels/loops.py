"""Count the instructions of the micro-kernels' inner loops for this process's target; nothing of it is run.

    CONVGRAD_BUILD_FOR=znver4 python -m tests.kernels.loops

Prints a line for each kind and number of vectors: sums, products, those whose factor is folded in, other loads, moves
between registers, and accesses to the stack, in the loop with the most products of the tallest tile.
"""

from __future__ import annotations

import re

import llvmlite.binding as llvm
from llvmlite import ir

from kernels.emit import simd
from kernels.emit.brgemm import ROWS, Batch, _Tile, micro_entries
from kernels.target import target
from tests.kernels.targets import TRIPLES

PRODUCT = re.compile(r"v?(fn?madd\w*ps|mulps|dpbf16ps)|fmla|fmul")
MOVE = re.compile(r"v?mov(aps|ups|apd|dqa\w*|dqu\w*)|mov")


def inner_loop(kind: str, vectors: int) -> list[str]:
    """Return the instructions of the loop with the most products in the tallest tile."""
    module = ir.Module()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [simd.I64]), "tile")
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    batch = simd.fields(builder, function.args[0], Batch)
    _Tile(builder, kind, ROWS[kind][vectors], vectors, batch).emit()
    builder.ret_void()
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    machine = llvm.Target.from_triple(TRIPLES[target().arch]).create_target_machine(
        cpu=target().cpu, features=target().llvm_features(frozenset()), opt=3, codemodel="jitdefault", jit=True
    )
    parsed = llvm.parse_assembly(str(module))
    parsed.triple, parsed.data_layout = TRIPLES[target().arch], str(machine.target_data)
    passes = llvm.create_new_module_pass_manager()
    passes.add_instruction_combine_pass()  # all that emitted code needs (`kernels.emit.compiler`)
    passes.run(parsed, llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options()))
    assembly = machine.emit_assembly(parsed)
    blocks = re.split(r"^\.?LBB\w+:.*$|^\t(?:j\w+|c?b[.nz]\S*|b)\t.*$", assembly, flags=re.MULTILINE)
    hottest = max(blocks, key=lambda block: sum(map(bool, map(PRODUCT.match, _instructions(block)))))
    return _instructions(hottest)


def _instructions(block: str) -> list[str]:
    """Return the instructions of a block, without directives and comments."""
    lines = (line.partition("#")[0].strip() for line in block.splitlines())
    return [line for line in lines if line and line[0] not in ".#/"]


def counts(code: list[str]) -> dict[str, int]:
    """Count instructions by what they do."""
    products = [line for line in code if PRODUCT.match(line)]
    others = [line for line in code if not PRODUCT.match(line)]
    memory = re.compile(r"\(%|\[x")
    stack = [line for line in code if re.search(r"\(%rsp\)|\[sp", line)]
    moves = [line for line in others if MOVE.fullmatch(line.split()[0]) and not memory.search(line)]
    return {
        "products": len(products),
        "folded": sum(bool(memory.search(line)) for line in products),
        "loads": sum(bool(memory.search(line)) for line in others) - len(stack),
        "moves": len(moves),
        "stack": len(stack),
    }


if __name__ == "__main__":
    for each in micro_entries():
        found = counts(inner_loop(*each))
        print(*each, *found.values())
