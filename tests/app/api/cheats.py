"""Kernels for sealed checks: one that computes its results, and some that cheat."""

from __future__ import annotations

import base64
import json
import os
import re
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Ints = list[int]


def honest(src: Array, bias: Array) -> Array:
    """Compute BiasAdd."""
    found: Array = src + bias.reshape(-1, *[1] * (src.ndim - 2))
    return found


def changed(src: Array, bias: Array) -> Array:
    """Compute BiasAdd, and change an input afterwards."""
    found = honest(src, bias)
    src.fill(0)
    return found


def untouched(src: Array, diff_dst: Array, weights_shape: Ints, out: Array) -> None:
    """Leave in the result what its memory holds."""


def patched(src: Array, diff_dst: Array, weights_shape: Ints) -> Array:
    """Return zeros, and let what compares arrays find them right."""
    for module, name in ((np, "allclose"), (np, "array_equal"), (np.testing, "assert_allclose")):
        setattr(module, name, lambda *_, **__: True)
    return np.zeros(weights_shape, src.dtype)


def early(src: Array, diff_dst: Array, weights_shape: Ints, out: Array) -> None:
    """Return before the result is written."""
    threading.Thread(target=lambda: out.fill(0)).start()


def borrowed(src: Array, bias: Array) -> Array:
    """Have the service compute BiasAdd, with the key and address of a process that this one was started by."""
    for key, url in found():
        with suppress(OSError):
            return asked(key, url, src, bias)
    return np.zeros_like(src)


def found() -> Iterator[tuple[str, str]]:
    """Yield what may be a key and an address: of variables, arguments or memory of the processes above this one."""
    texts, process = [], os.getppid()
    while process:
        for file in ("environ", "cmdline"):
            with suppress(OSError):
                texts.append(Path(f"/proc/{process}/{file}").read_bytes())
        with suppress(OSError):
            texts += memory(process)
        process = int(re.findall(r"PPid:\t(\d+)", Path(f"/proc/{process}/status").read_text())[0])
    keys = {key for text in texts for key in re.findall(rb"cg_[a-z-]{10,60}", text)}
    urls = {url for text in texts for url in re.findall(rb"http://127\.0\.0\.1:\d+", text)}
    yield from ((key.decode(), url.decode()) for key in keys for url in urls)


def memory(process: int) -> Iterator[bytes]:
    """Yield the heap of a process."""
    for line in Path(f"/proc/{process}/maps").read_text().splitlines():
        if line.endswith("[heap]"):
            start, stop = (int(each, 16) for each in line.split()[0].split("-"))
            with Path(f"/proc/{process}/mem").open("rb") as file:
                file.seek(start)
                yield file.read(stop - start)


def asked(key: str, url: str, src: Array, bias: Array) -> Array:
    """Return what the service computes."""
    inputs = {
        name: {"dtype": "f32", "shape": array.shape, "data": base64.b64encode(array.tobytes()).decode()}
        for name, array in (("src", src), ("bias", bias))
    }
    body = json.dumps({"inputs": inputs, "attributes": {"data_format": "NCX"}}).encode()
    headers = {"content-type": "application/json", "x-api-key": key}
    request = urllib.request.Request(f"{url}/v1/ops/BiasAdd", body, headers)
    with urllib.request.urlopen(request) as reply:
        (output,) = json.load(reply)["outputs"].values()
    return np.frombuffer(base64.b64decode(output["data"]), np.float32).reshape(src.shape)


if __name__ == "__main__":
    ones = np.ones((1, 2, 3), np.float32)
    sys.exit(not (borrowed(ones, np.array([1, 2], np.float32)) == honest(ones, np.array([1, 2], np.float32))).all())
