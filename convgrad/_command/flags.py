"""The command line: subcommands and flags."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from convgrad import __version__
from convgrad._command.exits import EXITS
from convgrad._command.keys import add_key_flags
from convgrad._command.parser import Parser
from convgrad._command.spec import SHAPES, TENSORS, attribute, integers, named, names
from convgrad._retry import DEFAULT_URL

__all__ = ["COMMANDS", "SHELLS", "Command", "parser"]

Command = Callable[[argparse.Namespace], int]

SHELLS = ("bash", "zsh", "fish")

_EPILOG = "exit codes:\n" + "\n".join(f"  {code:3}  {meaning}" for code, meaning in EXITS.items())
_FILES = """FILE is a .npy file, and one FILE of the command may be -, standard input.
validate and bench also take a dtype and shape, such as f32:8,64,28,28."""


def parser(commands: Mapping[str, Command]) -> argparse.ArgumentParser:
    """Return the parser; it sets `command` to the subcommand's function in `commands`.

    It raises `UsageError` for a command line that it can't parse.
    """
    top = Parser(prog="convgrad", description="Exact, fast convolution gradients.", epilog=_EPILOG)
    top.add_argument("--version", action="version", version=f"convgrad {__version__}")
    subparsers = top.add_subparsers(required=True, metavar="COMMAND")
    for name, (help_, add_flags) in COMMANDS.items():
        command = subparsers.add_parser(name, help=help_, description=help_, epilog=_EPILOG)
        command.set_defaults(command=commands[name])
        add_flags(command)
        if name not in ("completion", "mcp"):
            _add_connection(command)
    # For the list of commands and completion: these two are handled before parsing, by the service, and the flags of
    # `serve` are its settings.
    subparsers.add_parser("serve", help="run the service; convgrad serve --help shows its settings")
    add_key_flags(subparsers.add_parser("keys", help="create an API key for a service"))
    return top


def _add_run(command: argparse.ArgumentParser) -> None:
    _add_call(command)
    add = command.add_argument
    add(
        "-o",
        "--output",
        action="append",
        metavar="FILE",
        help=".npy file of the output, or .npz of all; - is standard output; of a graph ID=FILE",
    )
    _add_graph(command)
    _add_outputs(command)
    _add_algorithm(command)
    _add_local(command)
    add("--reference", action="store_true", help="use the slow kernel that accumulates in float64")
    _add_reproducible(command)
    add("--deadline", type=float, metavar="S", help="stop the computation after S seconds")
    add("--detach", action="store_true", help="have the service keep the call as a job, and print its id")
    add("--idempotency-key", metavar="KEY", help="of a job: the same key with the same call is the same job")
    add("-q", "--quiet", action="store_true", help="print errors only")


def _add_jobs(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("job", metavar="JOB", nargs="?", help="id of a job (default: list them)")
    add(
        "-o", "--output", metavar="FILE", help="wait, and write the result: .npy, .npz of several, or .json of a report"
    )
    add("--cancel", action="store_true", help="cancel the job, or delete one that has ended")
    add("-q", "--quiet", action="store_true", help="print errors only")


def _add_graph(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--graph", type=Path, metavar="FILE", help="a graph dumped by oneDNN Graph; inputs are --input ID=FILE"
    )


def _add_validate(command: argparse.ArgumentParser) -> None:
    _add_call(command)
    _add_graph(command)
    _add_outputs(command)
    _add_algorithm(command)
    _add_reproducible(command)


def _add_local(command: argparse.ArgumentParser, *, default: bool = False) -> None:
    """Add `--local`, which is the `default` unless an address is given, in a flag or in the environment."""
    text = "compute in this process" + (", as without an address" if default else "")
    command.add_argument("--local", action="store_true", default=None if default else False, help=text)


def _add_outputs(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--outputs", type=names, metavar="NAME,..", help="what to compute, such as diff_weights,diff_bias,diff_src"
    )


def _add_reproducible(command: argparse.ArgumentParser) -> None:
    text = "the same bits on every kind of processor, more slowly"
    command.add_argument("--reproducible", action="store_true", help=text)


def _add_algorithm(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--algorithm",
        choices=["direct", "winograd", "auto"],
        help="how convolutions are summed (default: direct; auto: the faster one)",
    )


def _add_verify(command: argparse.ArgumentParser) -> None:
    _add_call(command)
    add = command.add_argument
    add(
        "--result",
        action="append",
        required=True,
        metavar="FILE",
        help=".npy file of the result to verify; of a graph ID=FILE",
    )
    _add_graph(command)
    _add_judged(command)
    add("--explain", action="store_true", help="test every hypothesis about the errors, even if the result passes")
    add(
        "--fast",
        action="store_true",
        default=None,
        help="verify by random projections, even if the reference is not too slow",
    )
    add("--png", metavar="FILE", help="draw the errors by tap, channel and ULP")
    add("--junit", metavar="FILE", help="write the verdict as JUnit XML")


def _add_judged(command: argparse.ArgumentParser) -> None:
    """Add the flags of what is judged: verify and tolerance have them."""
    add = command.add_argument
    add("--outputs", metavar="NAME", dest="output", help="what the result is, such as diff_bias")
    _add_local(command, default=True)
    _add_arithmetic(command)
    add("--deadline", type=float, metavar="S", help="stop the computation after S seconds")
    add("-q", "--quiet", action="store_true", help="print errors only")


def _add_arithmetic(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--arithmetic",
        action="append",
        metavar="NAME=VALUE",
        help="what the kernel says of itself, such as products=tf32 or algorithm='winograd F(4, 3)' (repeatable)",
    )


def _add_tolerance(command: argparse.ArgumentParser) -> None:
    _add_call(command)
    text = "write a .npz, .json or .h (a C header) file (repeatable)"
    command.add_argument("-o", "--output", action="append", metavar="FILE", dest="files", help=text)
    _add_judged(command)


_KERNELS = """KERNEL is one of
  module:function          a Python function; file.py:function, too
  library.so[:function]    a shared library with the function of convgrad/kernel.h
  "command:PROGRAM ARGS"   a program that reads and writes .npy files in a folder
  http://HOST:PORT[/rpc]   a server of the Open Inference Protocol, or of JSON-RPC
  torch, torch:cuda, jax, onnxruntime   the operations of a framework
"""


def _add_check(command: argparse.ArgumentParser) -> None:
    command.epilog = f"{_KERNELS}\n{_EPILOG}"
    add = command.add_argument
    add("kernel", metavar="KERNEL", nargs="?", help="what to check, see below")
    add("--ops", action="append", metavar="OP,..", help="operations (default: all that the kernel takes)")
    add("--dtypes", action="append", metavar="D,..", help="of f32, f16, bf16 and f64 (default: f32 for functions)")
    add("--takes", action="append", metavar="NAME=VALUE", help="what the kernel takes, such as ranks=2 or groups=false")
    _add_arithmetic(command)
    add(
        "--arrays",
        metavar="KIND",
        help="what a function gets: numpy, torch, torch:cuda, jax, cupy, .. (default: numpy)",
    )
    add("--seconds", type=_positive, default=60.0, metavar="S", help="how long to try new cases (default: 60)")
    add("--cases", type=int, metavar="N", help="stop after N cases, however long they take")
    add("--seed", type=int, metavar="N", help="draw the same cases again (default: a new seed, which is printed)")
    add(
        "--only",
        action="append",
        metavar="WHAT,..",
        help="kinds of data, traps, layers, issues, large, part of the name of one, or the number of a case",
    )
    add("--suite", metavar="NAME", help="the fixed problems of backward-40, with a score and seconds beside convgrad's")
    add("--shapes", metavar="FILE", help="the problems of a file of benchdnn, oneDNN's test program, instead")
    add("--skip", action="append", metavar="WHAT,..", help="kinds of data, or relations such as repeat or alignment")
    add("--limit", type=_positive, default=20.0, metavar="S", help="seconds that one call may take (default: 20)")
    add("--resume", metavar="FILE", help="go on from the JSON report of an earlier check")
    add("--html", metavar="FILE", help="write the report as a page with pictures and reproducers")
    add("--report", metavar="FILE", help="write the report as JSON, for --resume, --compare and --verify-signature")
    add("--junit", metavar="FILE", help="write the report as JUnit XML")
    add("--scripts", metavar="FOLDER", help="write a script that reproduces each fault")
    add(
        "--compare",
        nargs=2,
        metavar=("OLD", "NEW"),
        help="compare two JSON reports: what broke, what is slower",
    )
    add(
        "--sealed",
        nargs="?",
        const="",
        metavar="URL",
        help="a check whose cases the service at URL draws, judges and signs (50 cases); without one, a self-test",
    )
    add("--verify-signature", metavar="FILE", help="verify the signature of the report of a sealed check")
    text = "the key that must have signed it: base64, or a file with the reply of /v1/checks/key"
    add("--public-key", metavar="KEY", help=text)
    add("--kernel-api-key", metavar="KEY", help="key of the server that is checked")
    _add_local(command, default=True)
    add("-q", "--quiet", action="store_true", help="print errors only")


def _positive(text: str) -> float:
    """Parse a positive number of seconds; raises `ValueError`."""
    found = float(text)
    if not 0 < found < 1e9:
        raise ValueError
    return found


def _add_describe(command: argparse.ArgumentParser) -> None:
    command.add_argument("op", metavar="OP", help="name or alias of the operation")


def _add_completion(command: argparse.ArgumentParser) -> None:
    command.add_argument("shell", metavar="SHELL", choices=SHELLS, help=" or ".join(SHELLS))


def _add_bench(command: argparse.ArgumentParser) -> None:
    _add_call(command)
    _add_algorithm(command)
    add = command.add_argument
    add("--seconds", type=float, default=5.0, metavar="S", help="how long to measure (default: 5)")
    add("--clients", type=int, default=1, metavar="N", help="concurrent calls (default: 1)")


def _add_call(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("op", metavar="OP", nargs="?", help="name or alias of the operation, unless the spec has it")
    add(
        "--spec",
        type=Path,
        metavar="FILE",
        help="JSON file of the call, or an op dumped by oneDNN Graph",
    )
    add(
        "--attr",
        action="append",
        type=attribute,
        dest="attributes",
        metavar="NAME=VALUE",
        help="an attribute, such as strides=2,2",
    )
    add("--dtype", choices=["f32", "f16", "bf16"], help="dtype of the files; needed for bf16 stored as <u2")
    tensors = command.add_argument_group("inputs", _FILES)
    for name in TENSORS:
        tensors.add_argument(f"--{name.replace('_', '-')}", metavar="FILE")
    for name in SHAPES:
        tensors.add_argument(f"--{name.replace('_', '-')}", type=integers, metavar="N,N,..")
    tensors.add_argument(
        "--input", action="append", type=named, dest="inputs", metavar="NAME=FILE", help="any other input"
    )


def _add_connection(command: argparse.ArgumentParser) -> None:
    add = command.add_argument_group("service").add_argument
    add("--url", default=_variable("URL"), help=f"address ($CONVGRAD_URL; default: {DEFAULT_URL})")
    add("--uds", default=_variable("UDS"), metavar="PATH", help="Unix socket ($CONVGRAD_UDS)")
    add("--api-key", default=_variable("API_KEY"), metavar="KEY", help="key ($CONVGRAD_API_KEY)")
    add(
        "--cacert",
        default=_variable("CACERT"),
        metavar="FILE",
        help="PEM file of the authorities to trust ($CONVGRAD_CACERT)",
    )
    add("--cert", default=_variable("CERT"), metavar="FILE", help="client certificate, PEM ($CONVGRAD_CERT)")
    add(
        "--key",
        default=_variable("CERT_KEY"),
        metavar="FILE",
        help="its key, if in another file ($CONVGRAD_CERT_KEY)",
    )
    add("--timeout", type=float, metavar="S", help="seconds to wait for data from the service")
    add("--wait", type=float, metavar="S", help="first wait up to S seconds until the service is ready")
    add("--json", action="store_true", help="print JSON, and errors as one line of JSON")


def _variable(name: str) -> str | None:
    """Read an environment variable; an empty one counts as unset."""
    return os.environ.get(f"CONVGRAD_{name}") or None


def _add_mcp(command: argparse.ArgumentParser) -> None:
    text = "folder whose .npy files the tools may read, and where they write results (default: none)"
    command.add_argument("--root", type=Path, metavar="FOLDER", help=text)


def _add_nothing(command: argparse.ArgumentParser) -> None:
    """Add no flags."""


COMMANDS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], Any]]] = {
    "run": ("compute an operation on .npy files", _add_run),
    "validate": ("check a call without computing it", _add_validate),
    "verify": ("compare a result of your own with the float64 reference", _add_verify),
    "tolerance": ("say how far honest results may be from the float64 reference", _add_tolerance),
    "check": ("check a whole kernel on problems of all kinds", _add_check),
    "jobs": ("list jobs, wait for the result of one, or cancel it", _add_jobs),
    "ops": ("list the operations", _add_nothing),
    "describe": ("show an operation's attributes, inputs and outputs", _add_describe),
    "health": ("ask whether the service accepts calls", _add_nothing),
    "bench": ("measure a running service with one call, by default of a 3x3 layer", _add_bench),
    "mcp": ("serve the tools of the Model Context Protocol on standard input and output", _add_mcp),
    "completion": (
        "print a script for completion in a shell, with how to install it",
        _add_completion,
    ),
}
"""The help and the flags of each subcommand but `serve` and `keys`."""
