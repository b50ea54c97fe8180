"""Check the convolutions of frameworks, and convgrad's own kernels on every path, as `convgrad check` does.

    scripts/bench conformance [--cases 400] [--seed 1] [--only NAME ..] [--scripts FOLDER] [--page]

Writes what was found to `benchmarks/data/conformance.json` and the tables of `docs/conformance.md`; with `--page` only
these tables, from the file, and with `--only` what was found before about the others stays. A framework that is not
installed is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import convgrad
from benchmarks.machine import describe_machine
from convgrad._check.judge import Judge
from convgrad._check.process import KernelProcess
from convgrad._check.report import Data, counts, new, table
from convgrad._check.run import check, chosen
from kernels.target import IMITATE, NAME, narrower, target

ROOT = Path(__file__).resolve().parents[1]
DATA, PAGE = ROOT / "benchmarks" / "data" / "conformance.json", ROOT / "docs" / "conformance.md"
_MARKS = ("<!-- tables: python -m benchmarks.conformance --page -->\n", "<!-- end of the tables -->\n")


@dataclass(frozen=True)
class Subject:
    """What is checked: a kernel as `convgrad check` names it, what is drawn for it, and its environment."""

    name: str
    kernel: str
    package: str = ""
    takes: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


def subjects() -> Iterator[Subject]:
    """Yield everything that can be checked here."""
    for how, kernel in (("oneDNN", "torch"), ("without oneDNN", "benchmarks.peers.checked:torch_alone")):
        for layout, data_format in (("NCX", "NCX"), ("channels-last", "NXC")):
            takes = {"data_formats": [data_format], "uneven_pads": False}  # which PyTorch does not take itself
            yield Subject(f"PyTorch, {how}, {layout}", kernel, "torch", takes)
    yield Subject("JAX", "jax", "jax")
    yield Subject("ONNX Runtime", "onnxruntime", "onnxruntime")
    ours, path = "benchmarks.peers.checked:ours", target()
    while True:
        yield Subject(f"convgrad, {path.name}", ours, environment={NAME: path.name})
        if not path.compiles:
            break
        path = narrower(path)
    for name, imitated in (("avx512bf16", "avx512bf16"), ("amx-bf16", "avx512f,amx-bf16")):
        if target().arch == "x86_64" and not {name, name.replace("-", "_")} & set(target().features):
            yield Subject(f"convgrad, {name} imitated", ours, environment={IMITATE: imitated})


@contextmanager
def _environment(more: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(more)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _checked(subject: Subject, judge: Judge, cases: int, seed: int) -> Data:
    with _environment(subject.environment):
        if not subject.package:  # compiling takes longer than a kernel may take to load
            subprocess.run([sys.executable, "-m", "kernels.prepare"], check=True, stdout=subprocess.DEVNULL)
        with KernelProcess(subject.kernel, arrays=_arrays(subject), takes=subject.takes, limit=60.0) as process:
            data = new(subject.kernel, _arrays(subject), seed, process.takes, {})
            check(process, judge, data, choice=chosen((), ()), seconds=1e9, cases=cases, shrinking=20.0,
                  on_progress=lambda what, share: print(f"\r\033[K{share:4.0%} {subject.name}: {what}"[:160], end="",
                                                        file=sys.stderr, flush=True))  # fmt: skip
    return data


def _arrays(subject: Subject) -> str:
    return "torch" if subject.package == "torch" else "numpy"


def _entry(subject: Subject, data: Data, installed: str) -> Data:
    """Return what is kept of a report."""
    rows = table(data, "op", "dtype")
    return {
        "name": subject.name, "kernel": subject.kernel, "version": installed,
        "environment": dict(subject.environment), "counts": counts(data), "seconds": data["seconds"],
        "failed": [[*key, row["failed"], row["failed"] + row["passed"]] for key, row in rows.items() if row["failed"]],
        "faults": [
            {"kind": fault["kind"], "op": fault["op"], "count": fault["count"], "problem": fault["problem"],
             "data": fault["smallest"]["kind"], "case": fault["smallest"]["number"],
             "text": fault["smallest_text"].partition(', in "')[0]}
            for fault in data["faults"]
        ],
    }  # fmt: skip


def main() -> None:
    """Check everything, and write the page."""
    parser = argparse.ArgumentParser(description="Check frameworks and our own kernels.")
    parser.add_argument("--cases", type=int, default=400, help="of each")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="*", default=[""], metavar="NAME", help="names that begin so")
    parser.add_argument("--scripts", type=Path, help="folder for the reproducers")
    parser.add_argument("--page", action="store_true", help="write the tables of the last run only")
    options = parser.parse_args()
    if not options.page:
        DATA.write_text(json.dumps(_run(options), indent=1) + "\n", encoding="utf-8")
    text = PAGE.read_text(encoding="utf-8")
    before, after = text.split(_MARKS[0])[0], text.split(_MARKS[1])[1]
    tables = "\n".join(page(json.loads(DATA.read_bytes())))
    PAGE.write_text(f"{before}{_MARKS[0]}\n{tables}\n{_MARKS[1]}{after}", encoding="utf-8")


def _run(options: argparse.Namespace) -> Data:
    known = json.loads(DATA.read_bytes())["subjects"] if options.only != [""] and DATA.exists() else []
    entries = {entry["name"]: entry for entry in known}
    with convgrad.local(progress=False) as client:
        for subject in subjects():
            if not subject.name.startswith(tuple(options.only)):
                continue
            try:
                installed = version(subject.package) if subject.package else convgrad.__version__
            except PackageNotFoundError:
                print(f"{subject.name}: not installed", file=sys.stderr)
                continue
            data = _checked(subject, Judge(client), options.cases, options.seed)
            entries[subject.name] = _entry(subject, data, installed)
            print(f"\r\033[K{subject.name}: {counts(data)}, {data['seconds']:.0f} s", file=sys.stderr)
            if options.scripts:
                options.scripts.mkdir(parents=True, exist_ok=True)
                for number, fault in enumerate(data["faults"], 1):
                    name = f"{subject.name.replace(', ', '-').replace(' ', '-')}-{number}-{fault['kind']}.py"
                    (options.scripts / name).write_text(fault["reproducer"], encoding="utf-8")
    found = {"machine": describe_machine(), "seed": options.seed, "cases": options.cases}
    return {**found, "subjects": [*entries.values()]}


def page(found: Data) -> Iterator[str]:
    """Yield the lines of the tables."""
    machine = found["machine"]
    cpu, python = machine["cpu"], machine["versions"]["python"]
    known = [name for name in ("avx2", "avx512f", "avx512bf16", "amx-bf16") if name in cpu["features"]]
    yield f"`scripts/bench conformance --cases {found['cases']} --seed {found['seed']}`"
    yield f"on {cpu['processors']} processors of an {cpu['model']} ({', '.join(known)}),"
    yield f"Python {python}, NumPy {machine['versions']['numpy']}, {machine['date'][:10]}."
    yield "What was not taken was declined by the adapter.\n"
    yield "| checked | version | cases | not taken | failed | of these |"
    yield "|---|---|---:|---:|---:|---|"
    for entry in found["subjects"]:
        counted = entry["counts"]
        by_dtype: dict[str, int] = defaultdict(int)
        for _, dtype, failed, _ in entry["failed"]:
            by_dtype[dtype] += failed
        failed = ", ".join(f"{count} {dtype}" for dtype, count in by_dtype.items())
        yield (f"| {entry['name']} | {entry['version']} | {sum(counted.values())} | {counted['unsupported']} "
               f"| {counted['failed']} | {failed} |")  # fmt: skip
    yield "\n`benchmarks/data/conformance.json` has the smallest problem that shows each fault.\n"


if __name__ == "__main__":
    main()
