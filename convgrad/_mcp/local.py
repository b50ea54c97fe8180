"""`convgrad mcp`: the tools over standard streams, computed in this process; tensors are files below one folder."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from convgrad._check.cases import Case
from convgrad._dtypes import dtype_of_array
from convgrad._errors import Forbidden, NotFound
from convgrad._events import Array, Result
from convgrad._local import local
from convgrad._mcp.records import seeded
from convgrad._mcp.server import make_server
from convgrad._mcp.tools import OnProgress
from convgrad._requests import CheckMethod, Compute, Describe, ListOperations, Request, SubmitResult, Validate, Verify
from convgrad._tensors import NpyFile

if TYPE_CHECKING:
    from convgrad._process import AsyncProcess

__all__ = ["LocalCalls", "serve"]

_FOLDER = "convgrad-mcp"
"""Where tensors and records are written, below the root."""


class LocalCalls:
    """Calls computed in this process. Without a `root` no file is read or written, and tensors are made from seeds."""

    def __init__(self, root: Path | None) -> None:
        self._root = None if root is None else root.resolve()
        self._numbers = count(1)

    @cached_property
    def _process(self) -> AsyncProcess:
        from convgrad._process import AsyncProcess

        return AsyncProcess(local()._engine)

    async def call(self, method: str, params: dict[str, Any], _: Any, on_progress: OnProgress) -> Any:
        """Return the result of a method; raises what `convgrad.local()` raises, and `Forbidden` for other paths."""
        process = await asyncio.to_thread(lambda: self._process)  # the kernels may have to be compiled
        request = self._request(method, params)
        if not isinstance(request, Verify):
            return self._reply(method, await process.fetch(request), params)
        return await process.result(request, None, lambda step: on_progress(step.done, step.total))

    def _request(self, method: str, params: Mapping[str, Any]) -> Request:
        op, attributes, options = params.get("op", method), params.get("attributes", {}), params.get("options", {})
        inputs = {name: self._tensor(value) for name, value in (params.get("inputs") or {}).items()}
        match method:
            case "ops.list":
                return ListOperations()
            case "ops.describe":
                return Describe(op)
            case "ops.validate":
                return Validate(op, inputs, attributes, options)
            case "ops.verify":
                return Verify(op, inputs, attributes, options)
            case "check.submit" if inputs:
                return SubmitResult(params["check"], params["case"], "result", inputs["result"])
        if method.startswith("check."):
            return CheckMethod(method, {name: value for name, value in params.items() if name != "inputs"})
        return Compute(method, inputs, attributes, options)

    def _reply(self, method: str, found: Any, params: Mapping[str, Any]) -> Any:
        if isinstance(found, Result):
            outputs = self._written(f"call-{next(self._numbers)}", found.outputs)
            return {"outputs": outputs, "resolved": found.resolved, "stats": found.stats}
        if method == "check.next" and params.get("send") != "seed" and "generate" in found:
            case = Case.from_json(found.pop("generate"))
            return {**found, "inputs": self._written(f"{found['check']}/case-{case.number}", case.inputs())}
        if method == "check.finish":
            return {**found, "record": self._record(found)}
        return found

    def _record(self, document: Mapping[str, Any]) -> str:
        if self._root is None:
            return "not written, as there is no --root"
        path = self._target(f"{document['check']}/record.json")
        path.write_text(json.dumps(document, indent=1), encoding="utf-8")
        return str(path)

    def _tensor(self, given: Any) -> Any:
        """Return a tensor as a client takes it."""
        if not isinstance(given, Mapping) or not given.keys() & {"handle", "path", "seed"}:
            return given
        if "handle" in given:
            raise NotFound("there is no such handle: over stdio, tensors are paths or seeds")
        return seeded(given) if "seed" in given else NpyFile(self.existing(given["path"]), given.get("dtype"))

    def existing(self, path: str) -> Path:
        """Return a file below the root; raises `Forbidden` for a path or a link out of it, and `NotFound`."""
        found = self._inside(path)
        with suppress(OSError):  # such as a name that is too long
            if found.is_file():
                return found
        raise NotFound(f"there is no file {path!r} in the allowed folder")

    def _target(self, name: str) -> Path:
        path = self._inside(f"{_FOLDER}/{name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def _inside(self, path: str) -> Path:
        if self._root is None:
            raise Forbidden("files need an allowed folder: convgrad mcp --root FOLDER")
        try:  # twice: behind a link to itself the first one leaves other links as they are
            found = Path(os.path.realpath(os.path.realpath(self._root / path)))
        except ValueError:  # no name of a file
            found = self._root
        if found == self._root or not found.is_relative_to(self._root):
            raise Forbidden("a path must be below the allowed folder, and no link may lead out of it")
        return found

    def _written(self, folder: str, tensors: Mapping[str, Array]) -> dict[str, Any]:
        """Write tensors as `.npy` files; return their references."""
        found = {}
        for name, array in tensors.items():
            path = self._target(f"{folder}/{name}.npy")
            np.save(path, array, allow_pickle=False)
            at = str(path.relative_to(self._root or path))
            found[name] = {"dtype": dtype_of_array(array).name, "shape": list(array.shape), "path": at}
        return found


def serve(root: Path | None) -> None:
    """Serve the protocol on standard input and output until the input ends."""
    make_server(LocalCalls(root)).run("stdio")
