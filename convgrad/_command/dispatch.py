"""The subcommands that are clients of a service, by name."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from convgrad._command import calls, check, completion, jobs, mcp, pages, sealed
from convgrad._command.flags import Command, parser

__all__ = ["dispatch"]


def dispatch(given: Sequence[str]) -> int:
    """Run the subcommand of a command line and return its exit code; raises what it raises, and `UsageError`."""
    options = parser(_COMMANDS).parse_args(given)
    command: Command = options.command
    return command(options)


def _check(options: argparse.Namespace) -> int:
    """Check a kernel, here or by a sealed check."""
    return (sealed.check if options.sealed is not None or options.verify_signature else check.check)(options)


_COMMANDS: dict[str, Command] = {
    "run": calls.run,
    "validate": calls.validate,
    "verify": calls.verify,
    "tolerance": calls.tolerance,
    "check": _check,
    "jobs": jobs.jobs,
    "ops": pages.ops,
    "describe": pages.describe,
    "health": pages.health,
    "bench": calls.bench,
    "mcp": mcp.mcp,
    "completion": completion.completion,
}
