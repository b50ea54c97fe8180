"""Compile everything, or only the tables, for known targets on any machine; nothing of it is run.

    python -m tests.kernels.targets [--tables] [NAME ...]

Prints a line for each target: entries, seconds, and the entries that can't be compiled. For this architecture they
are compiled as in the service; for another one LLVM gets their code before this machine's passes have run on it.
Code that LLVM can't select crashes the process, so each target's entries are compiled in separate processes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

import llvmlite.binding as llvm

TRIPLES = {"x86_64": "x86_64-unknown-linux-gnu", "aarch64": "aarch64-unknown-linux-gnu"}


def main() -> int:
    """Compile for the named targets, or for all; return 1 if compiling for one fails."""
    from kernels.target import BUILD, KNOWN

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", action="store_true", help="register tiles and products alone")
    parser.add_argument("names", nargs="*", metavar="NAME", help="known targets; without any, all")
    chosen = parser.parse_args()
    if os.environ.get(BUILD):
        return _compile(chosen.tables)
    wrong = 0
    for name in chosen.names or [known.name for known in KNOWN]:
        with tempfile.TemporaryDirectory() as folder:
            environment = {**os.environ, BUILD: name, "NUMBA_CACHE_DIR": folder}
            command = [sys.executable, "-m", "tests.kernels.targets", *(["--tables"] if chosen.tables else [])]
            done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
            print(f"{name:16}{done.stdout.strip() or done.stderr[-2000:]}", flush=True)
            wrong |= done.returncode
    return wrong


def _compile(tables: bool) -> int:
    import kernels.registry  # noqa: F401 -- importing the kernels registers their compiled functions
    from kernels.emit.compiler import ENTRIES
    from kernels.prepare import compile_all
    from kernels.target import host_arch, target

    if target().arch != host_arch():
        _emit_for(target().arch, target().cpu, target().llvm_features(frozenset()))
    if tables:
        ENTRIES[:] = [entry for entry in ENTRIES if entry.function is None]
    started, failures = time.monotonic(), []
    jobs = len(os.sched_getaffinity(0))
    while True:  # each failure ends a pass: continue without that entry
        _, wrong = compile_all(lambda *_: None, jobs)
        if wrong is None:
            break
        failures.append(wrong)
        name = wrong.partition(" ")[0]
        ENTRIES[:] = [entry for entry in ENTRIES if entry.name != name]
        if len(failures) > 2:
            failures.append("...")
            break
    print(f"{len(ENTRIES):4} entries {time.monotonic() - started:6.1f} s", *failures, sep="  ")
    return 1 if failures else 0


def _emit_for(arch: str, cpu: str, features: str) -> None:
    """Make Numba's libraries emit objects for another architecture and load nothing."""
    from numba.core import caching, codegen

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    machine = llvm.Target.from_triple(TRIPLES[arch]).create_target_machine(
        cpu=cpu, features=features, opt=3, codemodel="jitdefault", jit=True
    )
    library: Any = codegen.CPUCodeLibrary
    generator: Any = codegen.JITCPUCodegen
    loaded: Any = codegen.JITCodeLibrary
    kept_code: Any = caching.Cache

    def emit(self: Any) -> None:
        lines = str(self._final_module).splitlines()
        kept = [line for line in lines if not line.startswith(("target triple", "target datalayout"))]
        module = llvm.parse_assembly("\n".join([f'target triple = "{TRIPLES[arch]}"', *kept]))
        module.data_layout = str(machine.target_data)
        builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
        builder.getModulePassManager().run(module, builder)
        machine.emit_object(module)

    def nothing(*_: Any) -> None:
        """Do nothing."""

    library._optimize_functions = nothing
    library._optimize_final_module = emit
    generator._add_module = nothing
    generator.set_env = nothing
    loaded._finalize_specific = nothing
    loaded.get_pointer_to_function = lambda *_: 1
    kept_code.save_overload = nothing
    kept_code.load_overload = nothing


if __name__ == "__main__":
    multiprocessing.set_start_method("fork")
    sys.exit(main())
