"""More ways to compute a case: a local service, tensors in shared memory by hand, only the kernels, and PyTorch."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import numpy as np

import convgrad
from benchmarks.contenders import Ours
from benchmarks.service_cases import ATTRIBUTES, OP, Array, Case, post
from benchmarks.service_load import Call, Connection

__all__ = ["open_bare", "open_local", "open_shared", "open_torch"]


def open_bare(case: Case, stack: ExitStack) -> Call:
    """Return a function that computes a case with the kernels in this process, on a thread for each processor."""
    ours = Ours(case.problem(), list(case.inputs().values()), os.cpu_count() or 1, "wall")
    stack.callback(ours.close)
    ours.call()  # may have to compile, and servers close idle connections meanwhile
    return ours.call


def open_torch(case: Case, stack: ExitStack) -> Call:  # noqa: ARG001 - nothing to close
    """Return a function that computes a case with PyTorch in this process, on a thread for each processor."""
    from benchmarks.peer import TorchPeer  # here, because PyTorch need not be installed

    return TorchPeer(case.problem(), list(case.inputs().values()), os.cpu_count() or 1, "wall").call


def open_local(case: Case, stack: ExitStack) -> Call:
    """Return a function that has a case computed by `convgrad.local()`; those of all callers share the service."""
    client = stack.enter_context(convgrad.local(progress=False))
    inputs: dict[str, Any] = {**case.inputs(), "weights_shape": case.weights_shape}
    return lambda: client.run(OP, inputs, ATTRIBUTES)


def open_shared(port: int) -> Callable[[Case, ExitStack], Call]:
    """Return a function that has a case computed from the client's shared memory, and the result written there."""

    def open_one(case: Case, stack: ExitStack) -> Call:
        inputs, result = case.inputs(), np.empty(case.weights_shape, np.float32)
        memory = SharedMemory(create=True, size=case.nbytes)
        stack.callback(memory.unlink)
        stack.callback(memory.close)
        connection, name, at = stack.enter_context(Connection(port)), memory.name.strip("/"), 0
        described: list[dict[str, Any]] = []
        room = memory.buf
        assert room is not None
        for key, array in (*inputs.items(), ("diff_weights", result)):
            room[at : at + array.nbytes] = array.tobytes()
            place = {"shared_memory_region": name, "shared_memory_offset": at, "shared_memory_byte_size": array.nbytes}
            described.append({"name": key, "datatype": "FP32", "shape": array.shape, "parameters": place})
            at += array.nbytes
        region = {"key": memory.name, "offset": 0, "byte_size": case.nbytes}
        _post(connection, f"/v2/systemsharedmemory/region/{name}/register", region)
        stack.callback(_post, connection, f"/v2/systemsharedmemory/region/{name}/unregister", {})
        attributes = ATTRIBUTES | {"weights_shape": case.weights_shape}
        document = {
            "inputs": described[:-1],
            "outputs": [{"name": "diff_weights", "parameters": described[-1]["parameters"]}],
            "parameters": {k: json.dumps(v) if isinstance(v, list) else v for k, v in attributes.items()},
        }

        def call() -> Array:
            _post(connection, f"/v2/models/{OP}/infer", document)
            return np.frombuffer(bytes(room[at - result.nbytes : at]), np.float32).reshape(result.shape)

        return call

    return open_one


def _post(connection: Connection, path: str, document: dict[str, Any]) -> None:
    reply = connection.call(post(path, {"content-type": "application/json"}, [json.dumps(document).encode()]))
    if reply.status != 200:
        raise SystemExit(f"{path} answered {reply.status}: {reply.body[:300]!r}")
