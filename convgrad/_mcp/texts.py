"""The text of each result: short, and what to do next."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from convgrad._check.evidence import reason
from convgrad._check.issues import ISSUES, link
from convgrad._errors import ConvgradError
from convgrad._report import Report

__all__ = [
    "case", "computed", "failure", "faults", "finding", "operation", "operations", "page", "prompt", "signed", "valid",
    "verdict",
]  # fmt: skip

Json = Mapping[str, Any]


def failure(error: ConvgradError) -> str:
    """Return an error with every broken rule."""
    rules = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.data.get("errors", [])]
    return "\n".join([f"{error.code}: {error.message}", *rules])


def operations(listed: Sequence[Json]) -> str:
    """Return the names of the operations."""
    return "\n".join(f"{each['op']} -> {', '.join(each['outputs'])}" for each in listed)


def operation(found: Json) -> str:
    """Return the names of the inputs, attributes and outputs of an operation."""
    named = {part: ", ".join(str(each["name"]) for each in found[part]) for part in ("inputs", "attributes", "outputs")}
    return "\n".join([f"{found['op']}: {found['summary']}", *(f"{part}: {names}" for part, names in named.items())])


def valid(found: Json) -> str:
    """Return the shapes of the outputs."""
    return f"valid: {_shapes(found['outputs'])}; {found['plan']['gmac'] * 1e9:.0f} multiply-adds"


def computed(found: Json) -> str:
    """Return the outputs of a call with their references."""
    return f"computed in {found['stats']['compute_ms']:.3g} ms: {_shapes(found['outputs'])}"


def case(found: Json) -> str:
    """Return what to run for a case."""
    if found["case"] is None:
        return f"all {found['cases']} cases were given: call check_finish"
    what = f"case {found['case']} of {found['cases']}: {found['op']} {found['dtype']} with {found['attributes']}"
    given = _shapes(found["inputs"]) or "inputs from the seed in `generate`"
    return f"{what}; {given}; submit {_shapes(found['outputs'])}"


def signed(found: Json) -> str:
    """Return the outcome of a check, and how to verify its record."""
    counts = ", ".join(f"{count} {name}" for name, count in found["counts"].items() if count)
    how = "anybody can verify it: convgrad check --verify-signature FILE"
    return f"{found['verdict']}: {counts}; signed record: {found['record']} ({how})"


def finding(report: Json) -> str:
    """Return what to act on in a report."""
    return Report(report).finding()


def verdict(report: Json) -> dict[str, Any]:
    """Return the members of a report that a program acts on."""
    failed = [rule for rule in report["rules"] if not rule["passed"]]
    return {
        **{name: report[name] for name in ("passed", "op", "output", "shape", "where", "hints")},
        "rule": failed[0] if failed else None,
        "reason": reason(report) if failed else None,
        "causes": [each["text"] for each in report["causes"]],
        "element": report["worst"] if failed else None,
    }


def page(found: Json) -> str:
    """Return the page of an operation in Markdown."""
    return "\n".join(_page(found))


def _page(found: Json) -> Iterator[str]:
    yield from (f"# {found['op']}", "", found["summary"], "", f"    {found['formula']}", "")
    for part in ("inputs", "attributes", "outputs"):
        yield from (f"## {part.capitalize()}", "")
        for row in found[part]:
            facts = [f"{name} {row[name]}" for name in ("type", "required", "default", "values") if row.get(name)]
            yield f"* `{row['name']}`: {row['description']} ({', '.join(facts)})"
        yield ""


def faults() -> str:
    """Return the published faults of convolutions that checks replay, with their issues."""
    listed = [f"* [{name}]({link(name)}): {issue.text}" for name, issue in ISSUES.items()]
    return "\n".join(["# Published faults that `convgrad check --only issues` replays", "", *listed])


def prompt(op: str, language: str) -> str:
    """Return the steps to write a kernel and have it judged."""
    return _STEPS.format(op=op, language=language)


def _shapes(tensors: Json) -> str:
    """Return each tensor with its dtype, shape and reference."""
    texts = []
    for name, each in tensors.items():
        at = each.get("path") or each.get("handle")
        texts.append(f"{name} {each['dtype']} {each['shape']}" + (f" at {at}" if at else ""))
    return ", ".join(texts)


_STEPS = """Write a kernel in {language} that computes {op}, and prove that it is right.

1. Call describe with op="{op}"; the resource convgrad://operations/{op} has the formula and the layouts.
2. Write the plainest kernel that is right: loops over images, groups, channels, taps and pixels.
3. Try it on one small call first: choose shapes, check them with validate, make inputs from a seed (the schema of the
   tool has the NumPy line), run the kernel, and call verify with its result. A failed verdict names the rule, the
   cause, the place and one wrong element; explain says what that element must sum. Change the kernel and verify again.
4. Read convgrad://faults, and try the shapes in which others were wrong: uneven pads, strides beyond the kernel,
   dilation, groups, a batch of several images, odd channel counts.
5. Prove it: check_begin with what the kernel takes and the SHA-256 of its source as digest; for each check_next run the
   kernel on exactly the given inputs and check_submit the result, or the outcome "unsupported" where it does not apply;
   then check_finish. The kernel is right when the verdict is "passed". Report it, the counts, and where the record is.

Never compute a result with the tool `compute` and submit that: it would prove nothing about the kernel.
"""
