"""The connections of a local service's users, against users that do everything wrong."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from app.api.oip.regions import Registry
from app.local import Users
from app.pool.buffers import SegmentPool

MEMORY = "lent-by-a-test"
SIZE = 1 << 16


@contextmanager
def memory(seals: int = fcntl.F_SEAL_SHRINK) -> Iterator[int]:
    """An anonymous file with these seals."""
    descriptor = os.memfd_create(MEMORY, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, SIZE)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        yield descriptor
    finally:
        os.close(descriptor)


def open_memory() -> int:
    """Count the descriptors of this process for lent memory; services of other tests have others."""
    links = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            links.append(str(descriptor.readlink()))
    return sum(MEMORY in link for link in links)


class Scene:
    """Users of a service, and a connection to it."""

    def __init__(self, path: Path) -> None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(str(path))
        listener.listen()
        self.path = path
        self.left = threading.Event()
        self.retired: list[int] = []
        self.segments = SegmentPool(1 << 24, on_retire=self.retired.append)
        self.regions = Registry(enabled=False)
        self.first = self.connect()
        self.users = Users(listener, self.left.set)
        self.users.attach(self.segments, self.regions)
        self.users.start()

    def connect(self) -> socket.socket:
        """Connect as a user."""
        user = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        user.connect(str(self.path))
        user.settimeout(10)
        return user

    def answer(self, user: socket.socket) -> dict[str, Any]:
        """Return the next packet from the service."""
        found: dict[str, Any] = json.loads(user.recv(4096))
        return found

    def lend(self, user: socket.socket, packet: bytes, *descriptors: int) -> dict[str, Any]:
        """Send a packet with descriptors; return the answer."""
        socket.send_fds(user, [packet], descriptors) if descriptors else user.send(packet)
        return self.answer(user)


def play(path: Path, act: Callable[[Scene], None]) -> None:
    """Run a scene, which ends with its last user."""

    scene = Scene(path / "users")
    try:
        assert scene.answer(scene.first)["pid"] == os.getpid()
        act(scene)
    finally:
        scene.first.close()
        assert scene.left.wait(10)
    assert not scene.path.exists()


def test_it_ends_with_the_last_user(tmp_path: Path) -> None:
    """A service with two users does not end with the first that leaves."""

    def act(scene: Scene) -> None:
        second = scene.connect()
        scene.answer(second)
        second.close()
        with memory() as descriptor:  # an answer shows that the end of the other connection has been seen, too
            scene.lend(scene.first, json.dumps({"lend": SIZE}).encode(), descriptor)
        assert not scene.left.is_set()

    play(tmp_path, act)


def test_lent_memory_is_one_segment(tmp_path: Path) -> None:
    """What the user writes is read without a copy, until nothing refers to it; then workers are told to unmap it."""

    def act(scene: Scene) -> None:
        with memory() as descriptor:
            name = (scene.lend(scene.first, json.dumps({"lend": SIZE}).encode(), descriptor))["region"]
            segment = scene.regions.lent[name].segment(8)
            os.pwrite(descriptor, b"gradient", 0)
        assert bytes(segment.view) == b"gradient"
        os.fstat(segment.fd)
        scene.first.send(json.dumps({"forget": name}).encode())
        with memory() as descriptor:
            scene.lend(scene.first, json.dumps({"lend": SIZE}).encode(), descriptor)
        assert name not in scene.regions.lent
        assert bytes(segment.view) == b"gradient"  # a running call keeps it
        assert not scene.retired
        number = segment.id
        segment.release()
        assert scene.retired == [number]

    play(tmp_path, act)


@pytest.mark.parametrize(
    ("packet", "seals"),
    [
        (b'{"lend": 65536}', 0),
        (b'{"lend": 65537}', fcntl.F_SEAL_SHRINK),
        (b'{"lend": 0}', fcntl.F_SEAL_SHRINK),
        (b'{"lend": -1}', fcntl.F_SEAL_SHRINK),
        (b'{"lend": true}', fcntl.F_SEAL_SHRINK),
        (b'{"lend": "1"}', fcntl.F_SEAL_SHRINK),
        (b"{}", fcntl.F_SEAL_SHRINK),
        (b"[]", fcntl.F_SEAL_SHRINK),
        (b"7", fcntl.F_SEAL_SHRINK),
        (b"\xff", fcntl.F_SEAL_SHRINK),
    ],
)
def test_what_is_not_lent(tmp_path: Path, packet: bytes, seals: int) -> None:
    """Memory that could shrink under the service, and packets that say nothing, are refused; no descriptor is kept."""

    def act(scene: Scene) -> None:
        scene.lend(scene.first, packet)  # without a descriptor
        with memory(seals) as descriptor:
            assert "error" in scene.lend(scene.first, packet, descriptor)
        assert not open_memory()
        assert not scene.regions.lent

    play(tmp_path, act)
