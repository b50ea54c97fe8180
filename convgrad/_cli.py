"""The command: `convgrad run|validate|verify|ops|describe|health|bench|serve|completion`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from convgrad import _launch as launch
from convgrad._command import calls, completion, pages
from convgrad._command.exits import REPORTED, failed, pipe_closed
from convgrad._command.exits import say as _say
from convgrad._command.flags import Command, parser

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        try:
            return _main(given)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        return pipe_closed()


def _main(given: list[str]) -> int:
    if given[:1] == ["serve"]:
        return _serve(given[1:])
    try:
        options = parser(_COMMANDS).parse_args(given)
        command: Command = options.command
        return command(options)
    except BrokenPipeError:
        raise
    except REPORTED as error:
        return failed(error, as_json="--json" in given)


def _serve(arguments: Sequence[str]) -> int:
    try:
        root = launch.service_root()
    except launch.NotInstalled as error:
        _say(str(error))
        return 2
    # The service replaces this process, so that it receives the signals of a supervisor.
    return os.execve(sys.executable, launch.command(arguments), launch.environment(root, os.environ))  # noqa: S606


_COMMANDS: dict[str, Command] = {
    "run": calls.run,
    "validate": calls.validate,
    "verify": calls.verify,
    "ops": pages.ops,
    "describe": pages.describe,
    "health": pages.health,
    "bench": calls.bench,
    "completion": completion.completion,
}
