"""Sealed checks in the subcommand check, and the verification of their signatures."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from convgrad._arithmetic import described, parsed
from convgrad._check.isolation import MEASURES, unreadable
from convgrad._check.problems import Problem
from convgrad._check.process import KernelProcess, Memory
from convgrad._client import Client
from convgrad._command.check import check_folders, progress, takes_of
from convgrad._command.connection import connected
from convgrad._command.exits import FAILED
from convgrad._command.streams import show
from convgrad._errors import ConvgradError, InvalidParams
from convgrad._sealed import SELF_TEST, SealedCase
from convgrad._signature import MEMBER, fault_of, read_public_key

__all__ = ["check"]

_OVER = ("late", "answered")
"""A kernel may take longer than the service waits; and a reply may be lost, but not the verdict."""


def check(options: argparse.Namespace) -> int:
    """Check a kernel by a sealed check, or verify the signature of one."""
    if options.verify_signature:
        return _verify(options)
    if options.kernel is None and "://" not in options.sealed:  # `--sealed KERNEL`
        options.kernel, options.sealed = options.sealed or None, ""
    if options.kernel is None:
        raise ValueError("no kernel: give module:function, library.so, command:program, a URL, or a framework")
    check_folders(options)
    if options.sealed:
        options.url, options.local = options.sealed, False
    label = options.kernel.encode("ascii", "replace").decode()[:200]
    hidden = [text for text in (options.url, options.api_key) if text]
    with unreadable(), connected(options) as client:
        takes, arrays = takes_of(options, client), options.arrays or "numpy"
        with (
            KernelProcess(
                options.kernel, arrays=arrays, takes=takes, limit=options.limit, api_key=options.kernel_api_key,
                hidden=hidden,
            ) as process,
            progress(options) as on_progress,
        ):  # fmt: skip
            more: Any = {"label": label, "digest": _digest(options.kernel), "arithmetic": parsed(options.arithmetic)}
            check = client.begin_check(process.takes.as_json(), cases=options.cases, **more)
            document = _checked(process, client, check, on_progress)
    if options.report:
        Path(options.report).write_text(json.dumps(document, indent=1), encoding="utf-8")
    status = _told(document, options, document)
    if not options.quiet:
        print(f"  {_isolation(process)}", file=sys.stderr if options.json else sys.stdout)
    return status


def _digest(kernel: str) -> str | None:
    """Return the digest of the file that holds a kernel; None if it is no file: a module, a framework, a URL."""
    named = kernel.removeprefix("command:").split(" ")[0] if kernel.startswith("command:") else kernel
    for path in (Path(named), Path(named.rpartition(":")[0])):
        if path.is_file():
            return f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"
    return None


def _isolation(process: KernelProcess) -> str:
    """Return what the kernel's process could not do, and what it could."""
    in_force = {True: "could not", False: "COULD"}
    found = {can: [text for name, text in MEASURES.items() if (name in process.isolation) is can] for can in in_force}
    said = [f"{in_force[can]} {', or '.join(texts)}" for can, texts in found.items() if texts]
    return f"the kernel's process {'; it '.join(said)}"


def _verify(options: argparse.Namespace) -> int:
    """Verify the signature of a document, without a service, and print the document's result."""
    document = json.loads(Path(options.verify_signature).read_bytes(), object_pairs_hook=_unique)
    if not isinstance(document, dict):
        raise ValueError(f"{options.verify_signature} must be the JSON object that a sealed check wrote")
    reason = fault_of(document, None if options.public_key is None else read_public_key(options.public_key))
    if reason is None:
        found = {"valid": True, "reason": None, "key_id": document[MEMBER]["key_id"]}
        status = _told(document, options, found)
        if options.public_key is None and not (options.json or options.quiet):
            print(f"  public key {document[MEMBER]['public_key']}: compare it, or give it as --public-key")
        return status
    if options.json:
        show({"valid": False, "reason": reason}, options)
    elif not options.quiet:
        print(f"the signature of {options.verify_signature} is NOT valid: {_REASONS[reason]}")
    return FAILED


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the members of an object; raises `ValueError` if one is there twice, as a reader may take the other."""
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("an object of the document has the same name twice")
    return members


_REASONS = {
    "not_signed": "the document has no Ed25519 signature",
    "other_key": "it was made with another key",
    "changed": "the document was changed",
}


def _told(document: dict[str, Any], options: argparse.Namespace, shown: dict[str, Any]) -> int:
    if options.json:
        show(shown, options)
    elif not options.quiet:
        print(_text(document))
    return 0 if document["passed"] else FAILED


def _checked(
    kernel: KernelProcess, client: Client, check: str, on_progress: Callable[[str, float], object]
) -> dict[str, Any]:
    """Check a kernel on cases of the service; return the signed document."""
    failed = 0
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
    """Run the kernel on a case and submit its result; return whether it passed."""
    outcome = kernel.call(Problem.from_json(case.problem), case.inputs, Memory())
    if outcome.result is not None and not outcome.modified and not outcome.outside:
        return client.submit_result(case, outcome.result).passed
    unsupported = outcome.status == "unsupported"
    client.submit_outcome(case, "unsupported" if unsupported else "failed")
    return unsupported


def _text(document: dict[str, Any]) -> str:
    """Return a signed document in some lines."""
    counts, asked = document["counts"], document["asked"]
    counted = [f"{counts.get('passed', 0)} of {asked} cases passed"]
    counted += [f"{count} {name.replace('_', ' ')}" for name, count in counts.items() if count and name != "passed"]
    verdict = document.get("verdict") or ("passed" if document["passed"] else "failed")  # the format before had none
    said = document.get("arithmetic")
    declared = f" as declared ({described(said)})" if said else ""
    word = verdict if verdict == "passed" else verdict.upper()
    lines = [f"{document['label']}: {word}{declared}; {', '.join(counted)}"]
    lines += [
        f"  case {case['case']} {case['status']}: {case['op']} {case['dtype']}, {case['kind']}, {case['name']}"
        for case in document["cases"]
        if case["status"] not in ("passed", "unsupported")
    ]
    signed = f"signed with key {document['signature']['key_id']}"
    if document["key"] == SELF_TEST:
        signed = "a self-test: its signature is worth nothing to others"
    return "\n".join([*lines, f"  check {document['check']}, {signed}"])
