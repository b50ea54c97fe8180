"""Problems of benchdnn, oneDNN's test program, as lines of text: ``g1mb2ic16ih14oc32oh14kh3ph1n"name"``.

Parts that are omitted follow benchdnn's rules: two images, one group, dense taps (dilation 0), strides of 1; one of
padding and output size follows from the other; sizes of the first axis hold for the others where those have none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from convgrad._check.named import problem_of
from convgrad._check.problems import PER_AXIS, Problem, Takes, fitted

__all__ = ["Shapes", "fitting", "read_shapes"]

_PART = re.compile(r"(mb|[io][cdhw]|[ksdp][dhw]|g)(\d+)_?")
_AXES = "dhw"
_MACS = 1 << 28
_DEPTH = 8
"""Files that may include each other."""


@dataclass
class Shapes:
    """The problems of a file, written for Convolution, by name; and the names of the options that were not used."""

    problems: dict[str, dict[str, Any]] = field(default_factory=dict)
    ignored: set[str] = field(default_factory=set)
    _transposed: bool = False
    _batches: Sequence[int] = (0,)

    def read(self, path: Path, depth: int = 0) -> None:
        """Add the problems of a file, with the options so far."""
        self._transposed |= path.parent.name == "deconv"
        for number, words in _lines(path):
            try:
                for word in words:
                    self._add(word, path, depth)
            except (ValueError, OSError) as error:
                raise ValueError(f"{path}, line {number}: {error}") from error

    def _add(self, word: str, path: Path, depth: int) -> None:
        option, _, value = word.partition("=")
        if option == "--batch":
            if depth == _DEPTH:
                raise ValueError(f"more than {_DEPTH} files include each other")
            self.read(path.parent / value, depth + 1)
        elif option in ("--mb", "--reset"):
            if not re.fullmatch(r"[\d,]*", value):
                raise ValueError(f"{option} must be a number of images")
            self._batches = [int(each or 0) for each in value.split(",")]
        elif option in ("--conv", "--deconv"):
            self._transposed = option == "--deconv"
        elif word.startswith("-"):
            self.ignored.add(option)
        else:
            for images in self._batches:
                name, geometry = _problem(word, images, transposed=self._transposed)
                while self.problems.setdefault(name, geometry) != geometry:
                    name += "'"


def read_shapes(path: str) -> Shapes:
    """Read a file of benchdnn: problems, comments, `--batch` (more files), `--mb` and `--reset`; others are noted.

    Files in a folder `deconv`, and what follows `--deconv`, are transposed convolutions. Raises `ValueError` with the
    number of the line that can't be read, and `OSError`.
    """
    found = Shapes()
    found.read(Path(path))
    if not found.problems:
        raise ValueError(f"{path} has no problems")
    return found


def _lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the number and the words of each line, of which options may go on in the next one."""
    before, first = "", 0
    for number, line in enumerate([*path.read_text(encoding="utf-8").splitlines(), ""], 1):
        first = first if before else number
        text = before + re.sub(r"(^|\s)#.*", "", line).rstrip()
        before = text[:-1] if text.endswith("\\") else ""
        if not before:
            yield first, re.sub(r",\s+", ",", text).split()  # lists may have spaces


def _problem(text: str, images: int, *, transposed: bool) -> tuple[str, dict[str, Any]]:
    """Parse a problem descriptor, and return its name and its geometry."""
    parts, at = {"mb": 2, "g": 1}, 0
    while at < len(text) and (part := _PART.match(text, at)):
        parts[part[1]] = int(part[2])
        at = part.end()
    rest = text[at:]
    if rest and not rest.startswith("n"):
        raise ValueError(f'{rest[:20]!r} is no part of a problem, such as ic16, kh3 or n"name"')
    for name in ("ic", "oc", "g"):
        if parts.get(name, 0) < 1:
            raise ValueError(f"{name} must be given, and at least 1")
    letters = [axis for axis in _AXES if _has(parts, axis)]
    rank = 3 - _AXES.index(letters[0]) if letters else 0
    if not letters or len(letters) not in (1, rank):
        raise ValueError("the sizes of all axes, or of the first alone, must be given, such as ih14 or id4ih7iw7")
    axes = [_axis(parts, axis, transposed=transposed) for axis in letters] * (rank // len(letters))
    channels = (parts["oc"], parts["ic"]) if transposed else (parts["ic"], parts["oc"])
    geometry: dict[str, Any] = {
        "n": images or parts["mb"], "groups": parts["g"], "src_channels": channels[0], "dst_channels": channels[1],
        **dict(zip(("wide", *PER_AXIS), zip(*axes, strict=True), strict=True)),
    }  # fmt: skip
    Problem(op="Convolution", **geometry)
    return rest[1:].strip('"') or text, geometry


def _has(parts: dict[str, int], axis: str) -> bool:
    """Whether a problem has an axis: a size, a dilation or padding other than 0, or a stride other than 1."""
    return parts.get(f"s{axis}", 1) != 1 or any(parts.get(part + axis) for part in "iokdp")


def _axis(parts: dict[str, int], axis: str, *, transposed: bool) -> tuple[int, ...]:
    """Return (wide, kernel, stride, dilation, pads_begin, pads_end) of an axis, deduced where omitted."""
    i, o, k, stride, dilation = (parts.get(part + axis, int(part == "s")) for part in "ioksd")
    pad = parts.get(f"p{axis}")
    for name, size in (("i", i), ("k", k), ("s", stride)):
        if not size:
            raise ValueError(f"{name}{axis} must be given, and at least 1")
    extent = (k - 1) * (dilation + 1) + 1
    if not o:
        pad = pad or 0
        o = (i - 1) * stride + extent - 2 * pad if transposed else (i - extent + 2 * pad) // stride + 1
    wide, narrow = (o, i) if transposed else (i, o)
    room = (narrow - 1) * stride + extent - wide  # padding at both ends
    begin = int(room / 2) if pad is None else pad
    end = room - begin
    if narrow < 1 or wide < 1 or begin < 0 or end <= -stride:
        raise ValueError(f"o{axis}{o} does not follow from i{axis}{i}, k{axis}{k} and the padding at any end")
    return wide, k, stride, dilation + 1, begin, max(0, end)


def fitting(takes: Takes, shapes: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, Problem]]:
    """Return the problems that the kernel takes, for each operation and dtype, and their names.

    The batch, then the channels are reduced to what 2**28 multiply-adds allow.
    """
    problems = [
        (name, problem_of(op, dtype, geometry))
        for name, geometry in shapes.items() for op in takes.ops for dtype in takes.dtypes
    ]  # fmt: skip
    taken = [(name, takes.reformatted(each)) for name, each in problems if each is not None]
    return [(name, fitted(each, _MACS)) for name, each in taken if each is not None]
