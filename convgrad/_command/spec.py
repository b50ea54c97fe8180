"""Calls on the command line: files, `name=value`, and specs in JSON files or oneDNN Graph dumps."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from convgrad._tensors import NpyFile

__all__ = [
    "ATTRIBUTES",
    "OPERATIONS",
    "SHAPES",
    "TENSORS",
    "CallSpec",
    "attribute",
    "integers",
    "named",
    "names",
    "parse_spec",
    "read_spec",
    "tensor",
]

# The names of the operations' inputs, in both dialects; each has its own flag.
TENSORS = ("src", "diff_dst", "weights", "bias", "input_forward", "output_delta", "filter")
SHAPES = ("weights_shape", "filter_shape", "dst_shape", "output_shape")

# For shell completion; a test compares them with the tables of the service.
OPERATIONS = (
    "ConvTransposeBackwardWeights",
    "ConvolutionBackwardWeights",
    "ConvTranspose",
    "Convolution",
    "ConvolutionBackwardData",
    "ConvTransposeBackwardData",
    "BiasAdd",
    "BiasAddBackward",
)
ATTRIBUTES = (
    "strides",
    "pads_begin",
    "pads_end",
    "dilations",
    "auto_pad",
    "output_padding",
    "groups",
    "data_format",
    "weights_format",
    "weights_shape",
    "dst_shape",
)

# A single number for one of these is a list of one number.
_LISTS = frozenset(
    {
        "strides",
        "dilations",
        "pads_begin",
        "pads_end",
        "output_padding",
        *SHAPES,
    }
)
_INTEGERS = re.compile(r"-?[0-9]+(,-?[0-9]+)*,?")
_DESCRIBED = re.compile(r"(f32|f16|bf16|f64):([0-9]+(?:,[0-9]+)*)")


@dataclass(frozen=True, slots=True)
class CallSpec:
    """A call to make; `attributes` may be a dumped op, which the service reads itself."""

    op: str | None = None
    attributes: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    def with_more(self, op: str | None, attributes: Mapping[str, Any], inputs: Mapping[str, Any]) -> CallSpec:
        """Return the spec with what the command line adds or overrides."""
        key = "attrs" if _is_dump(self.attributes) else None
        inner = {**self.attributes.get("attrs", {}), **attributes} if key else attributes
        merged = {**self.attributes, **({key: inner} if key else inner)}
        return replace(self, op=op or self.op, attributes=merged, inputs={**self.inputs, **inputs})


def read_spec(path: Path) -> CallSpec:
    """Read a spec file: `{"op", "attributes", "inputs", "options"}`, or an op as dumped by oneDNN Graph.

    Inputs of the first form are paths relative to the spec's folder, lists, or dtype and shape. Raises `ValueError`
    when the file is neither, and `OSError` when it can't be read.
    """
    return parse_spec(path.read_bytes(), str(path), path.parent)


def parse_spec(text: bytes, name: str, folder: Path) -> CallSpec:
    """Parse a spec like `read_spec`: `name` is for errors, and its paths are relative to `folder`."""
    try:
        spec = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} must be JSON") from error
    spec = _only_op(spec)
    if not isinstance(spec, dict):
        raise ValueError(f"{name} must be a JSON object, or a dumped graph of one op")
    if _is_dump(spec):
        return CallSpec(op=spec.get("kind"), attributes=spec)
    members = {key: {} if spec.get(key) is None else spec[key] for key in ("attributes", "inputs", "options")}
    unknown = set(spec) - {"op", *members}
    if unknown or not all(isinstance(value, dict) for value in members.values()):
        raise ValueError(f"{name} must have only `op` and the objects {', '.join(members)}")
    inputs = {key: _relative(value, folder) for key, value in members.pop("inputs").items()}
    return CallSpec(op=spec.get("op"), inputs=inputs, **members)


def attribute(text: str) -> tuple[str, Any]:
    """Parse `name=value`: an integer, a list of them as `2,2` or JSON, or a string."""
    name, value = named(text)
    if value[:1] in ("[", "{"):
        return name, json.loads(value)
    if not _INTEGERS.fullmatch(value):
        return name, value
    if name in _LISTS or "," in value:
        return name, integers(value)
    return name, int(value)


def named(text: str) -> tuple[str, str]:
    """Parse `name=value`; raises `ValueError` without a name or `=`."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise ValueError("must be name=value, such as strides=2,2")
    return name, value


def integers(text: str) -> list[int]:
    """Parse a list of integers such as `64,32,3,3`; raises `ValueError`."""
    return [int(part) for part in text.strip("[]").split(",") if part.strip()]


def names(text: str) -> list[str]:
    """Parse a list of names such as `diff_weights,diff_bias`; raises `ValueError` for an empty one."""
    found = [part.strip() for part in text.split(",")]
    if not all(found):
        raise ValueError("must be names, such as diff_weights,diff_bias")
    return found


def tensor(text: str, dtype: str | None = None) -> NpyFile | dict[str, Any]:
    """Parse a tensor: the path of a `.npy` file, or a dtype and shape as `f32:8,64,28,28`."""
    described = _DESCRIBED.fullmatch(text)
    if described is not None and not Path(text).exists():
        return {"dtype": described[1], "shape": integers(described[2])}
    return NpyFile(text, dtype)


def _is_dump(spec: Mapping[str, Any]) -> bool:
    return "kind" in spec or "attrs" in spec


def _only_op(spec: Any) -> Any:
    graph = spec.get("graph") if isinstance(spec, dict) else None
    return graph[0] if isinstance(graph, list) and len(graph) == 1 else spec


def _relative(value: Any, folder: Path) -> Any:
    return NpyFile(folder / value) if isinstance(value, str) else value
