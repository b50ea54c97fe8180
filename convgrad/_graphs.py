"""Graphs dumped by oneDNN Graph: requests for them, and the replies with several tensors."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from convgrad._dtypes import DTYPES
from convgrad._errors import BrokenStream, ParseError, ProtocolError
from convgrad._events import Array
from convgrad._inference import json_bytes
from convgrad._multipart import Body, multipart
from convgrad._npy import parse_header
from convgrad._tensors import Tensor, part

__all__ = ["Dump", "GraphInputs", "attributes_of", "dump_of", "graph_body", "nodes_of", "outputs_of", "tensors_of"]

Dump = Mapping[str, Any] | str | os.PathLike[str]
"""A dumped graph, or the path of its JSON file."""

GraphInputs = Mapping[int, Tensor]
"""Tensors by the id of their logical tensor."""

_HEAD = re.compile(rb'name="([^"]{1,64})"')


def dump_of(graph: Dump) -> Mapping[str, Any]:
    """Return a dumped graph; raises `OSError` and `ValueError` for a file that can't be read or is not JSON."""
    if isinstance(graph, Mapping):
        return graph
    try:
        found = json.loads(Path(graph).read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{os.fspath(graph)} must be JSON") from error
    if not isinstance(found, dict):
        raise ValueError(f"{os.fspath(graph)} must be a JSON object with a list `graph`")
    return found


def graph_body(graph: Dump, inputs: GraphInputs, outputs: Sequence[int] | None, options: Mapping[str, Any]) -> Body:
    """Build the multipart body of a request for a graph."""
    tensors = {str(number): part(value) for number, value in inputs.items()}
    # A .npy file can't name bfloat16, so the request does.
    stated = {name: {"dtype": "bf16"} for name, sent in tensors.items() if sent.dtype.name == "bf16"}
    document: dict[str, Any] = {"graph": dump_of(graph), "inputs": stated, "options": options}
    if outputs is not None:
        document["outputs"] = list(outputs)
    return multipart(json_bytes(document), tensors)


def nodes_of(described: Mapping[str, Any], wanted: Iterable[int]) -> dict[int, Mapping[str, Any]]:
    """Return the node that computes each tensor, given the description of a valid graph.

    Raises `ValueError` for a tensor that no node computes, and `ProtocolError` for another description.
    """
    try:
        makers = {node["output"]: _checked(node) for node in described["nodes"]}
    except (AttributeError, LookupError, TypeError) as error:
        raise ProtocolError("the reply must have the nodes of the graph") from error
    unknown = [number for number in wanted if number not in makers]
    if unknown:
        known = ", ".join(map(str, sorted(makers)))
        raise ValueError(f"no node of the graph computes tensor {unknown[0]}: they compute {known}")
    return {number: makers[number] for number in wanted}


def _checked(node: Mapping[str, Any]) -> Mapping[str, Any]:
    """Check the members of a node that the client reads, and return the node."""
    op, inputs, resolved = node["op"], node["inputs"], node["resolved"]
    if isinstance(op, str) and isinstance(inputs, dict) and isinstance(resolved, dict):
        hash(frozenset(inputs.values()))
        return node
    raise TypeError("a node has an operation, inputs and attributes")


def attributes_of(node: Mapping[str, Any]) -> dict[str, Any]:
    """Return a node's attributes as those of a call."""
    return {name: value for name, value in node["resolved"].items() if name != "groups_axis"}


def outputs_of(content_type: str, body: bytes) -> tuple[dict[str, Any], dict[int, Array]]:
    """Return the JSON object and the tensors of the reply to a graph; raises `ProtocolError` for anything else."""
    reply, tensors = tensors_of(content_type, body, "outputs")
    try:
        return reply, {int(name): array for name, array in tensors.items()}
    except ValueError as error:
        raise ProtocolError("the tensors in the reply must be named by their ids") from error


def tensors_of(content_type: str, body: bytes, member: str) -> tuple[dict[str, Any], dict[str, Array]]:
    """Return the JSON object of a multipart reply, and the tensors that its `member` describes.

    Raises `ProtocolError` for anything else.
    """
    try:
        return _tensors_of(content_type, body, member)
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise ProtocolError(f"the reply must have a part for each of its {member}") from error


def _tensors_of(content_type: str, body: bytes, member: str) -> tuple[dict[str, Any], dict[str, Array]]:
    found = re.search(r'boundary="?([^";]+)', content_type)
    if not content_type.startswith("multipart/form-data") or found is None:
        raise ProtocolError("the reply must be multipart/form-data: is this a convgrad service?")
    limit = b"--" + found[1].encode()
    reply: dict[str, Any] = {}
    tensors: dict[str, Array] = {}
    at = body.find(limit)
    while at >= 0 and body[at + len(limit) : at + len(limit) + 2] == b"\r\n":
        start = body.find(b"\r\n\r\n", at) + 4
        name = _HEAD.search(body, at, start)
        if start < 4 or name is None:
            raise ProtocolError("every part of the reply must have a name")
        if name[1] == b"reply":
            end = body.find(b"\r\n" + limit, start)
            reply = json.loads(body[start:end])
            at = end + 2
        else:
            described = reply.get(member, {}).get(name[1].decode(), {})
            array, end = _array(memoryview(body)[start:], described.get("dtype"))
            tensors[name[1].decode()] = array
            at = start + end + 2
    if body[at + len(limit) : at + len(limit) + 2] != b"--" or set(tensors) != set(reply.get(member, {})):
        raise BrokenStream("the reply stopped before its end")
    return reply, tensors


def _array(data: memoryview, dtype: Any) -> tuple[Array, int]:
    """Return the array of a `.npy` file at the beginning of `data`, and the length of the file."""
    try:
        header = parse_header(data[:4096])
    except ParseError as error:
        raise ProtocolError("a tensor in the reply must be a .npy file") from error
    if header is None or dtype not in DTYPES:
        raise ProtocolError("a tensor in the reply must be a .npy file of a dtype that this version knows")
    end = header.offset + header.nbytes
    if len(data) < end:
        raise BrokenStream("the reply stopped before its end")
    array: Array = np.frombuffer(bytearray(data[header.offset : end]), DTYPES[dtype].numpy).reshape(header.shape)
    return array, end
