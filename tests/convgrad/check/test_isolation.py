"""What an isolated process can't do, and what kernels need and still can."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from convgrad._check import isolation
from convgrad._check.isolation import MEASURES, unreadable
from convgrad._check.problems import Problem
from convgrad._check.process import KernelProcess, Memory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are isolated on Linux only")

PROBES = r"""
import ctypes, json, multiprocessing, os, socket, sys, tempfile, threading
from pathlib import Path

import numpy as np

def connects(family, address):
    with socket.socket(family) as sock:
        sock.connect(address)

def sends(family, address):
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.sendto(b"x", address)

def call(number, *arguments):
    if ctypes.CDLL(None, use_errno=True).syscall(number, *arguments) < 0:
        raise OSError(ctypes.get_errno())

def starts():
    thread = threading.Thread(target=list)
    thread.start()
    thread.join()

beside, port, named, abstract, parent = sys.argv[1:]
probes = {
    "network": {
        "TCP": lambda: connects(socket.AF_INET, ("127.0.0.1", int(port))),
        "UDP": lambda: sends(socket.AF_INET, ("127.0.0.1", int(port))),
        "a socket with a path": lambda: connects(socket.AF_UNIX, named),
        "an abstract socket": lambda: connects(socket.AF_UNIX, "\0" + abstract),
        "io_uring": lambda: call(425, 1, ctypes.create_string_buffer(120)),
        "descriptors": lambda: call(438, os.pidfd_open(int(parent)), 2, 0),
        "the other interface": lambda: call(0x40000000 + 41, 2, 1, 0),
    },
    "processes": {
        "environ": lambda: Path(f"/proc/{parent}/environ").read_bytes(),
        "maps": lambda: Path(f"/proc/{parent}/maps").read_bytes(),
        "memory": lambda: Path(f"/proc/{parent}/mem").open("rb"),
        "init": lambda: Path("/proc/1/environ").read_bytes(),
    },
    "files": {
        "beside": lambda: Path(beside, "new").touch(),
        "move": lambda: os.rename(Path(beside, "old"), Path(beside, "older")),
        "remove": lambda: Path(beside, "removed").unlink(),
        "truncate": lambda: os.truncate(Path(beside, "kept"), 0),
    },
    "needed": {
        "temporary": lambda: tempfile.NamedTemporaryFile().write(b"x"),
        "folders": lambda: os.rename(tempfile.mkdtemp(), os.path.join(tempfile.mkdtemp(), "inner")),
        "null": lambda: Path("/dev/null").write_bytes(b"x"),
        "threads": starts,
        "processes": lambda: multiprocessing.get_context("fork").Pool(2).map(abs, [-1]),
        "pairs": socket.socketpair,
        "read": lambda: Path(beside, "kept").read_bytes(),
        "products": lambda: np.ones((300, 300)) @ np.ones((300, 300)),
    },
}
done = {group: [] for group in probes}
for group, each in probes.items():
    for name, probe in each.items():
        try:
            probe()
        except Exception:
            continue
        done[group].append(name)
print(json.dumps(done))
"""
FOUND = {"network": ["TCP", "UDP", "a socket with a path", "an abstract socket"], "processes": ["environ", "maps"],
         "files": ["beside", "move", "remove", "truncate"]}  # fmt: skip
"""What a process that is not isolated can do anywhere; the rest depends on the system."""


@pytest.fixture
def arguments(tmp_path: Path) -> Iterator[list[str]]:
    """A folder with files, and the addresses of three servers."""
    beside, named, abstract = tmp_path / "beside", tmp_path / "sock", f"convgrad-{os.getpid()}"
    beside.mkdir()
    for name in ("old", "removed", "kept"):
        (beside / name).write_text("x")
    with ExitStack() as stack:
        servers = []
        for family, address in (
            (socket.AF_INET, ("127.0.0.1", 0)),
            (socket.AF_UNIX, str(named)),
            (socket.AF_UNIX, "\0" + abstract),
        ):
            server = stack.enter_context(socket.socket(family))
            server.bind(address)
            server.listen()
            servers.append(server)
        yield [str(beside), str(servers[0].getsockname()[1]), str(named), abstract]


def probed(command: list[str], arguments: list[str], folder: Path) -> list[dict[str, list[str]]]:
    """Run the probes below a shell; return the lines that they print."""
    script = f"{shlex.join([*command, sys.executable, '-c', PROBES, *arguments])} $$; exit $?"
    environment = {**os.environ, "TMPDIR": str(folder)}
    found = subprocess.run(["sh", "-c", script], env=environment, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in found.stdout.splitlines()]


def test_what_is_refused(arguments: list[str], tmp_path: Path) -> None:
    """Each measure in force refuses all that it names, to root as well; what kernels need works."""
    folder = tmp_path / "own"
    folder.mkdir()
    isolated = [sys.executable, "-I", "-S", isolation.__file__, str(folder)]
    status, done = probed(isolated, arguments, folder)
    assert set(status["isolation"]) <= set(MEASURES)
    for measure in status["isolation"]:
        assert not done[measure], measure
    needed = done["needed"]
    (done,) = probed([], arguments, folder)
    assert done["needed"] == needed
    for measure, names in FOUND.items():
        assert set(names) <= set(done[measure])


def test_an_unreadable_process(tmp_path: Path) -> None:
    """Inside the block others don't read the environment of the process, whatever the system has of the rest."""
    reader = f"open('/proc/{os.getpid()}/environ', 'rb').read()"
    bare = [sys.executable, "-c", reader]
    isolated = [sys.executable, "-I", "-S", isolation.__file__, str(tmp_path), *bare]
    assert subprocess.run(bare, check=False).returncode == 0
    with unreadable():
        assert subprocess.run(isolated, check=False, capture_output=True).returncode == 1
    assert subprocess.run(bare, check=False).returncode == 0


KERNEL = """
import os
from pathlib import Path

def kernel(src, bias, out):
    if not Path(os.environ["TMPDIR"], "crashed").exists():
        Path(os.environ["TMPDIR"], "crashed").touch()
    else:
        os.abort()
    seen = any("hidden" in value or name.startswith("CONVGRAD") or name.endswith("proxy")
               for name, value in os.environ.items())
    out[:] = seen
"""


def test_the_environment_of_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and proxies are removed from it; after a crash the next process is isolated as well, in a new folder."""
    path = tmp_path / "kernel.py"
    path.write_text(KERNEL)
    for name, value in {"CONVGRAD_KEYS": "a", "MINE": "the hidden key", "https_proxy": "b"}.items():
        monkeypatch.setenv(name, value)
    problem = Problem(op="BiasAdd", dtype="f32", wide=(3,))
    inputs = {name: np.ones(shape, np.float32) for name, shape in problem.input_shapes.items()}
    with KernelProcess(f"{path}:kernel", takes={}, limit=60, hidden=["hidden"]) as process:
        measures = []
        for _ in range(2):
            outcome = process.call(problem, inputs, Memory())
            assert outcome.result is not None, outcome.text
            assert not outcome.result.any()
            measures.append(process.isolation)
            process.isolation = []
            assert process.call(problem, inputs, Memory()).status == "crashed"
    assert measures[0] == measures[1]
