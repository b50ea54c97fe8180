"""Kernels behind a URL: servers of the Open Inference Protocol and of JSON-RPC."""

from __future__ import annotations

import base64
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np

from convgrad._check.adapters import Array, KernelCall, Unsupported
from convgrad._check.problems import Takes
from convgrad._client import Client
from convgrad._dtypes import dtype as dtype_of
from convgrad._errors import Unsupported as Refused

__all__ = ["remote"]


def remote(url: str, api_key: str | None) -> OipKernel | RpcKernel:
    """Return the kernel at a URL: a path other than ``/`` and ``/v2`` is that of JSON-RPC."""
    parts = urlsplit(url)
    if parts.path.rstrip("/") in ("", "/v2"):
        return OipKernel(f"{parts.scheme}://{parts.netloc}", api_key)
    return RpcKernel(url, api_key)


class OipKernel:
    """A server with a model for each operation: binary tensors, the attributes as parameters of the request."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self._client = Client(url, api_key=api_key)
        self.takes = Takes()

    def run(self, call: KernelCall) -> Array:
        """Call the server."""
        try:
            return self._client.run(call.problem.op, call.inputs, call.problem.attributes())
        except Refused as error:
            raise Unsupported(error.message) from error


class RpcKernel:
    """A server whose methods are the operations, with the parameters `attributes` and `inputs`, base64 of the bytes."""

    def __init__(self, url: str, api_key: str | None) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.Client(timeout=3600.0, headers=headers)  # the command has a limit of its own
        self._url = url
        self.takes = Takes()

    def run(self, call: KernelCall) -> Array:
        """Call the server."""
        inputs = {
            name: {"dtype": call.problem.dtype, "shape": list(array.shape), "data": _base64(array)}
            for name, array in call.inputs.items()
        }
        params = {"attributes": call.problem.attributes(), "inputs": inputs}
        request = {"jsonrpc": "2.0", "id": 1, "method": call.problem.op, "params": params}
        reply = self._http.post(self._url, json=request).json()
        if "error" in reply:
            error: dict[str, Any] = reply["error"]
            if error.get("code") == -32601 or error.get("data", {}).get("code") == Refused.code:
                raise Unsupported(error.get("message"))
            raise RuntimeError(f"error {error.get('code')}: {str(error.get('message'))[:300]}")
        found = reply["result"]["outputs"][call.problem.output]
        array = np.frombuffer(base64.b64decode(found["data"]), dtype_of(found["dtype"]).numpy)
        return array.reshape(found["shape"])


def _base64(array: Array) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
