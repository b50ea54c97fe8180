"""The arithmetic of the page, run in Node, against `schemas`, the NumPy oracle and NumPy itself."""

from __future__ import annotations

import random
from math import prod
from typing import Any

import numpy as np
import pytest

from convgrad._errors import ConvgradError
from schemas.ops import ResolvedOp, resolve
from tests.problems import OPS, Case, random_case
from tests.web.answers import ask, layer_of


def changed(layer: dict[str, Any], dice: random.Random) -> dict[str, Any]:
    """Return a layer with one attribute changed, which may make it invalid."""
    lists = ("src", "kernel", "strides", "dilations", "pads_begin", "pads_end", "output_padding")
    name = dice.choice((*lists, "dst", "groups", "i", "auto_pad", "auto_pad", "auto_pad"))
    rank = len(layer["src"])
    if name == "auto_pad":
        return {**layer, name: dice.choice(("same_upper", "same_lower", "valid"))}
    if name in ("groups", "i"):
        return {**layer, name: dice.randrange(1, 7)}
    least = 1 if name not in ("pads_begin", "pads_end", "output_padding") else 0
    return {**layer, name: [dice.randrange(least, 7) for _ in range(rank)]}


def by_schemas(request: dict[str, Any]) -> ResolvedOp | None:
    """Resolve a request of the page; None if it is invalid."""
    try:
        return resolve(request["op"], request["attributes"], request["inputs"])
    except ConvgradError:
        return None


def layers(count: int, macs: int, seed: int = 5) -> list[dict[str, Any]]:
    """Return random layers."""
    rng = np.random.default_rng(seed)
    return [layer_of(random_case(rng, macs=macs)) for _ in range(count)]


def test_sizes() -> None:
    """A thousand layers, half of them changed at random, resolve as in `schemas`, or are invalid there too."""
    dice = random.Random(7)
    tried = [changed(layer, dice) if index % 2 else layer for index, layer in enumerate(layers(1000, 100_000))]
    invalid = 0
    for layer, found in zip(tried, ask([{"ask": "resolve", "layer": layer} for layer in tried]), strict=True):
        expected = by_schemas(found["request"])
        assert found["fits"] == (expected is not None), layer
        if expected is None:
            invalid += 1
            continue
        axes = found["axes"]
        assert tuple(axis["src"] for axis in axes) == expected.src_spatial, layer
        assert tuple(axis["dst"] for axis in axes) == expected.dst_spatial, layer
        assert found["macs"] == expected.macs, layer
        shapes = {spec.name: spec.shape for spec in (*expected.inputs, *expected.outputs)}
        for role, shape in found["shapes"].items():
            for name in (role, f"diff_{role}"):
                assert shapes.get(name, tuple(shape)) == tuple(shape), layer
        if layer["op"].startswith("Bias"):
            continue
        assert tuple(axis["begin"] for axis in axes) == expected.pads_begin, layer
        assert tuple(axis["end"] for axis in axes) == expected.pads_end, layer
        assert tuple(axis["extra"] for axis in axes) == expected.output_padding, layer
        assert tuple(found["shapes"]["weights"]) == expected.weights_shape, layer
    assert 50 < invalid < 400


def case_of(layer: dict[str, Any], resolved: dict[str, Any]) -> Case:
    """Return a layer as a case of the oracle."""
    of_bias = layer["op"].startswith("Bias")
    transposed = layer["op"].startswith("ConvTranspose")
    keys = ("op", "n", "kernel", "strides", "dilations", "pads_begin", "pads_end", "output_padding")
    same: dict[str, Any] = {key: layer[key] for key in (*keys, "data_format", "weights_format")}
    lists: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in same.items()}
    return Case(
        **lists,
        src_channels=layer["i"],
        dst_channels=layer["i"] if of_bias else layer["o"],
        groups=layer["i"] if of_bias else layer["groups"],
        src_spatial=tuple(axis["src"] for axis in resolved["axes"]),
        dst_spatial=tuple(axis["dst"] for axis in resolved["axes"]),
        groups_axis=("O" if layer["groups"] == 1 else layer["groups_axis"]) if transposed else "I",
        bias=layer["op"] == "BiasAdd",
    )


def tensors(layer: dict[str, Any], resolved: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Return integer inputs of a layer by name, in its formats."""
    computed = case_of(layer, resolved)
    roles = {"src": "src", "diff_dst": "dst", "weights": "weights", "bias": "weights"}
    needed = {
        "dst": ("src", "bias" if computed.of_bias else "weights"),
        "diff_src": ("diff_dst", "weights"),
        "diff_weights": ("src", "diff_dst"),
        "diff_bias": ("diff_dst",),
    }[output_of(layer)]
    return {name: rng.integers(-3, 4, resolved["shapes"][roles[name]]).astype(float) for name in needed}


def output_of(layer: dict[str, Any]) -> str:
    """Return the name of what an operation computes."""
    op = layer["op"]
    if op == "BiasAddBackward":
        return "diff_bias"
    return "diff_weights" if op.endswith("Weights") else "diff_src" if op.endswith("Data") else "dst"


def test_sums() -> None:
    """The products listed for each element are those of the oracle: bit for bit the same sums, and as many."""
    tried = layers(60, 1000, seed=11)
    answers = ask([{"ask": "sums", "layer": layer, "kind": "random"} for layer in tried])
    assert {layer["op"] for layer in tried} == set(OPS)
    for layer, found in zip(tried, answers, strict=True):
        resolved = found["resolved"]
        given = {
            name: np.array(numbers).reshape(
                resolved["shapes"]["weights" if name == "bias" else name.removeprefix("diff_")]
            )
            for name, numbers in found["inputs"].items()
        }
        case = case_of(layer, resolved)
        exact = case.exact(given)
        ones = case.exact({name: np.ones_like(values) for name, values in given.items()})
        assert len(found["sums"]) == exact.size
        for each in found["sums"]:
            index = tuple(each["index"])
            assert each["sum"] == exact[index], (layer, each)
            assert layer["op"] == "BiasAdd" or each["count"] == ones[index], (layer, each)


@pytest.mark.parametrize("which", ["output", "first", "second"])
def test_numpy_lines(which: str) -> None:
    """The lines of NumPy for all elements of one tensor compute the operation, whichever of its tensors it is."""
    roles = {
        "dst": ("dst", "src", "weights"),
        "diff_src": ("src", "dst", "weights"),
        "diff_weights": ("weights", "src", "dst"),
        "diff_bias": ("weights", "dst", "dst"),
    }
    rng = np.random.default_rng(3)
    tried = [layer for layer in layers(60, 800, seed=13) if prod(layer["src"]) * layer["i"] < 200]
    place = ["output", "first", "second"].index(which)
    questions = [{"ask": "lines", "layer": layer, "role": roles[output_of(layer)][place]} for layer in tried]
    for layer, found in zip(tried, ask(questions), strict=True):
        resolved = found["resolved"]
        given = tensors(layer, resolved, rng)
        exact = case_of(layer, resolved).exact(given)
        scope = {"np": np, output_of(layer): np.zeros(exact.shape), **given}
        if layer["op"] == "BiasAdd" and which != "output":
            # The lines of one input add only what that input contributes.
            other = "bias" if which == "first" else "src"
            exact = case_of(layer, resolved).exact({**given, other: np.zeros_like(given[other])})
        for line in found["lines"]:
            exec(line, scope)
        assert np.array_equal(scope[output_of(layer)], exact), (layer, found["lines"][:3])
