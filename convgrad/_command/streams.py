"""Files of the command; `-` is standard input or output, which must not be a terminal for binary data."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

from convgrad._command.spec import CallSpec, parse_spec, read_spec, tensor
from convgrad._dtypes import dtype_of_array
from convgrad._errors import ParseError
from convgrad._events import Array
from convgrad._npy import write_header
from convgrad._tensors import NpyFile

__all__ = ["STREAM", "Source", "check_output", "show", "write"]

STREAM = "-"


class Source:
    """The files that a command reads, by path; one of them may be `-`, standard input."""

    def __init__(self, dtype: str | None = None) -> None:
        self._dtype = dtype
        self._read = False

    def spec(self, path: Path) -> CallSpec:
        """Read a spec; see `read_spec`."""
        if str(path) != STREAM:
            return read_spec(path)
        return parse_spec(self._stream().read(), "standard input", Path())

    def graph(self, path: Path) -> Path | dict[str, Any]:
        """Return the path of a dumped graph, or the graph that is read from standard input."""
        if str(path) != STREAM:
            return path
        text = self._stream().read()
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError("standard input must be JSON") from error
        if not isinstance(found, dict):
            raise ValueError("standard input must be a JSON object with a list `graph`")
        return found

    def tensor(self, text: str) -> NpyFile | Array | dict[str, Any]:
        """Parse a tensor: a `.npy` file, or a dtype and shape; see `convgrad._command.spec.tensor`."""
        return self.array() if text == STREAM else tensor(text, self._dtype)

    def file(self, path: str) -> NpyFile | Array:
        """Return the tensor of a `.npy` file."""
        return self.array() if path == STREAM else NpyFile(path, self._dtype)

    def array(self) -> Array:
        """Read a `.npy` file from standard input; raises `ParseError` if it isn't one."""
        # NumPy seeks in anything that it recognises as a file, which fails for a pipe.
        stream = SimpleNamespace(read=self._stream().read)
        try:
            found: Array = np.lib.format.read_array(stream, allow_pickle=False)
        except ValueError as error:
            raise ParseError("standard input must be a complete .npy file of numbers") from error
        if self._dtype == "bf16" and found.dtype == np.uint16:
            return found.view(ml_dtypes.bfloat16)
        return found

    def _stream(self) -> Any:
        if self._read:
            raise ValueError("only one file can be read from standard input")
        if sys.stdin.isatty():
            raise ValueError("- reads standard input, which is a terminal: use a pipe or a file")
        self._read = True
        return sys.stdin.buffer


def check_output(path: str | None) -> None:
    """Raise `ValueError` when a tensor would be written to a terminal."""
    if path == STREAM and sys.stdout.isatty():
        raise ValueError("-o - writes binary data, but standard output is a terminal: use a pipe or a file")


def write(path: str, array: Array) -> None:
    """Write a `.npy` file, also to a pipe, which numpy.save can't."""
    header = write_header(dtype_of_array(array), array.shape)
    pieces: list[bytes | memoryview] = [header, array.reshape(-1).view(np.uint8).data]
    if path == STREAM:
        for piece in pieces:
            _write_all(memoryview(piece))
        return
    with Path(path).open("wb") as file:
        file.writelines(pieces)


def _write_all(data: memoryview) -> None:
    # Unbuffered (python -u), standard output may write a part only.
    while data:
        data = data[sys.stdout.buffer.write(data) :]


def show(value: Any, options: argparse.Namespace) -> None:
    """Print a value as JSON; without `--json`, an object as a line for each member."""
    if options.json or not isinstance(value, dict):
        print(json.dumps(value, indent=2, ensure_ascii=False))
        return
    width = max(map(len, value), default=0)
    for name, member in value.items():
        print(f"{name:{width}}  {member if isinstance(member, str) else json.dumps(member)}")
