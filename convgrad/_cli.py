"""The command: `convgrad run|validate|verify|ops|describe|health|bench|serve|completion`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from convgrad._command import calls, completion, pages
from convgrad._command.exits import REPORTED, failed, pipe_closed
from convgrad._command.exits import say as _say
from convgrad._command.flags import Command, parser

__all__ = ["main"]

_SERVER_NEEDS = ("fastapi", "numba", "pydantic_settings", "uvicorn")


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
    root = _service_root()
    if root is None:
        _say(
            "the service is not installed here: run it from a checkout or its image; "
            "the `convgrad` package is the client only"
        )
        return 2
    if missing := [name for name in _SERVER_NEEDS if find_spec(name) is None]:
        _say(f"the service needs {', '.join(missing)}: pip install '{root}[server]'")
        return 2
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    # -P: don't import another package named `app` from the working folder.
    command = [sys.executable, "-P", "-m", "app", *arguments]
    # The service replaces this process, so that it receives the signals of a supervisor.
    return os.execve(sys.executable, command, {**os.environ, "PYTHONPATH": path})  # noqa: S606


def _service_root() -> Path | None:
    """Return the folder with the service's packages: beside this one, the working folder, or on the path."""
    beside = Path(__file__).resolve().parent.parent
    for folder in (beside, Path.cwd(), *map(Path, sys.path)):
        if all((folder / file).is_file() for file in ("app/__main__.py", "schemas/__init__.py")):
            return folder.resolve()
    return None


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
