"""What one element of an output sums, in words and as a drawing of the positions that are read."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np

from convgrad._errors import InvalidParams

__all__ = ["drawing", "explanation"]

Json = Mapping[str, Any]
Axis = dict[str, list[int]]

_CELL, _GAP, _MOST = 10, 20, 96
_COLOURS = np.array([[255, 255, 255], [216, 220, 226], [46, 110, 204], [204, 51, 63]], np.uint8)
"""Of the paper, of a position, of one that is read, of the element."""


def explanation(
    described: Json, found: Json, shapes: Mapping[str, Sequence[int]], element: Sequence[int]
) -> dict[str, Any]:
    """Return what an element sums: the members of `Explained`; raises `InvalidParams` for an index outside the output.

    `described` is the operation's table, `found` the reply of the call's validation, `shapes` those of the inputs.
    """
    ((output, spec), *_) = found["outputs"].items()
    shape = spec["shape"]
    if len(element) != len(shape) or not all(0 <= at < size for at, size in zip(element, shape, strict=True)):
        raise InvalidParams(f"element must be an index of {output}, whose shape is {shape}, but is {list(element)}")
    name = f"{output}{list(element)}"
    if "strides" not in found["resolved"]:
        parts = [each["name"] for each in described["inputs"]]
        total = 2 if len(parts) > 1 else prod(shapes[parts[0]]) // shape[0]
        return {
            "element": list(element),
            "terms": total,
            "sums": [],
            "text": f"{name} sums {total} of {' and '.join(parts)}",
        }
    call = _Call(described["operation"], found["resolved"], {**_by_role(shapes), _role(output): shape})
    sums = call.sums(_role(output), element)
    terms = prod([len(each["weights"]) for each in sums]) * call.channels(_role(output))
    lines = [f"{name} sums {terms} products, over {call.over(_role(output))} and, along each axis, these positions:"]
    lines += [_line(number, each) for number, each in enumerate(sums)]
    return {"element": list(element), "terms": terms, "sums": sums, "text": "\n".join(lines)}


class _Call:
    """The geometry of one call: sizes of src, weights and dst along each axis."""

    def __init__(self, op: str, resolved: Json, shapes: Mapping[str, Sequence[int]]) -> None:
        self._resolved = resolved
        self._shapes = {"weights": resolved.get("weights_shape", ()), **shapes}
        self._wide, self._narrow = ("dst", "src") if op.startswith("ConvTranspose") else ("src", "dst")

    def _spatial(self, role: str, values: Sequence[int]) -> list[int]:
        """Return the values of the spatial axes of a tensor."""
        rank = len(self._resolved["strides"])
        first = self._resolved["weights_format" if role == "weights" else "data_format"].index("X")
        return list(values[first : first + rank])

    def sums(self, role: str, element: Sequence[int]) -> list[Axis]:
        """Return, for each axis, the positions of src, weights and dst that are read together."""
        sizes = {each: self._spatial(each, self._shapes[each]) for each in ("src", "weights", "dst")}
        at, found = self._spatial(role, element), []
        for axis, (stride, pad, dilation) in enumerate(self._steps()):
            triples = [
                {self._wide: wide, "weights": tap, self._narrow: y}
                for tap in range(sizes["weights"][axis])
                for y in range(sizes[self._narrow][axis])
                if 0 <= (wide := y * stride - pad + tap * dilation) < sizes[self._wide][axis]
            ]
            read = [each for each in triples if each[role] == at[axis]]
            positions = {each: [triple[each] for triple in read] for each in sizes}
            found.append({**positions, "sizes": [sizes[each][axis] for each in sizes], "at": [at[axis]]})
        return found

    def _steps(self) -> list[tuple[int, int, int]]:
        names = ("strides", "pads_begin", "dilations")
        return list(zip(*(self._resolved[name] for name in names), strict=True))

    def channels(self, role: str) -> int:
        """Return how many images, or channels of one group, are summed."""
        if role == "weights":
            return int(self._shapes["src"][0])
        other = "src" if role == "dst" else "dst"
        place = -1 if self._resolved["data_format"] == "NXC" else 1
        return int(self._shapes[other][place]) // int(self._resolved["groups"])

    def over(self, role: str) -> str:
        """Return what is summed besides positions."""
        count = self.channels(role)
        if role == "weights":
            return f"{count} image{'s' * (count != 1)}"
        return f"{count} channel{'s' * (count != 1)} of {'src' if role == 'dst' else 'diff_dst'}"


def _role(name: str) -> str:
    return name.removeprefix("diff_")


def _by_role(shapes: Mapping[str, Sequence[int]]) -> dict[str, Sequence[int]]:
    return {_role(name): shape for name, shape in shapes.items() if _role(name) in ("src", "weights", "dst")}


def _line(number: int, axis: Axis) -> str:
    if not axis["weights"]:
        return f"axis {number}: none, every tap meets padding"
    return f"axis {number}: " + ", ".join(f"{role} {_range(axis[role])}" for role in ("src", "weights", "dst"))


def _range(positions: Sequence[int]) -> str:
    steps = {b - a for a, b in pairwise(positions)}
    if len(positions) > 2 and len(steps) == 1:
        (step,) = steps
        return f"{positions[0]}" if step == 0 else f"{positions[0]}, {positions[1]}, .. {positions[-1]}"
    return ", ".join(map(str, dict.fromkeys(positions)))


def drawing(explained: Json) -> str | None:
    """Return a PNG in base64: the last two axes of src, weights and dst, with the positions that are read.

    None for an operation without weights.
    """
    axes = explained["sums"][-2:]
    if not axes:
        return None
    planes = [_plane(axes, number, role) for number, role in enumerate(("src", "weights", "dst"))]
    height = max(len(plane) for plane in planes) + 2 * _GAP
    picture = np.zeros((height, sum(plane.shape[1] + _GAP for plane in planes) + _GAP), np.uint8)
    left = _GAP
    for plane in planes:
        picture[_GAP : _GAP + len(plane), left : left + plane.shape[1]] = plane
        left += plane.shape[1] + _GAP
    return base64.b64encode(_png(_COLOURS[picture])).decode()


def _plane(axes: Sequence[Json], number: int, role: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the cells of one tensor, as numbers of colours; of long axes the beginning."""
    rows, columns = axes if len(axes) == 2 else ({"sizes": [1, 1, 1], "at": [0], role: [0]}, axes[0])
    cells = np.ones((min(rows["sizes"][number], _MOST), min(columns["sizes"][number], _MOST)), np.uint8)
    read = np.ix_(*([at for at in each[role] if at < _MOST] for each in (rows, columns)))
    cells[read] = 2
    if all({*each[role]} == {*each["at"]} for each in (rows, columns)):  # the element's own tensor
        cells[read] = 3
    found = cells.repeat(_CELL, 0).repeat(_CELL, 1)
    found[::_CELL] = found[:, ::_CELL] = 0
    return found


def _png(pixels: np.ndarray[Any, np.dtype[np.uint8]]) -> bytes:
    height, width, _ = pixels.shape
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
