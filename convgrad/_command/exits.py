"""Exit codes, and errors as text or JSON on standard error."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from convgrad._errors import CallerError, ConvgradError, InvalidParams, ServiceError, TransportError

__all__ = ["BROKEN_PIPE", "EXITS", "FAILED", "NOT_READY", "REPORTED", "UsageError", "failed", "pipe_closed", "say"]

FAILED, NOT_READY, BROKEN_PIPE = 1, 4, 141

EXITS = {
    0: "done; for verify and check, all passed",
    FAILED: "verify or check: something failed; else an error of no other kind",
    2: "the command line, a setting or a file can't be used",
    3: "the call is invalid, or not allowed",
    NOT_READY: "the service failed, or is not ready",
    5: "no connection, or no complete reply",
    130: "interrupted (Ctrl-C)",
    BROKEN_PIPE: "the program that reads the output has ended",
}
"""What each exit code means; from 128, 128 plus the signal, as shells report it."""

_CODES: dict[type[BaseException], int] = {
    CallerError: 3,
    ServiceError: NOT_READY,
    TransportError: 5,
    ConvgradError: FAILED,
    OSError: 2,
    ValueError: 2,
    KeyboardInterrupt: 130,
}
REPORTED = tuple(_CODES)
"""The exceptions that end the command with an exit code and a message instead of a traceback."""


_FLAGS = {"convgrad.local()": "--local of run, verify, tolerance and check", "reference=True": "--reference of run"}
"""The flags in place of what messages of the client recommend."""


class UsageError(ValueError):
    """The command line can't be parsed."""


def failed(error: BaseException, *, as_json: bool = False) -> int:
    """Print an error, as one line of JSON if asked, and return the exit code for it."""
    code = next(code for cls, code in _CODES.items() if isinstance(error, cls))
    message = "interrupted" if isinstance(error, KeyboardInterrupt) else str(error)
    for python, flag in _FLAGS.items():
        message = message.replace(python, flag)
    if as_json:
        print(json.dumps({"error": _members(error, message, code)}, ensure_ascii=False), file=sys.stderr)
        return code
    say(message)
    faults = error.errors if isinstance(error, InvalidParams) else []
    # The message usually has the first one.
    for fault in faults[1:] if faults and faults[0].get("msg", "") in message else faults:
        say(f"  {'.'.join(map(str, fault.get('loc', [])))}: {fault.get('msg', '')}")
    return code


def _members(error: BaseException, message: str, code: int) -> dict[str, Any]:
    if isinstance(error, ConvgradError):
        return {"code": error.code, "message": message, "exit": code, "data": error.data}
    kinds = {KeyboardInterrupt: "interrupted", OSError: "file_error", ValueError: "usage_error"}
    name = next(name for cls, name in kinds.items() if isinstance(error, cls))
    return {"code": name, "message": message, "exit": code, "data": {}}


def pipe_closed() -> int:
    """Return the exit code of a command whose reader has ended; output that was not written is dropped."""
    # Otherwise Python reports the pipe once more when it flushes standard output at exit.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
    return BROKEN_PIPE


def say(message: str) -> None:
    """Print a line about the command itself to standard error."""
    print(f"convgrad: {message}", file=sys.stderr)
