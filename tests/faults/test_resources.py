"""Read-only folders, and descriptors, connections and memory that run out: calls are rejected, none is wrong."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from kernels.emit.cache import cache_folder
from tests.app.samples import NPY, SMALL, post, same_bits
from tests.faults.apis import prepare
from tests.faults.chaos import WIDE
from tests.faults.machine import can, right
from tests.live import LiveService, running_service

pytestmark = pytest.mark.heavy


def unshare(script: str, *arguments: str) -> list[str]:
    """Return a command that runs a script in its own mount namespace, then executes the command that follows."""
    command = ["unshare", "--mount", "sh", "-ec"]
    shift = f"shift {len(arguments)}; " if arguments else ""
    return [*command, f'{script}; {shift}exec "$@"', "sh", *arguments]


@pytest.fixture
def warm(service: LiveService) -> Path:
    """The folder with all compiled kernels, filled by the running service."""
    assert service.url
    return Path(cache_folder()).parent


def test_a_file_where_the_cache_should_be(warm: Path, tmp_path: Path) -> None:
    """If NUMBA_CACHE_DIR is a file, the kernels of the user's cache are used, and the service computes."""
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "convgrad").symlink_to(warm)
    folders = {"NUMBA_CACHE_DIR": str(tmp_path / "file"), "XDG_CACHE_HOME": str(tmp_path)}
    with running_service("--workers", "1", **folders) as service:  # type: ignore[arg-type]
        assert right(service)


def test_a_cache_that_can_only_be_read(warm: Path, tmp_path: Path) -> None:
    """On a file system mounted read-only, even for root, the kernels are copied, and the service computes."""
    under = unshare('mount --bind "$1" "$1"; mount -o remount,bind,ro "$1"', str(warm))
    if not can(under):
        pytest.skip("no mounts here")
    folders = {"NUMBA_CACHE_DIR": str(warm), "XDG_CACHE_HOME": str(tmp_path)}
    with running_service("--workers", "1", under=under, **folders) as service:  # type: ignore[arg-type]
        assert right(service)
    assert list((tmp_path / "convgrad").rglob("*.nbc"))


@pytest.mark.usefixtures("warm")
def test_a_cache_on_a_full_disk(tmp_path: Path) -> None:
    """A kernel that must be compiled and can't be saved takes time, but does not prevent the start."""
    fill = (
        'mount -t tmpfs -o mode=700,size=256m none "$2"; cp -r "$1" "$2"; '
        'rm "$2"/*/*/driver.store-*.nbc; cat /dev/zero >"$2/full" 2>/dev/null || true'
    )
    if not can(unshare("mount -t tmpfs none /mnt")):
        pytest.skip("no mounts here")
    under = unshare(fill, cache_folder(), str(tmp_path))
    with running_service("--workers", "1", under=under, NUMBA_CACHE_DIR=str(tmp_path)) as service:
        assert right(service)


@pytest.fixture(scope="module")
def poor() -> Iterator[LiveService]:
    """A service with 64 descriptors, and memory for the tensors of small calls only."""
    under = ["prlimit", "--nofile=64:64"]
    if not can(under):
        pytest.skip("no prlimit here")
    with running_service("--workers", "1", "--memory-limit", "2MiB", under=under) as service:
        yield service


def connected(service: LiveService, stack: ExitStack, count: int, start: bytes) -> list[socket.socket]:
    """Open connections that send the start of a head and never its end; return them."""
    address = urlsplit(service.url)
    socks = []
    for _ in range(count):
        sock = stack.enter_context(socket.create_connection((address.hostname, address.port), timeout=30))
        sock.sendall(start)
        socks.append(sock)
    return socks


def test_descriptors_run_out(poor: LiveService) -> None:
    """With more connections than descriptors a call waits or is cut off; once the clients have left, calls work."""
    inputs = SMALL.inputs()
    call = prepare("rest npy", SMALL, inputs, SMALL.expected(inputs))
    with closing(HTTPConnection(urlsplit(poor.url).netloc, timeout=60)) as late, suppress(ConnectionError):
        with ExitStack() as stack:
            connected(poor, stack, 100, b"GET /healthz HTTP/1.1\r\n")
            late.request("POST", call.path, call.content, call.headers)
        reply = late.getresponse()
        got = httpx.Response(reply.status, headers=reply.getheaders(), content=reply.read())
        assert same_bits(call.read(got), call.expected)
    assert right(poor)


def test_memory_for_tensors_runs_out(poor: LiveService) -> None:
    """A call over the memory limit gets 413 with its reason, and the next small one its result."""
    with httpx.Client(base_url=poor.url, timeout=60) as http:
        reply = post(http, WIDE, WIDE.floats(), NPY)
    assert (reply.status_code, reply.json()["reason"]) == (413, "memory")
    assert right(poor)


def test_the_system_gives_no_memory() -> None:
    """If the system itself has no memory for tensors, a call gets 503 with its reason, and a small one works."""
    under = ["prlimit", f"--fsize={1 << 20}"]  # also limits files in memory
    if not can(under):
        pytest.skip("no prlimit here")
    with running_service("--workers", "1", under=under) as service:
        with httpx.Client(base_url=service.url, timeout=60) as http:
            reply = post(http, WIDE, WIDE.floats(), NPY)
        assert (reply.status_code, reply.json()["reason"]) == (503, "memory")
        assert "retry-after" in reply.headers
        assert right(service)


def test_a_hundred_heads_without_end(service: LiveService) -> None:
    """While a hundred connections never finish their heads, others are served, and the hundred get no answer."""
    with ExitStack() as stack:
        slow = connected(service, stack, 100, b"POST /rpc HTTP/1.1\r\nX-Slow: ")
        for sock in slow:
            sock.sendall(b"a")
        assert right(service)
        for sock in slow:
            sock.setblocking(False)
            with pytest.raises(BlockingIOError):
                sock.recv(1)
    assert right(service)
