"""Many large calls at once: the answers, the service's memory, and the latency of `/healthz` meanwhile.

    python -m benchmarks.overload [--calls 200] [--mib 16] [--rounds 3]

All calls are sent at the same time over connections of their own, by one process. The service is
started once, so the memory of the second round on is memory that it kept. `/healthz` is queried over one connection by
another process.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import selectors
import socket
import threading
import time
from collections import Counter
from dataclasses import dataclass
from urllib.parse import urlsplit

import numpy as np

from benchmarks.service_cases import post
from benchmarks.startup import held_mib
from benchmarks.validations import probe
from tests.live import LiveService, running_service

__all__ = ["Flood", "flood", "large_call", "main"]

_PIECE = 1 << 18


def large_call(mib: int) -> bytes:
    """Build a multipart call: the gradient of a 1x1 filter on one image, `mib` MiB of src and a 64th of that."""
    rows = 16 * mib
    attributes = '"strides":[1,1],"pads_begin":[0,0],"pads_end":[0,0],"dilations":[1,1],"weights_shape":[1,64,1,1]'
    request = '{"attributes":{%s,"data_format":"NCX","weights_format":"OIX"}}' % attributes  # noqa: UP031 - braces
    parts = [b'name="request"\r\ncontent-type: application/json\r\n\r\n' + request.encode()]
    for name, channels in ("src", 64), ("diff_dst", 1):
        shape = f"(1, {channels}, {rows}, 256)"
        header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
        npy = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode()
        data = np.ones(channels * rows * 256, np.float32).tobytes()
        parts.append(f'name="{name}"; filename="{name}.npy"\r\n\r\n'.encode() + npy + data)
    begin = b"--X\r\ncontent-disposition: form-data; "
    body = b"".join(begin + part + b"\r\n" for part in parts) + b"--X--\r\n"
    headers = {"accept": "application/x-npy", "content-type": "multipart/form-data; boundary=X", "connection": "close"}
    return b"".join(post("/v1/ops/ConvolutionBackwardWeights", headers, [body]).pieces)


def _send(host: str, port: int, calls: int, request: bytes, again_s: float) -> Counter[str]:
    """Send all calls at once; count the answers by status, and `none` for a connection without one.

    For `again_s` seconds each answered call is sent again.
    """
    data, until = memoryview(request), time.monotonic() + again_s
    answers, selector = Counter[str](), selectors.DefaultSelector()
    sent, statuses = dict[socket.socket, int](), dict[socket.socket, bytes]()

    def connect() -> None:
        client = socket.socket()
        client.setblocking(False)
        client.connect_ex((host, port))
        selector.register(client, selectors.EVENT_READ | selectors.EVENT_WRITE)
        sent[client] = 0

    for _ in range(calls):
        connect()
    while sent:
        for key, events in selector.select():
            sock = key.fileobj
            assert isinstance(sock, socket.socket)
            try:
                if events & selectors.EVENT_WRITE:
                    sent[sock] += sock.send(data[sent[sock] : sent[sock] + _PIECE])
                    if sent[sock] == len(data):
                        selector.modify(sock, selectors.EVENT_READ)
                if not events & selectors.EVENT_READ:
                    continue
                received = sock.recv(1 << 16)
            except BlockingIOError:
                continue
            except OSError:
                received = b""
            if received:
                statuses.setdefault(sock, received[9:12])
            else:
                answers[statuses.get(sock, b"none").decode()] += 1
                selector.unregister(sock)
                del sent[sock]
                sock.close()
                if time.monotonic() < until:
                    connect()
    return answers


@dataclass(frozen=True)
class Flood:
    """What a flood of calls came to; `waits` are the seconds that each `/healthz` took meanwhile, in order."""

    seconds: float
    answers: Counter[str]
    waits: list[float]
    mib: float

    def __str__(self) -> str:
        """Describe it in one line."""
        late = self.waits[len(self.waits) * 99 // 100]
        return (
            f"{self.seconds:.1f} s, answers {dict(self.answers)}; /healthz {len(self.waits)} times, 99 of 100 within "
            f"{1e3 * late:.0f} ms, longest {1e3 * self.waits[-1]:.0f} ms; memory {self.mib:.0f} MiB at most"
        )


def flood(service: LiveService, calls: int, request: bytes, again_s: float = 0.0, *, anew: bool = False) -> Flood:
    """Send `calls` times the same request at once, each over a connection of its own that the server closes.

    For `again_s` seconds each answered call is sent again, over a new connection. See `probe` for `anew`.
    """
    address = urlsplit(service.url)
    host, port = str(address.hostname), int(address.port or 0)
    mine, theirs = multiprocessing.Pipe()
    prober = multiprocessing.Process(target=probe, args=(host, port, theirs), kwargs={"anew": anew}, daemon=True)
    prober.start()
    over, held = threading.Event(), [held_mib(service.pid)]
    watcher = threading.Thread(target=_watch, args=(service.pid, over, held))
    watcher.start()
    with multiprocessing.Pool(1) as pool:
        start = time.perf_counter()
        answers = pool.apply(_send, (host, port, calls, request, again_s))
        seconds = time.perf_counter() - start
    mine.send(None)
    waits = sorted(mine.recv())
    over.set()
    watcher.join()
    prober.join()
    return Flood(seconds, answers, waits, max(held))


def _watch(server: int, over: threading.Event, found: list[float]) -> None:
    while not over.wait(0.1):
        found.append(held_mib(server))


def main() -> None:
    """Run the service, flood it, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--mib", type=int, default=16, help="size of the larger tensor of each call")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    print(f"{given.calls} calls of {given.mib} MiB at once, on {len(os.sched_getaffinity(0))} processors")
    request = large_call(given.mib)
    with running_service() as service:
        for number in range(given.rounds):
            print(f"round {number + 1}: {flood(service, given.calls, request)}")


if __name__ == "__main__":
    main()
