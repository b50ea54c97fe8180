"""The subcommands that make a call: run, validate, verify, tolerance and bench."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from convgrad._arithmetic import parsed
from convgrad._client import Client
from convgrad._command.connection import connected, draws
from convgrad._command.exits import FAILED, say
from convgrad._command.measure import measure, random_tensor
from convgrad._command.spec import SHAPES, TENSORS, CallSpec
from convgrad._command.streams import STREAM, Source, check_output, show, write
from convgrad._dtypes import dtype_of_array
from convgrad._events import Array, Result
from convgrad._launch import install_hint
from convgrad._progress import ProgressBar
from convgrad._report import Report, junit
from convgrad._stream import OnProgress
from convgrad._tensors import NpyFile, part
from convgrad._tolerance import SUFFIXES

__all__ = ["bench", "run", "tolerance", "validate", "verify"]

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


def run(options: argparse.Namespace) -> int:
    """Compute an operation, or a graph, and write its outputs to files."""
    if options.detach:
        return _detach(options)
    if options.graph is not None:
        return _run_graph(options)
    options.output = options.output[-1] if options.output else None
    check_output(options.output)
    spec = _spec_of(options, Source(options.dtype))
    if any(isinstance(value, dict) for value in spec.inputs.values()):
        raise ValueError("run needs .npy files: a tensor given as dtype and shape is for validate and bench")
    several = len(_outputs_of(spec, options) or ()) > 1
    if several and options.output and not options.output.endswith(".npz"):
        raise ValueError("several outputs need a .npz file: give -o a name that ends in .npz")
    with connected(options) as client:
        result = _compute(client, spec, options)
    for warning in [] if options.json else result.warnings:
        say(f"warning: {warning}")
    first = next(iter(result.outputs))
    path = options.output or ("outputs.npz" if several else f"{first}.npy")
    if path.endswith(".npz"):
        np.savez(path, **result.outputs)  # type: ignore[arg-type] # no output is called allow_pickle
    else:
        write(path, result.outputs[first])
    if options.json and path != STREAM:
        outputs = {"outputs": list(result.outputs)} if several else {"output": first}
        warnings = {"warnings": list(result.warnings)} if result.warnings else {}
        show({**outputs, "file": path, "resolved": result.resolved, "stats": result.stats, **warnings}, options)
    elif not options.quiet:
        what = ", ".join(
            f"{name} {dtype_of_array(array).name} {list(array.shape)}" for name, array in result.outputs.items()
        )
        took = f"{result.stats.get('compute_ms', '?')} ms in {result.stats.get('kernel', '?')}"
        say(f"{what} -> {path} ({took})")
    return 0


def _outputs_of(spec: CallSpec, options: argparse.Namespace) -> list[str] | None:
    """Return the outputs requested on the command line, or else by the spec."""
    asked = options.outputs or spec.options.get("outputs")
    return asked if isinstance(asked, list) else None


def _algorithm_of(spec: CallSpec, options: argparse.Namespace) -> Any:
    """Return the algorithm requested on the command line, or else by the spec."""
    return options.algorithm or spec.options.get("algorithm") or "direct"


def _reproducible(spec: CallSpec, options: argparse.Namespace) -> bool:
    """Return whether the command line or the spec requests a `reproducible` result."""
    return bool(options.reproducible) or spec.options.get("reproducible") is True


def _detach(options: argparse.Namespace) -> int:
    """Have the service keep a call, or a graph, and print the id of the job."""
    source, key = Source(options.dtype), {"idempotency_key": options.idempotency_key}
    if options.graph is not None:
        graph, inputs = source.graph(options.graph), _graph_inputs(options, source)
        wanted = [_numbered(text)[0] for text in options.output or []]
        with connected(options) as client:
            job = client.submit_graph(graph, inputs, wanted or None, **_graph_settings(options), **key)
    else:
        spec = _spec_of(options, source)
        with connected(options) as client:
            job = client.submit(_op_of(spec), spec.inputs, spec.attributes, **_settings(spec, options), **key)
    if options.json:
        show(job.state, options)
    else:
        print(job.id)
    return 0


def _settings(spec: CallSpec, options: argparse.Namespace) -> dict[str, Any]:
    """Return what a call takes besides its inputs and attributes."""
    settings: dict[str, Any] = {"reference": options.reference, "deadline": options.deadline}
    settings |= {"outputs": _outputs_of(spec, options), "algorithm": _algorithm_of(spec, options)}
    return settings | {"reproducible": _reproducible(spec, options)}


def _graph_settings(options: argparse.Namespace) -> dict[str, Any]:
    settings: dict[str, Any] = {"reference": options.reference, "deadline": options.deadline}
    return settings | {"algorithm": options.algorithm or "direct", "reproducible": options.reproducible}


def _compute(client: Client, spec: CallSpec, options: argparse.Namespace) -> Result:
    op, settings = _op_of(spec), _settings(spec, options)
    # Without a progress bar the call can be retried when its reply breaks off.
    if not draws(options):
        return client.run_detailed(op, spec.inputs, spec.attributes, **settings)
    with (
        ProgressBar(sys.stderr, op) as bar,
        client.stream(op, spec.inputs, spec.attributes, **settings, on_upload=bar.uploading) as stream,
    ):
        for event in stream:
            bar.computing(event)
        return stream.details()


def _run_graph(options: argparse.Namespace) -> int:
    source = Source(options.dtype)
    files = dict(_numbered(text) for text in options.output or [])
    for path in files.values():
        check_output(path)
    graph, inputs = source.graph(options.graph), _graph_inputs(options, source)
    with connected(options) as client:
        found = client.run_graph(graph, inputs, list(files) or None, **_graph_settings(options))
    for number, array in found.items():
        path = files.get(number, f"{number}.npy")
        write(path, array)
        if not options.quiet:
            say(f"tensor {number} {dtype_of_array(array).name} {list(array.shape)} -> {path}")
    return 0


def _graph_inputs(options: argparse.Namespace, source: Source) -> dict[int, NpyFile | Array]:
    return {number: source.file(path) for number, path in map(_numbered_pair, options.inputs or [])}


def _numbered(text: str) -> tuple[int, str]:
    """Parse ID=FILE."""
    number, equals, path = text.partition("=")
    if not (number.isascii() and number.isdecimal() and equals and path):
        raise ValueError("with --graph, inputs and outputs must be ID=FILE, such as --output 7=dw.npy")
    return int(number), path


def _numbered_pair(pair: tuple[str, str]) -> tuple[int, str]:
    return _numbered("=".join(pair))


def validate(options: argparse.Namespace) -> int:
    """Check a call, or a graph, without computing it."""
    source = Source(options.dtype)
    if options.graph is not None:
        graph = source.graph(options.graph)
        with connected(options) as client:
            asked: dict[str, Any] = {"algorithm": options.algorithm or "direct", "reproducible": options.reproducible}
            show(client.validate_graph(graph, **asked), options)
        return 0
    spec = _spec_of(options, source)
    with connected(options) as client:
        asked = {"outputs": _outputs_of(spec, options), "algorithm": _algorithm_of(spec, options)}
        asked["reproducible"] = _reproducible(spec, options)
        show(client.validate(_op_of(spec), spec.inputs, spec.attributes, **asked), options)
    return 0


def verify(options: argparse.Namespace) -> int:
    """Compare results with the float64 reference; the exit code says whether all pass."""
    if options.png and find_spec("matplotlib") is None:
        raise ValueError(f"--png needs matplotlib: {install_hint('plot')}")
    reports = _verified(options) if options.graph is None else _verified_graph(options)
    if options.png:
        for name, report in reports.items():
            report.save_png(_beside(options.png, name, len(reports)))
    if options.junit:
        Path(options.junit).write_text(junit(reports), encoding="utf-8")
    if options.json:
        data = {name: report.data for name, report in reports.items()}
        show(data if options.graph is not None else next(iter(data.values())), options)
    elif not options.quiet:
        print("\n".join(report.text() for report in reports.values()))
    return 0 if all(report.passed for report in reports.values()) else FAILED


def _verified(options: argparse.Namespace) -> dict[str, Report]:
    source = Source(options.dtype)
    spec = _spec_of(options, source)
    result = source.tensor(options.result[-1])
    if isinstance(result, dict):
        raise ValueError("--result must be a .npy file")
    op = _op_of(spec)
    with connected(options) as client, _bar(options, op) as on_progress:
        settings = {"output": options.output, "explain": options.explain, "fast": options.fast}
        settings |= {"arithmetic": parsed(options.arithmetic), "deadline": options.deadline, "on_progress": on_progress}
        return {op: client.verify(op, spec.inputs, result, spec.attributes, **settings)}


def tolerance(options: argparse.Namespace) -> int:
    """Print the tolerance of the results of a call, and write it to files."""
    for path in options.files or ():
        if Path(path).suffix not in SUFFIXES:
            raise ValueError(f"-o must be a file that ends in {', '.join(SUFFIXES)}, but is {path}")
    spec = _spec_of(options, Source(options.dtype))
    if any(isinstance(value, dict) for value in spec.inputs.values()):
        raise ValueError("tolerance needs .npy files: it is for these data")
    op = _op_of(spec)
    with connected(options) as client, _bar(options, op) as on_progress:
        settings = {"output": options.output, "arithmetic": parsed(options.arithmetic), "deadline": options.deadline}
        found = client.tolerance(op, spec.inputs, spec.attributes, **settings, on_progress=on_progress)
    for path in options.files or ():
        found.save(path)
    if options.json:
        show(found.data, options)
    elif not options.quiet:
        print(found.text())
    return 0


def _verified_graph(options: argparse.Namespace) -> dict[str, Report]:
    source = Source(options.dtype)
    graph, inputs = source.graph(options.graph), _graph_inputs(options, source)
    results = {number: source.file(path) for number, path in map(_numbered, options.result)}
    with connected(options) as client, _bar(options, "verify") as on_progress:
        settings: Any = {
            "explain": options.explain,
            "fast": options.fast,
            "deadline": options.deadline,
            "on_progress": on_progress,
        }
        reports = client.verify_graph(graph, inputs, results, **settings)
    return {f"tensor {number}": report for number, report in reports.items()}


@contextmanager
def _bar(options: argparse.Namespace, label: str) -> Iterator[OnProgress | None]:
    """Draw the progress of the computation in the block, if a bar is wanted."""
    if not draws(options):
        yield None
        return
    with ProgressBar(sys.stderr, label) as bar:
        yield bar.computing


def _beside(path: str, name: str, count: int) -> Path:
    """Return the path of one picture; if there are several, it contains the name of the report."""
    whole = Path(path)
    return whole if count == 1 else whole.with_stem(f"{whole.stem}-{name.replace(' ', '-')}")


def bench(options: argparse.Namespace) -> int:
    """Measure a running service with one call, repeated."""
    spec = _spec_of(options, Source(options.dtype))
    spec = _BENCH if spec == CallSpec() else spec
    inputs = {name: _loaded(value) for name, value in spec.inputs.items()}
    sent = sum(part(value).nbytes for value in inputs.values() if not isinstance(value, list))
    algorithm = _algorithm_of(spec, options)
    with connected(options) as client:
        report = measure(
            lambda: client.run_detailed(_op_of(spec), inputs, spec.attributes, algorithm=algorithm),
            seconds=options.seconds,
            clients=options.clients,
        )
    show(report.summary(sent), options)
    return 0


def _spec_of(options: argparse.Namespace, source: Source) -> CallSpec:
    spec = source.spec(options.spec) if options.spec else CallSpec()
    inputs: dict[str, Any] = dict(options.inputs or [])
    inputs |= {name: value for name in TENSORS if (value := getattr(options, name)) is not None}
    tensors = {name: source.tensor(text) for name, text in inputs.items()}
    shapes = {name: value for name in SHAPES if (value := getattr(options, name)) is not None}
    return spec.with_more(options.op, dict(options.attributes or []), tensors | shapes)


def _op_of(spec: CallSpec) -> str:
    if not isinstance(spec.op, str):
        raise ValueError("no operation: give its name, or a spec with `op`")
    return spec.op


def _loaded(value: Any) -> Any:
    return random_tensor(value) if isinstance(value, dict) else value
