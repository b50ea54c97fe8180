"""The parser of all command lines: a misspelt name is answered with the one that was probably meant, in one line."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Collection, Iterable, Sequence
from itertools import takewhile
from typing import Any, NoReturn

from convgrad._command.exits import UsageError

__all__ = ["Parser", "suggestion"]


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the closest known one, or nothing if none is close."""
    close = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {close[0]}?" if close else ""


class Parser(argparse.ArgumentParser):
    """A parser that raises `UsageError`; misspelt flags and subcommands come before all other mistakes."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **settings)

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Check the names, then parse; argparse calls this for a subcommand, too."""
        args = sys.argv[1:] if args is None else args
        commands = next((each.choices for each in self._actions if isinstance(each, argparse._SubParsersAction)), None)
        flags = takewhile(lambda word: word != "--" if commands is None else word.startswith("-"), args)
        names = [word.partition("=")[0] for word in flags if word.startswith("--")]
        wrong = [self._unknown("flag", name, self._option_string_actions) for name in names]
        words = [word for word in args if not word.startswith("-")]
        wrong += [self._unknown("command", word, commands) for word in words[:1] if commands]
        if any(wrong):
            raise UsageError("\n".join(filter(None, wrong)))
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Raise `UsageError`."""
        raise UsageError(f"{message} ({self.prog} --help lists all flags)")

    def _unknown(self, kind: str, name: str, known: Collection[str]) -> str:
        """Return what to write instead of an unknown name; empty for a known one."""
        if name in known:
            return ""
        plain = name.replace("_", "-")
        hint = suggestion(plain, known) or f" ({self.prog} --help lists them)"
        return f"{name} is not a {kind} of {self.prog}{hint}"
