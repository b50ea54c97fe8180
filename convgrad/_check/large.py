"""Large problems: many images or channels, tensors beyond 4 GB, 2**31 elements; `--only large`, or a name of one.

The kernel's process draws the data and projects the result (`projected`), so nothing large leaves it. A problem for
which there is no memory is not tried.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from convgrad._check.cases import Case
from convgrad._check.named import problem_of
from convgrad._check.problems import Problem, Takes
from convgrad._check.process import KernelProcess
from convgrad._check.projected import Projected

__all__ = ["LARGE", "SIGNS", "check_large", "large_problems"]

SIGNS = "signs"
"""The kind of data of large problems: +1 and -1, which the kernel's process draws."""

LARGE: dict[str, dict[str, Any]] = {
    "65536 images": {"n": 65_536, "src_channels": 2, "dst_channels": 3, "wide": (4,), "kernel": (3,)},
    "131073 images": {"n": 131_073, "src_channels": 3, "dst_channels": 2, "wide": (2, 3), "kernel": (2, 2)},
    "65537 channels": {"n": 2, "src_channels": 2, "dst_channels": 65_537, "wide": (5,), "kernel": (3,),
        "pads_begin": (1,), "pads_end": (1,)},
    "65537 groups": {"n": 2, "groups": 65_537, "src_channels": 65_537, "dst_channels": 65_537, "wide": (5,),
        "kernel": (3,)},
    "1 GB": {"n": 17, "src_channels": 60, "dst_channels": 2, "wide": (512, 512), "kernel": (1, 1)},
    "more than 4 GB": {"n": 17, "src_channels": 64, "dst_channels": 2, "wide": (1024, 1024), "kernel": (1, 1)},
    "pytorch#87354": {"src_channels": 32, "wide": (512, 512, 256), "kernel": (1, 1, 1)},
    "pytorch#163539": {"src_channels": 16, "dst_channels": 16, "wide": (124, 1282, 722), "kernel": (1, 3, 3)},
    "rocm-libraries#11188": {"n": 64, "src_channels": 96, "dst_channels": 64, "wide": (512, 512), "kernel": (1, 1)},
}  # fmt: skip
"""Large problems by name, written for Convolution. Those of issues have 2**31 elements, or more than 4 GB."""


def large_problems(takes: Takes, names: Collection[str]) -> list[tuple[str, Problem]]:
    """Return the problems of these names that the kernel takes, for each operation and dtype, and their names."""
    problems = [
        (name, problem_of(op, dtype, geometry)) for name, geometry in LARGE.items() if name in names
        for op in takes.ops if not op.startswith("BiasAdd") for dtype in takes.dtypes
    ]  # fmt: skip
    taken = [(name, takes.reformatted(each)) for name, each in problems if each is not None]
    return [(name, each) for name, each in taken if each is not None]


def check_large(
    kernel: KernelProcess, data: dict[str, Any], names: Collection[str], *, cases: int | None, until: float,
    on_progress: Callable[[str, float], object],
) -> None:  # fmt: skip
    """Try large problems until a time, and add them to a report."""
    problems = large_problems(kernel.takes, names)[:cases]
    for number, (name, problem) in enumerate(problems):
        if number < data["next"]:
            continue
        if time.monotonic() > until:
            return
        on_progress(f"case {number}: {problem.op} {problem.dtype}, {name}", number / len(problems))
        answer = kernel.project(problem, data["seed"] + number)
        _record(data, Case(problem, SIGNS, data["seed"], number, name), answer)


def _record(data: dict[str, Any], case: Case, answer: Mapping[str, Any]) -> None:
    """Add a case to a report, and what is wrong with its result."""
    problem, status = case.problem, answer["status"]
    projected = Projected.from_json(answer["projected"]) if status == "done" else None
    fault = "" if status in ("done", "unsupported") else status
    if projected is not None and projected.wrong.any():
        fault = "wrong"
    data["cases"].append({
        "number": case.number, "op": problem.op, "dtype": problem.dtype, "kind": case.kind, "name": case.name,
        "status": "failed" if fault else "unsupported" if status == "unsupported" else "passed",
        "seconds": round(answer.get("seconds", 0.0), 6), "macs": problem.macs, "faults": [fault] if fault else [],
        "protocols": [],
    })  # fmt: skip
    data["next"] = case.number + 1
    if status == "unsupported":
        data["unjudged"].append({"number": case.number, "text": answer["text"][:300]})
    if not fault:
        return
    command = ["convgrad", "check", data["kernel"], "--only", case.name, "--seed", str(data["seed"])]
    data["faults"].append({
        "kind": fault, "op": problem.op, "count": 1, "text": f"{case.name}: {answer['text']}", "after": 0.0,
        "first": case.as_json(), "clearest": case.as_json(), "keys": [[fault, problem.op, case.name]], "report": None,
        "features": [], "problem": str(problem), "smallest": case.as_json(), "smallest_text": answer["text"],
        "tries": 0, "reproducer": f"import subprocess\nimport sys\n\nsys.exit(subprocess.run({command}).returncode)\n",
    })  # fmt: skip
