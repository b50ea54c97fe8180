"""Write which path each target takes for each layer: benchmarks/data/choices.csv.

    python -m benchmarks.choices

Planning does not need the target's processor, so this shows how a changed cost model affects every target.
Targets with the same choices share a column: they differ only in how instructions are scheduled.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.layers import LAYOUTS, OPERATIONS, read_layers

__all__ = ["FILE", "table"]

FILE = Path(__file__).with_name("data") / "choices.csv"
TARGETS = ("x86-64", "znver3", "skylake-avx512", "znver4", "sapphirerapids", "aarch64")


def _rows() -> list[str]:
    """Return the name of each layer and the path that this process's target takes for it."""
    from benchmarks.regret import chosen

    rows = []
    for layer in read_layers(FILE.parent.with_name("shapes.json"), [*OPERATIONS], []):
        for layout in LAYOUTS:
            for dtype in ("f32", "bf16"):
                name = f"{layer.name},{layer.op},{layout},{dtype}"
                rows.append(f"{name},{chosen(layer.problem(dtype, layout))}")
    return rows


def table() -> str:
    """Return the file's text: a row for each layer, operation, layout and dtype, a column for each target."""
    from kernels.target import BUILD

    columns: list[list[str]] = []
    command = [sys.executable, "-m", "benchmarks.choices"]
    processes = [
        subprocess.Popen(command, env={**os.environ, BUILD: name}, stdout=subprocess.PIPE, text=True)
        for name in TARGETS
    ]
    for process in processes:
        text, _ = process.communicate()
        if process.returncode:
            raise RuntimeError(f"{process.args!r} ended with status {process.returncode}")
        columns.append(text.splitlines())
    rows = [f"layer,op,layout,dtype,{','.join(TARGETS)}"]
    rows += [
        ",".join([row[0].rpartition(",")[0], *(each.rpartition(",")[2] for each in row)])
        for row in zip(*columns, strict=True)
    ]
    return "\n".join(rows) + "\n"


def main() -> None:
    """Write the file; in a process for one target, print its rows."""
    from kernels.target import BUILD

    if os.environ.get(BUILD):
        print("\n".join(_rows()))
    else:
        FILE.write_text(table(), encoding="utf-8")
        print(f"wrote {FILE}")


if __name__ == "__main__":
    main()
