"""The subcommand check."""

from __future__ import annotations

import argparse
import json
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from convgrad._arithmetic import meaningless, parsed
from convgrad._check import suites
from convgrad._check.benchdnn import read_shapes
from convgrad._check.judge import Judge
from convgrad._check.page import page
from convgrad._check.problems import Takes
from convgrad._check.process import KernelProcess
from convgrad._check.report import Data, compared, comparison, counts, junit, load, new, text
from convgrad._check.run import Choice, chosen, of_shapes, of_suite
from convgrad._check.run import check as run_check
from convgrad._client import Client
from convgrad._command.connection import connected, draws
from convgrad._command.exits import FAILED, say
from convgrad._command.parser import suggestion
from convgrad._command.streams import show
from convgrad._local import LocalClient
from convgrad._progress import ProgressBar

__all__ = ["check", "check_folders", "progress", "takes_of"]

_WHOLE_S, _SHRINKING_S = 86_400.0, 5.0
"""Time limits of a suite, whose cases are all tried, and of reducing each of its faults."""


def check(options: argparse.Namespace) -> int:
    """Check a kernel on problems of all kinds; the exit code says whether all cases passed."""
    if options.compare:
        return _compare(options)
    check_folders(options)
    resumed = load(options.resume) if options.resume else None
    for flag in ("seed", "arithmetic"):
        if resumed is not None and getattr(options, flag) is not None:
            raise ValueError(f"--{flag} is for a new check: --resume continues with the {flag} of the report")
    before = resumed or {"kernel": None, "arrays": "numpy", "takes": {}, "options": {}}
    kernel, arrays = options.kernel or before["kernel"], options.arrays or before["arrays"]
    if kernel is None:
        raise ValueError("no kernel: give module:function, library.so, command:program, a URL, or a framework")
    only, skip = (_words(getattr(options, name)) or before["options"].get(name, []) for name in ("only", "skip"))
    said = parsed(options.arithmetic) or before["options"].get("arithmetic")
    shapes = options.shapes or before["options"].get("shapes")
    suite = options.suite or before["options"].get("suite")
    choice = of_shapes(chosen(only, skip), _shapes(shapes)) if shapes else chosen(only, skip)
    choice = of_suite(choice, suite) if suite else choice
    with connected(options) as client:
        takes = before["takes"] | takes_of(options, client)
        with KernelProcess(
            kernel, arrays=arrays, takes=takes, limit=options.limit, api_key=options.kernel_api_key
        ) as process:
            require_meaning(said, process.takes)
            seed = secrets.randbits(48) if options.seed is None else options.seed
            settings = {"only": only, "skip": skip, "shapes": shapes} | ({"arithmetic": said} if said else {})
            settings |= {"suite": suite} if suite else {}
            data = resumed or new(kernel, arrays, seed, process.takes, settings)
            try:
                _run(process, Judge(client, said), data, choice, options)
                if suite:
                    own = client if isinstance(client, LocalClient) else None
                    data["suite"] = suites.score(data, suite, own)
            finally:  # a check that is interrupted has a report, too
                _write(data, options)
    counted = counts(data)
    return FAILED if counted["failed"] or not counted["passed"] else 0


def _shapes(path: str) -> Mapping[str, Mapping[str, Any]]:
    """Read the problems of a file, and tell which of its options mean nothing here."""
    found = read_shapes(path)
    if found.ignored:
        say(f"{path}: {len(found.problems)} problems; these options are not used: {', '.join(sorted(found.ignored))}")
    return found.problems


def takes_of(options: argparse.Namespace, client: Client) -> dict[str, Any]:
    """Return what the kernel takes according to the flags."""
    takes = dict(map(_field, options.takes or []))
    takes |= {"ops": _canonical(client, _words(options.ops))} if options.ops else {}
    return takes | ({"dtypes": _words(options.dtypes)} if options.dtypes else {})


def require_meaning(said: Mapping[str, Any] | None, takes: Takes) -> None:
    """Raise `ValueError` for a declaration that means nothing for any operation and dtype that the kernel takes."""
    for member, rule, _ in meaningless(said or {}, takes.ops, takes.dtypes):
        raise ValueError(f"--arithmetic {member} {rule}")


def check_folders(options: argparse.Namespace) -> None:
    """Raise `ValueError` for a report that can't be written, before the time is spent."""
    for flag in ("html", "junit", "report"):
        path = getattr(options, flag)
        if path and (Path(path).is_dir() or not Path(path).parent.is_dir()):
            raise ValueError(f"--{flag} must be a file in a folder that exists")


def _run(kernel: KernelProcess, judge: Judge, data: Data, choice: Choice, options: argparse.Namespace) -> None:
    if not options.quiet and not options.json:
        say(f"checking {data['kernel']} with seed {data['seed']}")
    limits: dict[str, Any] = {"choice": choice, "seconds": options.seconds, "cases": options.cases}
    if data["options"].get("suite"):
        limits |= {"seconds": _WHOLE_S, "shrinking": _SHRINKING_S}
    with progress(options) as on_progress:
        run_check(kernel, judge, data, **limits, on_progress=on_progress)


@contextmanager
def progress(options: argparse.Namespace) -> Iterator[Callable[[str, float], object]]:
    """Draw a bar with what is being tried, if one is wanted."""
    if not draws(options):
        yield lambda *_: None
        return
    with ProgressBar(sys.stderr, "check") as bar:
        yield bar.trying


def _write(data: Data, options: argparse.Namespace) -> None:
    """Write the requested reports, and print one."""
    scripts = {}
    if options.scripts:
        Path(options.scripts).mkdir(parents=True, exist_ok=True)
        for number, fault in enumerate(data["faults"], 1):
            path = Path(options.scripts, f"{number}-{fault['kind']}.py")
            path.write_text(fault["reproducer"], encoding="utf-8")
            scripts[number] = str(path)
    written: dict[str | None, Callable[[Data], str]] = {
        options.html: page,
        options.junit: junit,
        options.report: json.dumps,
    }
    for name, made in written.items():
        if name:
            Path(name).write_text(made(data), encoding="utf-8")
    if options.json:
        show(data, options)
    elif not options.quiet:
        print(text(data, scripts))


def _compare(options: argparse.Namespace) -> int:
    old, new = (load(path) for path in options.compare)
    if options.json:
        show(compared(old, new), options)
    elif not options.quiet:
        print(comparison(old, new))
    return FAILED if compared(old, new)["broke"] else 0


def _words(texts: Sequence[str] | None) -> list[str]:
    return [word.strip() for text in texts or () for word in text.split(",") if word.strip()]


def _field(text: str) -> tuple[str, Any]:
    """Parse a member of what the kernel takes, such as `ranks=1,2` or `groups=false`."""
    name, equals, value = text.partition("=")
    if not equals or not value:
        raise ValueError("--takes must be NAME=VALUE, such as ranks=1,2 or groups=false")
    if value in ("true", "false"):
        return name, value == "true"
    return name, [int(word) if word.isdecimal() else word for word in _words([value])]


def _canonical(client: Client, names: Sequence[str]) -> list[str]:
    """Return the operations of names or aliases, as the service lists them."""
    known = {alias: entry["op"] for entry in client.operations() for alias in (entry["op"], *entry["aliases"])}
    for name in names:
        if name not in known:
            listed = ", ".join(dict.fromkeys(known.values()))
            raise ValueError(f"--ops {name[:60]!r} is none of {listed}{suggestion(name[:60], known)}")
    return list(dict.fromkeys(known[name] for name in names))
