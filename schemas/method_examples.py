"""An example of every method of the APIs: its params and its result, for the documents.

Those of operations are computed (`schemas.examples`). `examples.json` has what only a service can compute: a report, a
plan, a sealed check. A test sends each example to a service and compares the results.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from schemas.describe import describe, example, list_operations
from schemas.examples import call_example, described, reply_example, verified_example
from schemas.tables import OPERATIONS, CalledOperation, find_operation

__all__ = ["EXAMPLE_OPERATION", "Example", "method_examples"]

_STATIC = Path(__file__).with_name("examples.json")

EXAMPLE_OPERATION = "ConvolutionBackwardWeights"
"""The operation that examples of other methods and pages name."""


class Example(NamedTuple):
    """The params of a method by name, or the body of a page, and the result."""

    params: Any
    result: Any


@cache
def method_examples() -> Mapping[str, Example]:
    """Return the example of each method by its name; don't modify them."""
    static = json.loads(_STATIC.read_text(encoding="utf-8"))
    plan, report, tolerance = (static.pop(name) for name in ("plan", "report", "tolerance"))
    found = [find_operation(row.name) for row in OPERATIONS]
    called = find_operation(EXAMPLE_OPERATION)
    op, reply = {"op": EXAMPLE_OPERATION}, reply_example(called)
    checked = {"op": called.called_as, "outputs": described(reply["outputs"]), "resolved": reply["resolved"]}
    signed = static["check.finish"]["result"]
    static["check.verify_signature"]["params"] = {"document": signed}
    return {
        **{
            row.name: Example(call_example(each), reply_example(each))
            for row, each in zip(OPERATIONS, found, strict=True)
        },
        "ops.list": Example({}, list_operations()),
        "ops.describe": Example(op, describe(EXAMPLE_OPERATION)),
        "ops.validate": Example(op | example(called), checked | {"plan": plan}),
        "ops.verify": Example(op | verified_example(called), report | {"resolved": reply["resolved"]}),
        "ops.tolerance": Example(op | call_example(called), tolerance | _exactly(reply)),
        **_of_graphs(),
        **_of_jobs(called),
        **{name: Example(**parts) for name, parts in static.items()},
        "rpc.discover": Example({}, {"openrpc": "1.3.2", "info": {"title": "convgrad"}, "methods": []}),
    }


def _exactly(reply: Mapping[str, Any]) -> dict[str, Any]:
    """Return the members of the tolerance of a call whose sums are exact, given its reply."""
    ((_, reference),) = reply["outputs"].items()
    zeros = json.loads(re.sub(r"[\d.]+", "0.0", json.dumps(reference["data"])))
    outputs = {"reference": reference, "tolerance": reference | {"data": zeros}}
    return {"outputs": outputs, "resolved": reply["resolved"]}


def _of_jobs(called: CalledOperation) -> dict[str, Example]:
    """Return the examples of a job: a call that is submitted and, when it is done, forgotten."""
    job, day = {"job": "5d41402abc4b2a76b9719d911017c592"}, "2026-11-29T0"
    state = {"kind": "compute", "op": called.called_as, "created": f"{day}2:00:00.000+00:00"}
    queued = {**job, "state": "queued", **state, "place": 1}
    done = {
        **job,
        "state": "done",
        **state,
        "finished": f"{day}2:00:01.000+00:00",
        "expires": "2026-11-30T02:00:01.000+00:00",
    }
    return {
        "jobs.submit": Example({"method": called.called_as, "params": call_example(called)}, queued),
        "jobs.get": Example(job, done),
        "jobs.result": Example(job, reply_example(called)),
        "jobs.list": Example({}, {"jobs": [done]}),
        "jobs.cancel": Example(job, done),
    }


def _of_graphs() -> dict[str, Example]:
    """Return the examples of a graph: a convolution, and a bias that is added to its result."""
    convolution, bias_add = find_operation("Convolution"), find_operation("BiasAdd")
    first, second = reply_example(convolution), reply_example(bias_add)
    given, dst = call_example(convolution)["inputs"], first["outputs"]["dst"]
    bias = call_example(bias_add)["inputs"]["bias"]
    added = [
        [[value + shift for value in line] for line in channel]
        for channel, shift in zip(dst["data"][0], bias["data"], strict=True)
    ]
    tensors = {0: given["src"], 1: given["weights"], 2: dst, 3: bias, 4: dst | {"data": [added]}}
    logical = {number: {"id": number, **tensor} for number, tensor in described(tensors).items()}
    places = ((0, "conv", convolution, (0, 1), 2), (1, "bias", bias_add, (2, 3), 4))
    nodes = [
        {
            "id": number,
            "name": name,
            "kind": called.operation.name,
            "attrs": _wrapped(called),
            "inputs": [logical[each] for each in inputs],
            "outputs": [logical[output]],
        }
        for number, name, called, inputs, output in places
    ]
    asked = {"graph": {"graph": nodes}}
    inputs = {str(number): tensors[number] for number in (0, 1, 3)}
    done = [
        {"id": number, "name": name, "op": reply["op"], "stats": reply["stats"], "resolved": reply["resolved"]}
        for (number, name, *_), reply in zip(places, (first, second), strict=True)
    ]
    checked = [
        {"id": number, "name": name, "op": called.operation.name, "output": output, "resolved": reply["resolved"]}
        for (number, name, called, _, output), reply in zip(places, (first, second), strict=True)
    ]
    return {
        "graph.run": Example(
            asked | {"inputs": inputs, "options": {"encoding": "list"}},
            {"nodes": done, "outputs": {"4": tensors[4]}},
        ),
        "graph.validate": Example(
            asked,
            {
                "valid": True,
                "inputs": [logical[number] for number in (0, 1, 3)],
                "outputs": [logical[4]],
                "nodes": checked,
            },
        ),
    }


def _wrapped(called: CalledOperation) -> dict[str, Any]:
    """Return the attributes of the call as oneDNN Graph dumps them."""
    kinds = called.operation.attribute
    attributes = call_example(called)["attributes"]
    return {name: {"type": kinds[name].kind, "value": value} for name, value in attributes.items()}
