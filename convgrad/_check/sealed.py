"""A sealed check of a kernel: the service draws the cases and judges the results."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from convgrad._check.problems import Problem
from convgrad._check.process import KernelProcess, Memory
from convgrad._client import Client
from convgrad._errors import ConvgradError, InvalidParams
from convgrad._sealed import SealedCase

__all__ = ["check_sealed", "text"]

_OVER = ("late", "answered")
"""A kernel may take longer than the service waits; and a reply may be lost, but not the verdict."""


def check_sealed(
    kernel: KernelProcess, client: Client, *, cases: int | None, label: str, on_progress: Callable[[str, float], object]
) -> dict[str, Any]:
    """Check a kernel on cases of the service; return the signed document."""
    check, failed = client.begin_check(kernel.takes.as_json(), cases=cases, label=label), 0
    try:
        while (case := client.next_case(check)) is not None:
            on_progress(f"{failed} failed, {case.number}: {case.op} {case.dtype}", case.number / case.cases)
            try:
                failed += not _answered(kernel, client, case)
            except InvalidParams as error:
                if not error.errors or error.errors[0]["type"] not in _OVER:
                    raise
                failed += 1
        return client.finish_check(check)
    except BaseException:
        with suppress(ConvgradError):
            client.drop_check(check)
        raise


def _answered(kernel: KernelProcess, client: Client, case: SealedCase) -> bool:
    """Run the kernel on a case and submit what it returns; return whether that is right."""
    outcome = kernel.call(Problem.from_json(case.problem), case.inputs, Memory())
    if outcome.result is not None and not outcome.modified and not outcome.outside:
        return client.submit_result(case, outcome.result).passed
    unsupported = outcome.status == "unsupported"
    client.submit_outcome(case, "unsupported" if unsupported else "failed")
    return unsupported


def text(document: dict[str, Any]) -> str:
    """Return a signed document in some lines."""
    counts, asked = document["counts"], document["asked"]
    counted = [f"{counts.get('passed', 0)} of {asked} cases passed"]
    counted += [f"{count} {name.replace('_', ' ')}" for name, count in counts.items() if count and name != "passed"]
    lines = [f"{document['label']}: {'passed' if document['passed'] else 'FAILED'}; {', '.join(counted)}"]
    lines += [
        f"  case {case['case']} {case['status']}: {case['op']} {case['dtype']}, {case['kind']}, {case['name']}"
        for case in document["cases"]
        if case["status"] not in ("passed", "unsupported")
    ]
    return "\n".join([*lines, f"  check {document['check']}, signed with key {document['signature']['key_id']}"])
