"""The cost of hostile validations: server memory, and the latency of `/healthz` meanwhile.

    python -m benchmarks.validations [--count 1000] [--at-once 4] [--workers 2]

Each of the `--count` requests has a few hundred bytes and asks for a different plan near the service's limits: long
filters, very many positions, channels or images. The service runs in its own process; another process requests
`/healthz` again and again, from before the first validation until after the last.
"""

from __future__ import annotations

import argparse
import http.client
import json
import multiprocessing
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any
from urllib.parse import urlsplit

from benchmarks.startup import descendants, memory_mib
from tests.live import running_service

__all__ = ["hostile", "main", "probe"]

_PROBE_S = 0.005
_RETRY_S = 0.05


def hostile(count: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield distinct calls to validate, as operation and document, whose plans are as large as possible."""
    for i in range(count):
        yield _FAMILIES[i % len(_FAMILIES)](i // len(_FAMILIES))


def _gradient(src: list[int], dst: list[int], kernel: list[int], **attributes: Any) -> tuple[str, dict[str, Any]]:
    """Return the call of a gradient whose tensors are only shapes."""
    ones, zeros = [1] * len(kernel), [0] * len(kernel)
    given = {"strides": ones, "dilations": ones, "pads_begin": zeros, "pads_end": zeros, "data_format": "NCX"}
    tensors = {name: {"dtype": "bf16", "shape": shape} for name, shape in (("src", src), ("diff_dst", dst))}
    inputs = {**tensors, "weights_shape": [dst[1], src[1], *kernel]}
    return "ConvolutionBackwardWeights", {
        "attributes": {**given, "weights_format": "OIX", **attributes},
        "inputs": inputs,
    }


def _taps(i: int) -> tuple[str, dict[str, Any]]:
    taps = (1 << 17) - i
    return _gradient([1, 1, taps + 99], [1, 1, 100], [taps])


def _padded(i: int) -> tuple[str, dict[str, Any]]:
    taps = (1 << 17) - 1 - 2 * i
    pads = {"pads_begin": [taps // 2], "pads_end": [taps // 2]}
    return _gradient([1, 1, taps], [1, 1, taps], [taps], **pads)


def _plane(i: int) -> tuple[str, dict[str, Any]]:
    return _gradient([1, 1, 461, 461 + i], [1, 1, 100, 100 + i], [362, 362])


def _positions(i: int) -> tuple[str, dict[str, Any]]:
    size = (1 << 28) - i
    return _gradient([1, 1, size], [1, 1, size], [1])


def _images(i: int) -> tuple[str, dict[str, Any]]:
    return _gradient([(1 << 15) - i, 1, 4000], [(1 << 15) - i, 1, 1000], [3001])


def _channels(i: int) -> tuple[str, dict[str, Any]]:
    return _gradient([1, (1 << 21) - i, 16], [1, 1, 1], [16])


_FAMILIES = (_taps, _padded, _plane, _positions, _images, _channels)


def probe(host: str, port: int, pipe: Connection, *, anew: bool = False) -> None:
    """Query `/healthz` until told to stop, and send how long each response took.

    All queries use one connection, or with `anew` a new one each, as Kubernetes does.
    """
    found, connection = [], http.client.HTTPConnection(host, port, timeout=120)
    while not pipe.poll(_PROBE_S):
        start = time.perf_counter()
        if anew:
            connection.close()
        connection.request("GET", "/healthz")
        connection.getresponse().read()
        found.append(time.perf_counter() - start)
    pipe.send(found)


def _validate(host: str, port: int, call: tuple[str, dict[str, Any]]) -> Counter[str]:
    """Send a validation until the service accepts it; return the answers counted by status."""
    answers = Counter[str]()
    connection = http.client.HTTPConnection(host, port, timeout=600)
    body = json.dumps(call[1])
    while True:
        connection.request("POST", f"/v1/ops/{call[0]}/validate", body, {"content-type": "application/json"})
        reply = connection.getresponse()
        text = reply.read()
        reason = json.loads(text).get("reason", "") if reply.status != 200 else ""
        answers[f"{reply.status} {reason}".strip()] += 1
        if reply.status not in (429, 503):
            connection.close()
            return answers
        time.sleep(_RETRY_S)


def main() -> None:
    """Run the service, send the validations, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    with running_service("--workers", str(given.workers)) as service:
        address = urlsplit(service.url)
        host, port = str(address.hostname), int(address.port or 0)
        before = memory_mib(service.pid, "Rss")
        mine, theirs = multiprocessing.Pipe()
        prober = multiprocessing.Process(target=probe, args=(host, port, theirs), daemon=True)
        prober.start()
        time.sleep(1)
        start = time.perf_counter()
        with ThreadPoolExecutor(given.at_once) as pool:
            answers = sum(pool.map(lambda call: _validate(host, port, call), hostile(given.count)), Counter[str]())
        seconds = time.perf_counter() - start
        mine.send(None)
        waits = sorted(mine.recv())
        prober.join()
        after = memory_mib(service.pid, "Rss")
        largest = max((memory_mib(pid, "Rss") for pid in descendants(service.pid)), default=0.0)
    print(f"{given.count} validations, {given.at_once} at a time: {seconds:.1f} s; answers {dict(answers)}")
    print(f"server: {before:.0f} MiB before, {after:.0f} MiB after; largest of its other processes {largest:.0f} MiB")
    middle, late = waits[len(waits) // 2], waits[len(waits) * 99 // 100]
    print(
        f"/healthz: {len(waits)} times, median {1e3 * middle:.1f} ms, 99 of 100 within {1e3 * late:.1f} ms, "
        f"longest {1e3 * waits[-1]:.1f} ms"
    )


if __name__ == "__main__":
    main()
