"""The command's words: its subcommands and their flags."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from convgrad import __version__
from convgrad._base import DEFAULT_URL
from convgrad._spec import SHAPES, TENSORS, attribute, integers, named

__all__ = ["Command", "parser"]

Command = Callable[[argparse.Namespace], int]

_EXITS = (
    "exit codes: 0 done, 2 command line or file, 3 the call is wrong, 4 the service failed or is not ready, "
    "5 no whole answer came, 130 interrupted"
)


def parser(commands: Mapping[str, Command]) -> argparse.ArgumentParser:
    """Return the parser; each subcommand leaves its function of `commands` as `command`."""
    top = argparse.ArgumentParser(prog="convgrad", description="Exact, fast convolution gradients.", epilog=_EXITS)
    top.add_argument("--version", action="version", version=f"convgrad {__version__}")
    subparsers = top.add_subparsers(required=True, metavar="COMMAND")
    for name, (help_, add_flags) in _COMMANDS.items():
        command = subparsers.add_parser(name, help=help_, description=help_, epilog=_EXITS)
        command.set_defaults(command=commands[name])
        add_flags(command)
        _add_connection(command)
    # `serve` never comes here: its flags are the service's settings. This is for the list of commands.
    subparsers.add_parser("serve", help="run the service; convgrad serve --help shows its settings")
    return top


def _add_run(command: argparse.ArgumentParser) -> None:
    _add_call(command)
    add = command.add_argument
    add("-o", "--output", metavar="FILE", help="where the result goes; - is standard output")
    add("--reference", action="store_true", help="use the slow kernel that accumulates in float64")
    add("--deadline", type=float, metavar="S", help="stop the computation after S seconds")
    add("-q", "--quiet", action="store_true", help="say nothing but errors")


def _add_describe(command: argparse.ArgumentParser) -> None:
    command.add_argument("op", metavar="OP", help="name or alias of the operation")


def _add_health(command: argparse.ArgumentParser) -> None:
    command.add_argument("--wait", type=float, metavar="S", help="wait up to S seconds until it does")


def _add_bench(command: argparse.ArgumentParser) -> None:
    _add_call(command)
    add = command.add_argument
    add("--seconds", type=float, default=5.0, metavar="S", help="how long to measure; 5 unless given")
    add("--clients", type=int, default=1, metavar="N", help="calls at a time; 1 unless given")


def _add_call(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("op", metavar="OP", nargs="?", help="name or alias of the operation; a spec may have it")
    add("--spec", type=Path, metavar="FILE", help="JSON of the call, or an op dumped by oneDNN Graph")
    add(
        "--attr",
        action="append",
        type=attribute,
        dest="attributes",
        metavar="NAME=VALUE",
        help="an attribute, such as strides=2,2",
    )
    add("--dtype", choices=["f32", "f16", "bf16"], help="what the files hold; needed for bf16 in <u2")
    tensors = command.add_argument_group("inputs", "FILE is a .npy file; to validate or bench also f32:8,64,28,28")
    for name in TENSORS:
        tensors.add_argument(f"--{name.replace('_', '-')}", metavar="FILE")
    for name in SHAPES:
        tensors.add_argument(f"--{name.replace('_', '-')}", type=integers, metavar="N,N,..")
    tensors.add_argument(
        "--input", action="append", type=named, dest="inputs", metavar="NAME=FILE", help="any other input"
    )


def _add_connection(command: argparse.ArgumentParser) -> None:
    add = command.add_argument_group("service").add_argument
    add("--url", default=_variable("URL") or DEFAULT_URL, help="address ($CONVGRAD_URL)")
    add("--uds", default=_variable("UDS"), metavar="PATH", help="Unix socket ($CONVGRAD_UDS)")
    add("--api-key", default=_variable("API_KEY"), metavar="KEY", help="key ($CONVGRAD_API_KEY)")
    add("--timeout", type=float, metavar="S", help="longest silence of the service, in seconds")
    add("--json", action="store_true", help="print JSON")


def _variable(name: str) -> str | None:
    """Read a variable; without a value it counts as unset."""
    return os.environ.get(f"CONVGRAD_{name}") or None


def _add_nothing(command: argparse.ArgumentParser) -> None:
    """Leave a command without flags of its own."""


_COMMANDS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], Any]]] = {
    "run": ("compute an operation on .npy files", _add_run),
    "validate": ("check a call without computing it", _add_call),
    "ops": ("list the operations", _add_nothing),
    "describe": ("show the table of an operation", _add_describe),
    "health": ("ask whether the service takes calls", _add_health),
    "bench": ("measure a running service with one call, a 3x3 layer unless given", _add_bench),
}
