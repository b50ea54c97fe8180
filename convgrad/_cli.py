"""The command: `convgrad run|validate|verify|ops|describe|health|serve|bench`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from convgrad import _launch as launch
from convgrad._base import DEFAULT_TIMEOUT
from convgrad._bench import measure, random_tensor
from convgrad._client import Client
from convgrad._dtypes import dtype_of_array
from convgrad._errors import CallerError, ConvgradError, InvalidParams, ServiceError, TransportError
from convgrad._events import Array, Result
from convgrad._local import local
from convgrad._npy import write_header
from convgrad._options import Command, parser
from convgrad._progress import ProgressBar
from convgrad._report import Report, junit
from convgrad._spec import SHAPES, TENSORS, CallSpec, read_spec, tensor
from convgrad._tensors import NpyFile, part

__all__ = ["main"]

EXIT_CODES: dict[type[BaseException], int] = {
    CallerError: 3,
    ServiceError: 4,
    TransportError: 5,
    ConvgradError: 1,
    # As argparse itself: the command line, or a file, can't be used.
    OSError: 2,
    ValueError: 2,
    KeyboardInterrupt: 130,
}
# A medium 3x3 layer.
_BENCH = CallSpec(
    "ConvolutionBackwardWeights",
    {
        "strides": [1, 1],
        "dilations": [1, 1],
        "auto_pad": "same_upper",
        "data_format": "NCX",
        "weights_format": "OIX",
    },
    {
        "src": {"dtype": "f32", "shape": [8, 64, 28, 28]},
        "diff_dst": {"dtype": "f32", "shape": [8, 64, 28, 28]},
        "weights_shape": [64, 64, 3, 3],
    },
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["serve"]:
        return _serve(given[1:])
    options = parser(_COMMANDS).parse_args(given)
    command: Command = options.command
    try:
        return command(options)
    except tuple(EXIT_CODES) as error:
        return _failed(error)


def _run(options: argparse.Namespace) -> int:
    if options.graph is not None:
        return _run_graph(options)
    options.output = options.output[-1] if options.output else None
    spec = _spec_of(options)
    if any(isinstance(value, dict) for value in spec.inputs.values()):
        raise ValueError("run needs .npy files: a tensor given as dtype and shape is for validate and bench")
    several = len(_outputs_of(spec, options) or ()) > 1
    if several and options.output and not options.output.endswith(".npz"):
        raise ValueError("several outputs need a .npz file: give -o a name that ends so")
    with _client(options) as client:
        result = _compute(client, spec, options)
    for warning in result.warnings:
        _say(f"warning: {warning}")
    first = next(iter(result.outputs))
    path = options.output or ("outputs.npz" if several else f"{first}.npy")
    if path.endswith(".npz"):
        np.savez(path, **result.outputs)  # type: ignore[arg-type] # no output is called allow_pickle
    else:
        _write(path, result.outputs[first])
    if options.json and path != "-":
        outputs = {"outputs": list(result.outputs)} if several else {"output": first}
        _print({**outputs, "file": path, "resolved": result.resolved, "stats": result.stats}, options)
    elif not options.quiet:
        what = ", ".join(
            f"{name} {dtype_of_array(array).name} {list(array.shape)}" for name, array in result.outputs.items()
        )
        took = f"{result.stats.get('compute_ms', '?')} ms in {result.stats.get('kernel', '?')}"
        _say(f"{what} -> {path} ({took})")
    return 0


def _outputs_of(spec: CallSpec, options: argparse.Namespace) -> list[str] | None:
    """Return the outputs that the command line, or else the spec, asks for."""
    asked = options.outputs or spec.options.get("outputs")
    return asked if isinstance(asked, list) else None


def _compute(client: Client, spec: CallSpec, options: argparse.Namespace) -> Result:
    op = _op_of(spec)
    settings: dict[str, Any] = {"reference": options.reference, "deadline": options.deadline}
    settings["outputs"] = _outputs_of(spec, options)
    # Without a progress bar the call can be retried when its reply breaks off.
    if options.quiet or not sys.stderr.isatty():
        return client.run_detailed(op, spec.inputs, spec.attributes, **settings)
    with ProgressBar(sys.stderr, op) as bar, client.stream(op, spec.inputs, spec.attributes, **settings) as stream:
        for event in stream:
            bar.show(event)
        return stream.details()


def _run_graph(options: argparse.Namespace) -> int:
    files = dict(_numbered(text) for text in options.output or [])
    inputs = {number: NpyFile(path, options.dtype) for number, path in map(_numbered_pair, options.inputs or [])}
    with _client(options) as client:
        settings: dict[str, Any] = {"reference": options.reference, "deadline": options.deadline}
        found = client.run_graph(options.graph, inputs, list(files) or None, **settings)
    for number, array in found.items():
        path = files.get(number, f"{number}.npy")
        _write(path, array)
        if not options.quiet:
            _say(f"tensor {number} {dtype_of_array(array).name} {list(array.shape)} -> {path}")
    return 0


def _numbered(text: str) -> tuple[int, str]:
    """Parse ID=FILE."""
    number, equals, path = text.partition("=")
    if not (number.isascii() and number.isdecimal() and equals and path):
        raise ValueError("with --graph, inputs and outputs must be ID=FILE, such as --output 7=dw.npy")
    return int(number), path


def _numbered_pair(pair: tuple[str, str]) -> tuple[int, str]:
    return _numbered("=".join(pair))


def _validate(options: argparse.Namespace) -> int:
    if options.graph is not None:
        with _client(options) as client:
            _print(client.validate_graph(options.graph), options)
        return 0
    spec = _spec_of(options)
    with _client(options) as client:
        asked = _outputs_of(spec, options)
        _print(client.validate(_op_of(spec), spec.inputs, spec.attributes, outputs=asked), options)
    return 0


def _verify(options: argparse.Namespace) -> int:
    if options.png and find_spec("matplotlib") is None:
        raise ValueError("--png needs matplotlib: pip install 'convgrad[plot]'")
    with _client(options) as client:
        if options.graph is not None:
            reports = _verified_graph(client, options)
        else:
            spec = _spec_of(options)
            result = tensor(options.result[-1], options.dtype)
            if isinstance(result, dict):
                raise ValueError("--result must be a .npy file")
            settings = {"output": options.output, "deadline": options.deadline}
            op = _op_of(spec)
            reports = {op: client.verify(op, spec.inputs, result, spec.attributes, **settings)}
    if options.png:
        for name, report in reports.items():
            report.save_png(_beside(options.png, name, len(reports)))
    if options.junit:
        Path(options.junit).write_text(junit(reports), encoding="utf-8")
    if options.json:
        data = {name: report.data for name, report in reports.items()}
        _print(data if options.graph is not None else next(iter(data.values())), options)
    elif not options.quiet:
        print("\n".join(report.text() for report in reports.values()))
    return 0 if all(report.passed for report in reports.values()) else 1


def _verified_graph(client: Client, options: argparse.Namespace) -> dict[str, Report]:
    inputs = {number: NpyFile(path, options.dtype) for number, path in map(_numbered_pair, options.inputs or [])}
    results = {number: NpyFile(path, options.dtype) for number, path in map(_numbered, options.result)}
    reports = client.verify_graph(options.graph, inputs, results, deadline=options.deadline)
    return {f"tensor {number}": report for number, report in reports.items()}


def _beside(path: str, name: str, count: int) -> Path:
    """Return the path of one picture: with several, the name of each is part of its file's."""
    whole = Path(path)
    return whole if count == 1 else whole.with_stem(f"{whole.stem}-{name.replace(' ', '-')}")


def _ops(options: argparse.Namespace) -> int:
    with _client(options) as client:
        listed = client.operations()
    if options.json:
        _print(listed, options)
        return 0
    for entry in listed:
        print(entry["op"], "-", entry["summary"])
        print("   ", "also", ", ".join(entry["aliases"]))
    return 0


def _describe(options: argparse.Namespace) -> int:
    with _client(options) as client:
        table = client.describe(options.op)
    if options.json:
        _print(table, options)
    else:
        print("\n".join(_page(table)))
    return 0


def _health(options: argparse.Namespace) -> int:
    with _client(options) as client:
        health = client.wait_until_ready(options.wait) if options.wait else client.health()
    _print(dict(health.detail), options)
    return 0 if health.ready else EXIT_CODES[ServiceError]


def _bench(options: argparse.Namespace) -> int:
    spec = _spec_of(options)
    spec = _BENCH if spec == CallSpec() else spec
    inputs = {name: _loaded(value) for name, value in spec.inputs.items()}
    sent = sum(part(value).nbytes for value in inputs.values() if not isinstance(value, list))
    with _client(options) as client:
        report = measure(
            lambda: client.run_detailed(_op_of(spec), inputs, spec.attributes),
            seconds=options.seconds,
            clients=options.clients,
        )
    _print(report.summary(sent), options)
    return 0


def _serve(arguments: Sequence[str]) -> int:
    try:
        root = launch.service_root()
    except launch.NotInstalled as error:
        _say(str(error))
        return 2
    # The service replaces this process, so that it receives the signals of a supervisor.
    return os.execve(sys.executable, launch.command(arguments), launch.environment(root, os.environ))  # noqa: S606


def _spec_of(options: argparse.Namespace) -> CallSpec:
    spec = read_spec(options.spec) if options.spec else CallSpec()
    inputs: dict[str, Any] = dict(options.inputs or [])
    inputs |= {name: value for name in TENSORS if (value := getattr(options, name)) is not None}
    tensors = {name: tensor(text, options.dtype) for name, text in inputs.items()}
    shapes = {name: value for name in SHAPES if (value := getattr(options, name)) is not None}
    return spec.with_more(options.op, dict(options.attributes or []), tensors | shapes)


def _op_of(spec: CallSpec) -> str:
    if not isinstance(spec.op, str):
        raise ValueError("no operation: give its name, or a spec with `op`")
    return spec.op


def _loaded(value: Any) -> Any:
    return random_tensor(value) if isinstance(value, dict) else value


def _client(options: argparse.Namespace) -> Client:
    timeout = DEFAULT_TIMEOUT if options.timeout is None else options.timeout
    if getattr(options, "local", False):
        return local(timeout=timeout, progress=False if options.quiet else None).open()
    return Client(options.url, api_key=options.api_key, uds=options.uds, timeout=timeout)


def _write(path: str, array: Array) -> None:
    # numpy.save can't write to a pipe.
    header = write_header(dtype_of_array(array), array.shape)
    pieces: list[bytes | memoryview] = [header, array.reshape(-1).view(np.uint8).data]
    if path == "-":
        for piece in pieces:
            sys.stdout.buffer.write(piece)
        return
    with Path(path).open("wb") as file:
        file.writelines(pieces)


def _print(value: Any, options: argparse.Namespace) -> None:
    if options.json or not isinstance(value, dict):
        print(json.dumps(value, indent=2, ensure_ascii=False))
        return
    width = max(map(len, value), default=0)
    for name, member in value.items():
        print(f"{name:{width}}  {member if isinstance(member, str) else json.dumps(member)}")


def _page(table: Mapping[str, Any]) -> list[str]:
    """Return the lines of an operation's description."""
    lines = [table["op"], "  " + table["summary"], "  " + table["formula"]]
    for title in ("inputs", "outputs", "attributes"):
        lines += ["", title]
        lines += [f"  {row['name']:16} {_facts(row):28} {row['description']}" for row in table[title]]
    lines += ["", "weights layouts"]
    lines += [f"  {name:16} {', '.join(axes.values())}" for name, axes in table["layouts"]["weights"].items()]
    return lines


def _facts(row: Mapping[str, Any]) -> str:
    kind = row.get("type") or "/".join(row["dtypes"])
    default = "" if row.get("default") is None else f"= {row['default']}"
    return f"{kind} {'required' if row['required'] in (True, 'yes') else default}".strip()


def _failed(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        _say("interrupted")
    else:
        _say(str(error))
    for fault in error.errors if isinstance(error, InvalidParams) else []:
        _say(f"  {'.'.join(map(str, fault.get('loc', [])))}: {fault.get('msg', '')}")
    return next(code for cls, code in EXIT_CODES.items() if isinstance(error, cls))


def _say(message: str) -> None:
    print(f"convgrad: {message}", file=sys.stderr)


_COMMANDS: dict[str, Command] = {
    "run": _run,
    "validate": _validate,
    "verify": _verify,
    "ops": _ops,
    "describe": _describe,
    "health": _health,
    "bench": _bench,
}
