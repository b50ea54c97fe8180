"""The report of a check: JSON with a version, text, JUnit, and the comparison of two reports."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

from convgrad import __version__
from convgrad._arithmetic import described
from convgrad._check import suites
from convgrad._check.examine import FAULTS
from convgrad._check.issues import ISSUES, link
from convgrad._check.large import LARGE
from convgrad._check.problems import Problem, Takes
from convgrad._report import Report

__all__ = [
    "FORMAT", "accuracy", "compared", "comparison", "counts", "declaration", "headline", "junit", "load", "new",
    "relations", "table", "text",
]  # fmt: skip

Data = dict[str, Any]

FORMAT = "convgrad-check/1"
"""The format of the report; another number is another format."""

_MEMBERS: dict[str, type] = {
    "kernel": str, "arrays": str, "seed": int, "next": int, "seconds": float, "started": str, "shrunk": int,
    "takes": dict, "options": dict, "cases": list, "faults": list, "unjudged": list,
}  # fmt: skip
_CASE = {"number", "op", "dtype", "kind", "name", "status", "seconds", "macs", "faults", "protocols"}
_FAULT = {"kind", "op", "count", "after", "text", "first", "clearest", "smallest", "smallest_text", "problem", "tries",
          "features", "keys", "report", "reproducer"}  # fmt: skip
_SLOWER = 1.25
_MEASURABLE_S = 1e-3


def new(kernel: str, arrays: str, seed: int, takes: Takes, options: Mapping[str, Any]) -> Data:
    """Return an empty report, as `docs/check-report.schema.json` describes it."""
    return {
        "format": FORMAT, "version": __version__, "kernel": kernel, "arrays": arrays, "seed": seed,
        "started": datetime.now(UTC).isoformat(timespec="seconds"), "seconds": 0.0, "next": 0,
        "takes": takes.as_json(), "options": dict(options),
        "declined": [], "cases": [], "faults": [], "unjudged": [], "restarts": 0, "shrunk": 0,
    }  # fmt: skip


def load(path: str) -> Data:
    """Read a report. Raises `ValueError` if the file is none, or one of another version, and `OSError`."""
    try:
        data = json.loads(Path(path).read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} must be the JSON report of convgrad check") from error
    found = data.get("format") if isinstance(data, dict) else None
    if not isinstance(found, str) or not found.startswith("convgrad-check/"):
        raise ValueError(f"{path} must be the JSON report of convgrad check")
    if found != FORMAT:
        version = str(data.get("version"))[:20]
        raise ValueError(f"{path} has the format {found[:30]} of convgrad {version}; this version reads {FORMAT}")
    for name, kind in _MEMBERS.items():
        if not isinstance(data.get(name), kind):
            raise ValueError(f"{path} is not complete: its {name} must be {kind.__name__}")
    for name, needed in (("cases", _CASE), ("faults", _FAULT)):
        if not all(isinstance(entry, dict) and needed <= entry.keys() for entry in data[name]):
            raise ValueError(f"{path} is not complete: its {name} must have {', '.join(sorted(needed))}")
    report: Data = data
    return report


def counts(data: Data) -> dict[str, int]:
    """Return how many cases passed, failed, and were not taken by the kernel."""
    counted = dict.fromkeys(("passed", "failed", "unsupported"), 0)
    for entry in data["cases"]:
        counted[entry["status"]] += 1
    return counted


def table(data: Data, *by: str) -> dict[tuple[str, ...], dict[str, Any]]:
    """Return the cases by members such as op and dtype: how many passed, failed, were not taken, and their seconds."""
    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    for entry in data["cases"]:
        empty = {"passed": 0, "failed": 0, "unsupported": 0, "seconds": 0.0}
        row = rows.setdefault(tuple(entry[name] for name in by), empty)
        row[entry["status"]] += 1
        row["seconds"] += entry["seconds"]
    return rows


def accuracy(data: Data) -> list[dict[str, Any]]:
    """Return the errors of the results that passed, by dtype and by the length of their sums.

    They are RMS errors in units of those of a naive sum in order (`naive`) and of the exact sum rounded once (`best`),
    each the median and the maximum of the cases.
    """
    grouped: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    for entry in data["cases"]:
        if entry["status"] == "passed" and entry.get("length"):
            grouped[entry["dtype"], (entry["length"].bit_length() - 1) // 4].append(entry)
    found = []
    for (dtype, size), entries in sorted(grouped.items()):
        row: dict[str, Any] = {"dtype": dtype, "from": 16**size, "to": 16 ** (size + 1) - 1, "cases": len(entries)}
        for name in ("naive", "best"):
            values = [float(entry[f"to_{name}"]) for entry in entries]
            row[name] = {"median": statistics.median(values), "max": max(values)}
        found.append(row)
    return found


def relations(data: Data) -> dict[str, tuple[int, int]]:
    """Return how often each relation was tried, and in how many cases it failed."""
    found: dict[str, tuple[int, int]] = {}
    for entry in data["cases"]:
        failed = {"repeat" if fault in ("alignment", "memory") else fault for fault in entry["faults"]}
        for name in entry["protocols"]:
            run, bad = found.get(name, (0, 0))
            found[name] = run + 1, bad + (name in failed)
    return found


def headline(data: Data) -> str:
    """Return the result in one line."""
    said = data["options"].get("arithmetic")
    kernel = f"{data['kernel']}, declared {described(said)}" if said else data["kernel"]
    counted = counts(data)
    tried = sum(counted.values())
    word = f"{counted['failed']} of {tried} cases FAILED" if counted["failed"] else f"all {tried} cases passed"
    if counted["unsupported"] and not counted["failed"]:
        word = f"{counted['passed']} of {tried} cases passed, {counted['unsupported']} were not taken"
    if not counted["passed"] + counted["failed"]:
        word = f"nothing was checked: the kernel took none of {tried} cases" if tried else "nothing was checked"
    return f"{kernel}: {word} (seed {data['seed']}, {data['seconds']:.0f} s)"


def declaration(data: Data) -> str:
    """Return what the kernel declares, and how many cases were judged by that; empty where it declares nothing."""
    said = data["options"].get("arithmetic")
    if not said:
        return ""
    applied = [len(entry.get("arithmetic", ())) for entry in data["cases"]]
    whole, none = applied.count(len(said)), applied.count(0)
    parts = {"by that": whole, "by the part of it that applies": len(applied) - whole - none, "as plain": none}
    judged = ", ".join([f"{count} {how}" for how, count in parts.items() if count])
    return f"declared: {described(said)}; cases judged: {judged or 'none'}"


def text(data: Data, scripts: Mapping[int, str]) -> str:
    """Return the report in some lines; `scripts` are the paths of the reproducers that were written, by fault."""
    lines = [headline(data), *filter(None, [declaration(data)]), ""]
    if data.get("suite"):
        lines[1:1] = [f"  {suites.text(data['suite'])}"]
    if data.get("declined"):
        limits = " ".join(f"--takes {each}" for each in data["declined"])
        lines += [f"  the kernel declined all else, so all cases are within {limits}", ""]
    width = max((len(op) for op, _ in table(data, "op", "dtype")), default=0)
    for (op, dtype), row in table(data, "op", "dtype").items():
        failed = f", {row['failed']} FAILED" if row["failed"] else ""
        skipped = f", {row['unsupported']} not taken" if row["unsupported"] else ""
        lines.append(f"  {op:{width}}  {dtype:4}  {row['passed']:5} passed{failed}{skipped}, {row['seconds']:.3g} s")
    for name, (run, bad) in relations(data).items():
        what = "the same bits when repeated" if name == "repeat" else f"right when {name}"
        lines.append(f"  {what}: {run - bad} of {run}")
    lines += [
        f"  {row['dtype']}, sums of {row['from']} to {row['to']}: RMS error {row['naive']['median']:.2g} of that of a "
        f"naive sum (at most {row['naive']['max']:.2g}), {row['best']['median']:.3g} of one rounding"
        for row in accuracy(data)
    ]
    lines += [f"  {line}" for line in _replayed(data)]
    for number, fault in enumerate(data["faults"], 1):
        lines += ["", f"{number}. FAILED: {FAULTS[fault['kind']]}, in {fault['count']} cases", f"   {fault['problem']}"]
        lines.append(f"   {fault['smallest']['kind']}: {fault['smallest_text']}")
        name = fault["first"]["name"]
        lines += [f"   as in {name}: {ISSUES[name].text} ({link(name)})"] if name in ISSUES else []
        lines.append(f"   first seen in case {fault['first']['number']}, after {fault['after']:.2g} s: {fault['text']}")
        if fault["report"]:
            clearest = fault["clearest"]
            lines.append(f"   clearest in {clearest['kind']}: {Problem.from_json(clearest['problem'])}")
            lines += [f"   {line}" for line in Report(fault["report"]).text().splitlines()]
        if number in scripts:
            lines.append(f"   reproduce with: python {scripts[number]}")
    if data["unjudged"]:
        first = data["unjudged"][0]
        count = len(data["unjudged"])
        lines += ["", f"{count} results were not judged, the first in case {first['number']}: {first['text']}"]
    return "\n".join(lines)


def _replayed(data: Data) -> list[str]:
    """Return a line for each published fault and large problem that was tried, with its name."""
    rows = {name: row for (name,), row in table(data, "name").items() if name in (*ISSUES, *LARGE)}
    wanted = ISSUES if "issues" in (data["options"].get("only") or ()) else rows
    lines = []
    for name in wanted:
        row = rows.get(name, {"passed": 0, "failed": 0})
        verdict = "passed" if row["passed"] else "not tried"
        if row["failed"]:
            verdict = f"FAILED in {row['failed']} of {row['failed'] + row['passed']} cases"
            verdict += f": {ISSUES[name].text}" if name in ISSUES else ""
        lines.append(f"{name:{max(map(len, wanted))}}  {verdict}")
    return lines


def junit(data: Data) -> str:
    """Return the report in JUnit's XML: a test case for each operation, dtype and kind of data."""
    rows = table(data, "op", "dtype", "kind")
    failures = sum(bool(row["failed"]) for row in rows.values())
    skipped = sum(not row["passed"] + row["failed"] for row in rows.values())
    suite = ET.Element("testsuite", name="convgrad check", tests=str(len(rows)), failures=str(failures), errors="0",
                       skipped=str(skipped), time=f"{data['seconds']:.3f}", timestamp=data["started"])  # fmt: skip
    properties = ET.SubElement(suite, "properties")
    facts = {name: data[name] for name in ("kernel", "seed", "version")} | {"arithmetic": declaration(data) or "plain"}
    for name, value in facts.items():
        ET.SubElement(properties, "property", name=name, value=str(value))
    for (op, dtype, kind), row in rows.items():
        case = ET.SubElement(suite, "testcase", classname=f"convgrad.check.{op}", name=f"{dtype} {kind}")
        case.set("time", f"{row['seconds']:.3f}")
        if row["failed"]:
            mine = [
                entry for entry in data["cases"] if (entry["op"], entry["dtype"], entry["kind"]) == (op, dtype, kind)
            ]
            kinds = {each for entry in mine for each in entry["faults"]}
            faults = [each for each in data["faults"] if each["op"] == op and each["kind"] in kinds]
            said = [f"{FAULTS[each['kind']]}: {each['text']}\nsmallest: {each['problem']}" for each in faults]
            message = f"{row['failed']} of {row['failed'] + row['passed']} cases failed"
            ET.SubElement(case, "failure", message=message).text = "\n\n".join(said)
        elif not row["passed"]:
            ET.SubElement(case, "skipped", message="the kernel does not take these cases")
    found: str = ET.tostring(suite, encoding="unicode", xml_declaration=True)
    return found


def compared(old: Data, new: Data) -> dict[str, list[str]]:
    """Return what `broke`, was `mended`, and is `slower` or `faster`, in words.

    Verdicts are compared by operation, dtype and kind of data, and by trap; times where both reports have the same
    cases, which they have if their seeds are the same.
    """
    found: dict[str, list[str]] = {"broke": [], "mended": [], "slower": [], "faster": []}
    for by in (("op", "dtype", "kind"), ("op", "dtype", "name")):
        before, after = table(old, *by), table(new, *by)
        for key in before.keys() & after.keys() - {key for key in before if key[2] == "random"}:
            was, now = before[key]["failed"], after[key]["failed"]
            if bool(was) != bool(now):
                how = f"{', '.join(key)}: {was} of {was + before[key]['passed']} cases failed, now {now} of "
                found["broke" if now else "mended"].append(how + str(now + after[key]["passed"]))
    times: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    if old["seed"] == new["seed"]:
        known = {_identity(entry): entry for entry in old["cases"]}
        for entry in new["cases"]:
            same = known.get(_identity(entry))
            if same is not None and same["status"] == entry["status"] == "passed":
                pair = times[entry["op"], entry["dtype"]]
                pair[0] += same["seconds"]
                pair[1] += entry["seconds"]
    for key, (was_s, now_s) in times.items():
        if max(was_s, now_s) < _MEASURABLE_S or 1 / _SLOWER < now_s / max(was_s, 1e-12) < _SLOWER:
            continue
        found["slower" if now_s > was_s else "faster"].append(f"{', '.join(key)}: {was_s:.3g} s, now {now_s:.3g} s")
    return {name: sorted(lines) for name, lines in found.items()}


def _identity(entry: Data) -> tuple[Any, ...]:
    return tuple(entry[name] for name in ("number", "op", "dtype", "kind", "name", "macs"))


def comparison(old: Data, new: Data) -> str:
    """Return the comparison of two reports in some lines."""
    lines = [f"old: {headline(old)}", f"new: {headline(new)}"]
    for name, found in compared(old, new).items():
        lines += ["", f"{name}:", *(f"  {line}" for line in found)] if found else []
    if old["seed"] != new["seed"]:
        lines += ["", "the seeds differ, so times are not compared: repeat the check with --seed"]
    return "\n".join(lines)
