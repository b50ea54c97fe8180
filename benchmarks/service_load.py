"""The load: the same minimal client for every server, so that only the servers differ; and the Python client."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from functools import cached_property
from types import TracebackType
from typing import Self

from benchmarks.service_cases import Reply, Wire

__all__ = ["Connection", "latencies", "throughput"]

_ROOM = 1 << 20

Call = Callable[[], object]


class Connection:
    """A kept-alive HTTP/1.1 connection that does only what is necessary, opened by its first call."""

    def __init__(self, port: int) -> None:
        self._address = ("127.0.0.1", port)
        self._room = memoryview(bytearray(_ROOM))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if "_socket" in self.__dict__:
            self._socket.close()

    @cached_property
    def _socket(self) -> socket.socket:
        made = socket.create_connection(self._address)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return made

    def call(self, wire: Wire) -> Reply:
        """Send a request; return its complete reply."""
        for piece in wire.pieces:
            self._socket.sendall(piece)
        data = bytearray()
        while (end := data.find(b"\r\n\r\n")) < 0:
            data += self._receive()
        first, *lines = data[:end].decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        del data[: end + 4]
        if "chunked" in headers.get("transfer-encoding", ""):
            body = self._chunks(data)
        else:
            length = int(headers["content-length"])
            while len(data) < length:
                data += self._receive()
            body = bytes(data)
        return Reply(int(first.split()[1]), headers, body)

    def _chunks(self, data: bytearray) -> bytes:
        body = bytearray()
        while True:
            while (end := data.find(b"\r\n")) < 0:
                data += self._receive()
            size = int(data[:end], 16)
            while len(data) < end + 2 + size + 2:
                data += self._receive()
            body += data[end + 2 : end + 2 + size]
            del data[: end + 2 + size + 2]
            if not size:
                return bytes(body)

    def _receive(self) -> memoryview:
        count = self._socket.recv_into(self._room)
        if not count:
            raise ConnectionError("the server closed the connection inside a reply")
        return self._room[:count]


def latencies(call: Call, count: int) -> list[float]:
    """Return the seconds of each of `count` calls, one after the other."""
    found = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return found


def throughput(calls: list[Call], seconds: float) -> tuple[int, float]:
    """Repeat each of `calls` in its own thread; return the number of calls and the seconds they took."""
    counts = [0] * len(calls)
    errors: list[BaseException] = []
    start = time.perf_counter()

    def repeat(index: int) -> None:
        try:
            while time.perf_counter() - start < seconds:
                calls[index]()
                counts[index] += 1
        except BaseException as error:  # noqa: BLE001 - raised again by the thread that waits
            errors.append(error)

    threads = [threading.Thread(target=repeat, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return sum(counts), time.perf_counter() - start
