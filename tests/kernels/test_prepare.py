"""Compiling in several processes: in an order in which nothing is compiled twice, with accurate progress."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from kernels.emit.compiler import ENTRIES, needs

pytestmark = pytest.mark.heavy

ROOT = Path(__file__).resolve().parents[2]


def test_a_function_waits_for_what_it_calls() -> None:
    """Whatever the order of the sources, a function is compiled after those that it calls."""
    waits, names = needs(ENTRIES), [entry.name for entry in ENTRIES]
    assert len(set(names)) == len(names)
    assert names.index("forward.output.write") in waits[names.index("forward.gather.gather")]
    assert all(place not in each for place, each in enumerate(waits))


# In a separate process: tests of other paths import more functions than this target has.
AGAIN = """
import json
import os
from dataclasses import asdict
from kernels.prepare import compile_all, read_verdict
told = []
compiled, wrong = compile_all(lambda done, total: told.append((done, total)), 2)
print(json.dumps([asdict(read_verdict()), compiled, wrong, told]))
"""


@pytest.mark.usefixtures("service")
def test_progress_rises_to_the_whole_and_nothing_is_compiled_again() -> None:
    """If everything is cached, each entry is loaded by one of the processes, and progress ends at the total."""
    done = subprocess.run([sys.executable, "-c", AGAIN], cwd=ROOT, check=True, capture_output=True, text=True)
    verdict, compiled, wrong, told = json.loads(done.stdout)
    assert verdict["unfit"] is None
    assert (compiled, wrong) == (0, None)
    assert len(told) > 40
    assert all(before < after for (before, _), (after, _) in pairwise(told))
    assert told[-1][0] == told[-1][1]


# The proof is replaced in a separate process, so that other tests are not affected.
PROOF = """
import errno, os, signal, sys
from kernels import prepare
prepare._PROOF_CPU_S = 1
for fault in sys.argv[1:]:
    def prove(part, parts):
        yield "the first function"
        exec(fault)
    prepare.prove = prove
    try:
        print(prepare._proof(), flush=True)
    except OSError as error:
        print("no verdict:", error.strerror, flush=True)
"""
FAULTS = {
    "os.kill(os.getpid(), signal.SIGSEGV)": "the first function crashes (SIGSEGV)",
    "while True: pass": "the first function crashes (SIGXCPU)",
    "raise ArithmeticError('the first function is wrong')": "the first function is wrong",
    "os.kill(os.getpid(), signal.SIGKILL)": "no verdict: a process that compiles or tries code was killed",
    "raise MemoryError": "no verdict: there is no memory to compile or to try code",
    "raise OSError(errno.EAGAIN, 'no')": "no verdict: no",
}


def test_only_the_code_is_blamed() -> None:
    """Code that crashes, never ends or is wrong is unfit; a lack of memory or processes is not the code's fault."""
    command = [sys.executable, "-c", PROOF, *FAULTS]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout.splitlines() == [*FAULTS.values()]


def test_a_crash_is_not_blamed_on_the_code_where_memory_is_limited() -> None:
    """LLVM aborts when it gets no memory: under an address space limit that is not the code's fault."""
    fault = "os.kill(os.getpid(), signal.SIGABRT)"
    command = ["prlimit", f"--as={4 << 30}", sys.executable, "-c", PROOF, fault]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "no verdict: compiling ends with SIGABRT in the 4096 MiB that ulimit -v allows"


def test_it_ends_in_silence_where_nobody_reads(tmp_path: Path) -> None:
    """A service that is stopped while its kernels are compiled leaves no traceback in its log."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "kernels.prepare", "--jobs", "1"]
    with os.fdopen(write, "w") as gone:
        ended = subprocess.run(command, cwd=ROOT, env=environment, stdout=gone, stderr=subprocess.PIPE, check=False)
    assert (ended.returncode, ended.stderr) == (1, b"")
