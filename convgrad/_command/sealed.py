"""Sealed checks in the subcommand check, and the verification of their signatures."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from convgrad._check.process import KernelProcess
from convgrad._check.sealed import check_sealed, text
from convgrad._command.check import check as check_here
from convgrad._command.check import check_folders, progress, takes_of
from convgrad._command.connection import connected
from convgrad._command.exits import FAILED
from convgrad._command.streams import show

__all__ = ["check"]


def check(options: argparse.Namespace) -> int:
    """Check a kernel, by a sealed check with `--sealed`, or verify the signature of one."""
    if options.verify_signature:
        return _verify(options)
    if not options.sealed:
        return check_here(options)
    if options.kernel is None:
        raise ValueError("no kernel: give module:function, library.so, command:program, a URL, or a framework")
    check_folders(options)
    options.url, options.local = options.sealed, False
    label = options.kernel.encode("ascii", "replace").decode()[:200]
    for name in ("CONVGRAD_URL", "CONVGRAD_API_KEY"):
        os.environ.pop(name, None)  # the kernel's process must not find its way to the reference
    with connected(options) as client:
        takes, arrays = takes_of(options, client), options.arrays or "numpy"
        with (
            KernelProcess(
                options.kernel, arrays=arrays, takes=takes, limit=options.limit, api_key=options.kernel_api_key
            ) as process,
            progress(options) as on_progress,
        ):
            document = check_sealed(process, client, cases=options.cases, label=label, on_progress=on_progress)
    if options.report:
        Path(options.report).write_text(json.dumps(document, indent=1), encoding="utf-8")
    return _told(document, options, document)


def _verify(options: argparse.Namespace) -> int:
    """Ask the service whether it signed a document, and print the document's result."""
    document = json.loads(Path(options.verify_signature).read_bytes())
    options.url = options.sealed or options.url
    with connected(options) as client:
        found = client.verify_signature(document)
    if found["valid"]:
        return _told(document, options, found)
    if options.json:
        show(found, options)
    elif not options.quiet:
        print(f"the signature of {options.verify_signature} is NOT valid: {_REASONS.get(found['reason'])}")
    return FAILED


_REASONS = {
    "not_signed": "the document has no signature",
    "other_key": "it was made with a key that this service does not have",
    "changed": "the document was changed",
}


def _told(document: dict[str, Any], options: argparse.Namespace, shown: dict[str, Any]) -> int:
    if options.json:
        show(shown, options)
    elif not options.quiet:
        print(text(document))
    return 0 if document["passed"] else FAILED
