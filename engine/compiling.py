"""Compile the kernels of this processor, in child processes, before they are first called."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from engine.container import cpu_count, prefer_for_oom_kill
from kernels import prepare
from kernels.emit.cache import cache_folder
from kernels.prepare import Verdict, read_verdict
from kernels.target import narrower, target

__all__ = ["OnShare", "compile_kernels", "ready"]

OnShare = Callable[[int, int], object]
"""Called with the part of the work that is done, and all of it."""


def ready(on_share: OnShare | None = None) -> None:
    """Compile and check the kernels unless that was done before; a call then loads those that it needs.

    Raises `RuntimeError` if the compiled code does not work on this processor, and `OSError` if the machine lacks what
    compiling takes.
    """
    if not target().compiles:
        return
    verdict = read_verdict() or compile_kernels(on_share or (lambda *_: None))
    if verdict.unfit is not None:
        remedy = f"choose another one, CONVGRAD_TARGET={narrower(target()).name}"
        raise RuntimeError(f"the code for {target()} does not work on this processor ({verdict.unfit}): {remedy}")


def compile_kernels(on_share: OnShare) -> Verdict:
    """Compile and check all kernels of the target in child processes; return whether they work on this processor.

    They are separate processes because the compiler leaves some hundred megabytes behind, and faulty code may crash.
    Raises `OSError` if the machine lacks something that the work takes.
    """
    module = prepare.__name__
    root = Path(str(prepare.__file__)).parents[module.count(".")]
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    folder = Path(cache_folder()).parent
    with subprocess.Popen(  # noqa: S603 - our own module in our own interpreter
        [sys.executable, "-P", "-m", module, "--jobs", str(cpu_count())],
        env={**os.environ, "NUMBA_CACHE_DIR": str(folder), "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        prefer_for_oom_kill(process.pid)  # rather than this process, which can then report it
        try:
            verdict, missing = _read(process, on_share)
        except BaseException:
            process.kill()
            raise
    if verdict is None:
        status = process.returncode
        ended = f"was ended by signal {-status}" if status < 0 else f"ended with exit code {status}"
        raise missing or OSError(0, f"python -m {module} {ended}")
    return verdict


def _read(process: subprocess.Popen[str], on_share: OnShare) -> tuple[Verdict | None, OSError | None]:
    verdict: Verdict | None = None
    missing: OSError | None = None
    assert process.stdout is not None
    for line in process.stdout:
        kind, _, text = line.partition(" ")
        if kind == "verdict":
            verdict = Verdict(**json.loads(text))
        elif kind == "failed":
            number, _, reason = text.partition(" ")
            missing = OSError(int(number), reason.strip())
        else:
            on_share(int(kind), int(text))
    return verdict, missing
