"""The command: `convgrad run|validate|verify|tolerance|check|ops|describe|health|bench|mcp|serve|keys|completion`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from convgrad import _launch as launch
from convgrad._command.exits import REPORTED, failed, pipe_closed
from convgrad._command.exits import say as _say

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
    try:
        if given and given[0] in _MODULES:
            return _delegate(_MODULES[given[0]], given[1:])
        # Late: it takes most of a second, in which Ctrl-C is an error like any other.
        from convgrad._command.dispatch import dispatch

        return dispatch(given)
    except BrokenPipeError:
        raise
    except REPORTED as error:
        return failed(error, as_json="--json" in given)


def _delegate(module: str, arguments: Sequence[str]) -> int:
    """Run a module of the service with the rest of the command line."""
    try:
        root = launch.service_root()
    except launch.NotInstalled as error:
        _say(str(error))
        return 2
    # The service replaces this process, so that it receives the signals of a supervisor.
    return os.execve(sys.executable, launch.command(arguments, module), launch.environment(root, os.environ))  # noqa: S606


_MODULES = {"serve": "app", "keys": "app.http.keys"}
"""The modules of the service that are subcommands."""
