"""The subcommand jobs: list jobs, wait for the result of one, or cancel it."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from convgrad._command.connection import connected, draws
from convgrad._command.exits import say
from convgrad._command.streams import check_output, show, write
from convgrad._events import Result
from convgrad._jobs import Job
from convgrad._progress import ProgressBar
from convgrad._report import Report
from convgrad._tolerance import Tolerance

__all__ = ["jobs"]


def jobs(options: argparse.Namespace) -> int:
    """List jobs, show one, wait for its result, or cancel it."""
    check_output(options.output)
    with connected(options) as client:
        if options.job is None:
            listed = client.jobs()
            if options.json:
                show(listed, options)
            else:
                print("\n".join(map(_line, listed)), end="\n" if listed else "")
            return 0
        job = client.job(options.job)
        if options.output is not None:
            _write(job, options)
        elif options.cancel:
            job.cancel()
        if not options.quiet and options.output is None:
            show(job.state, options)
    return 0


def _line(job: dict[str, Any]) -> str:
    progress = job.get("progress") or {}
    more = f"place {job['place']}" if "place" in job else job.get("expires", "")
    more = f"{progress.get('done')} of {progress.get('total')}" if progress.get("total") else more
    return " ".join(map(str, (job["job"], f"{job['state']:9}", job["op"] or job["kind"], more)))


def _write(job: Job, options: argparse.Namespace) -> None:
    """Wait for the result of a job and write it."""
    path = options.output
    with ProgressBar(sys.stderr, "job") if draws(options) else nullcontext() as bar:
        found = job.result(on_progress=None if bar is None else bar.computing)
    if isinstance(found, Tolerance) and not path.endswith(".json"):
        found.save(path)
    elif isinstance(found, Report | Tolerance):
        Path(path).write_text(json.dumps(found.data, indent=1), encoding="utf-8")
    else:
        arrays = found.outputs if isinstance(found, Result) else {str(number): each for number, each in found.items()}
        if path.endswith(".npz"):
            np.savez(path, **arrays)
        elif len(arrays) > 1:
            raise ValueError("several outputs need a .npz file: give -o a name that ends in .npz")
        else:
            write(path, next(iter(arrays.values())))
    if not options.quiet:
        say(f"{job.id} -> {path}")
