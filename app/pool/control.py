"""The page that the server and a worker share: stop requests, the worker's heartbeat and its answer to a probe."""

from __future__ import annotations

import mmap
import os

__all__ = ["ControlPage"]

_STOP, _BEATS, _ANSWER = 0, 8, 16  # in words, on cache lines of their own: each has one writer


class ControlPage:
    """Map one worker's control page; its words are aligned, so plain loads and stores are atomic."""

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, mmap.PAGESIZE)
        self._words = memoryview(self._memory).cast("Q")

    @classmethod
    def create(cls, descriptor: int) -> ControlPage:
        """Size a fresh anonymous file and map it."""
        os.posix_fallocate(descriptor, 0, mmap.PAGESIZE)
        return cls(descriptor)

    def stop(self, serial: int) -> None:
        """Ask the worker to stop all units up to this serial number; later ones are not affected."""
        self._words[_STOP] = serial

    def stops(self, serial: int) -> bool:
        """Whether the unit with this serial number has to stop."""
        return serial <= self._words[_STOP]

    def beat(self) -> None:
        """Show that the worker is alive."""
        self._words[_BEATS] += 1

    @property
    def beats(self) -> int:
        """Heartbeats so far."""
        return self._words[_BEATS]

    def answer(self, token: int) -> None:
        """Acknowledge a probe."""
        self._words[_ANSWER] = token

    @property
    def answered(self) -> int:
        """Token of the last probe that the worker answered; 0 for none."""
        return self._words[_ANSWER]

    def close(self) -> None:
        """Unmap the page."""
        self._words.release()
        self._memory.close()
