"""The server's non-blocking end of a socket to the fork server or to a worker."""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence

from app.pool.messages import Message, MessageDecoder, encode, receive_some

__all__ = ["Channel"]


class Channel:
    """Send and receive messages.

    `on_message` gets each message with its descriptors, which it then owns. `on_end` is called once, when the
    peer has closed its end and everything it sent has been delivered.
    """

    def __init__(
        self,
        on_message: Callable[[Message, list[int]], None],
        on_end: Callable[[], None],
    ) -> None:
        self._on_message = on_message
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._sock, self.peer = socket.socketpair()
        self._sock.setblocking(False)
        self._decoder = MessageDecoder()
        self._unsent: deque[tuple[bytes, list[int]]] = deque()
        self._open = True
        self._ended = False
        self._loop.add_reader(self._sock, self._read)  # its result is of no use to the loop

    def hand_over(self) -> None:
        """Close our copy of the peer's end once another process has it, so that we see it close."""
        self.peer.close()

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Send a message, buffering what the socket does not take; messages to a dead peer are dropped."""
        if not self._open:
            return
        data = encode(message, len(descriptors))
        sent = 0 if self._unsent else self._push(data, descriptors)
        if sent == len(data):
            return
        if not self._unsent:
            self._loop.add_writer(self._sock, self._flush)
        # Descriptors travel with the first byte. The caller may close its own as soon as this returns.
        kept = [] if sent else [os.dup(descriptor) for descriptor in descriptors]
        self._unsent.append((data[sent:], kept))

    def drain(self) -> None:
        """Deliver everything that the peer sent before it died."""
        while self._open and self._read():
            pass

    def close(self) -> None:
        """Close our descriptors of both ends; nothing more is delivered."""
        if not self._open:
            return
        self._open = False
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        self._sock.close()
        self.peer.close()
        for _, descriptors in self._unsent:
            _close_all(descriptors)
        self._unsent.clear()

    def _push(self, data: bytes, descriptors: Sequence[int]) -> int:
        try:
            return socket.send_fds(self._sock, [data], descriptors) if descriptors else self._sock.send(data)
        except BlockingIOError:
            return 0
        except (BrokenPipeError, ConnectionResetError):
            return len(data)  # the reader will see the end

    def _flush(self) -> None:
        while self._unsent:
            data, descriptors = self._unsent[0]
            sent = self._push(data, descriptors)
            if sent == 0:
                return
            _close_all(descriptors)
            self._unsent[0] = (data[sent:], [])
            if sent == len(data):
                self._unsent.popleft()
        self._loop.remove_writer(self._sock)

    def _read(self) -> bool:
        try:
            alive = receive_some(self._sock, self._decoder)
        except BlockingIOError:
            return False
        while self._open and (found := self._decoder.next()) is not None:
            self._on_message(*found)
        if not alive and self._open and not self._ended:
            self._ended = True
            self._loop.remove_reader(self._sock)
            self._on_end()
        return alive


def _close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
