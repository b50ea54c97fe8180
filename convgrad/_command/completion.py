"""Shell completion: scripts that shtab makes from the flags."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping

from convgrad._command import flags
from convgrad._command.spec import ATTRIBUTES, OPERATIONS

__all__ = ["completion"]

# What completes a flag or argument, by its metavar; other values are not completed.
_WORDS: Mapping[str, tuple[str, ...]] = {
    "OP": OPERATIONS,
    "NAME=VALUE": tuple(f"{name}=" for name in ATTRIBUTES),
}
_FILES = ("FILE", "PATH")


def completion(options: argparse.Namespace) -> int:
    """Print the script for a shell."""
    import shtab  # no other command needs it

    parser = flags.parser(dict.fromkeys(flags.COMMANDS, completion))
    for action in _actions(parser):
        metavar = str(action.metavar)
        if metavar in _FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined] # where shtab looks for it
        elif metavar in _WORDS:
            action.complete = _completed(metavar)  # type: ignore[attr-defined]
    preamble = "".join(_definition(metavar) for metavar in _WORDS) if options.shell == "bash" else ""
    print(shtab.complete(parser, options.shell, preamble=preamble))
    return 0


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the flags and arguments of a parser and its subcommands."""
    for action in parser._actions:  # argparse has no public list, and shtab reads the same
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)


def _completed(metavar: str) -> dict[str, str]:
    """Return how each shell finds the words: bash by a function, the others in place."""
    words = " ".join(_WORDS[metavar])
    return {"bash": _function(metavar), "zsh": f"({words})", "fish": words}


def _definition(metavar: str) -> str:
    return f"{_function(metavar)}() {{ compgen -W '{' '.join(_WORDS[metavar])}' -- \"$1\"; }}\n"


def _function(metavar: str) -> str:
    return f"_convgrad_{metavar.partition('=')[0].lower()}"
