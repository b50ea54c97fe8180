"""`convgrad.local()` with real processes: shared, killed, crashed, and cleaned up."""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import convgrad
from convgrad._cli import main
from kernels.target import NAME, REFERENCE
from tests.app.samples import SMALL, same_bits

pytestmark = pytest.mark.heavy

ROOT = Path(__file__).parents[2]
SHM = Path("/dev/shm")
INPUTS = SMALL.inputs()
# Larger than what is sent over the socket.
LARGE = np.arange(2 * 3 * 256 * 256, dtype=np.float32).reshape(2, 3, 256, 256) % 7
SUMS = {"data_format": "NCX"}

USER = """
import sys, convgrad
with convgrad.local(workers=1) as client:
    print(client.service_pid, flush=True)
    sys.stdin.readline()
"""


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A runtime folder of the test's own; no kernels are compiled."""
    folder = Path(tempfile.mkdtemp(prefix="cg"))  # with a short name, because it will hold sockets
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv(NAME, REFERENCE.name)
    yield folder
    shutil.rmtree(folder)


@contextmanager
def user() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Run a process that uses the local service until it is told to end; yields it and the service's process id."""
    command = [sys.executable, "-c", USER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        try:
            yield process, pid
        finally:
            if process.poll() is None:
                process.kill()


@contextmanager
def watched(pid: int) -> Iterator[int]:
    """Open a descriptor that becomes readable when the process has ended."""
    descriptor = os.pidfd_open(pid)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def ends(descriptor: int, seconds: float) -> bool:
    """Wait for the end of a watched process."""
    return bool(select.select([descriptor], [], [], seconds)[0])


def computes(client: convgrad.LocalClient) -> bool:
    """Compute a small call, and one in shared memory, and compare both with the oracle."""
    small = client.run(SMALL.op, INPUTS, SMALL.attributes())
    large = client.run("BiasAddBackward", {"diff_dst": LARGE}, SUMS)
    return same_bits(small, SMALL.expected(INPUTS)) and same_bits(large, LARGE.sum(axis=(0, 2, 3)))


def test_a_block_has_a_service(runtime: Path) -> None:
    """The block computes; after it the service ends by itself, and nobody else could enter its folder."""
    with convgrad.local(workers=1) as client, watched(client.service_pid) as service:
        assert computes(client)
        assert (runtime / "convgrad").stat().st_mode & 0o777 == 0o700
        assert not ends(service, 0)
        client.close()
        assert ends(service, 10)


def test_without_a_block_the_error_says_how_to_get_a_client() -> None:
    """Who calls a method of the client right away is told about `with` and `open`; other names are plain errors."""
    with pytest.raises(AttributeError, match="with convgrad"):
        attrgetter("run")(convgrad.local())
    with pytest.raises(AttributeError, match=r"no attribute rum$"):
        attrgetter("rum")(convgrad.local())


def test_large_results_are_in_shared_memory(runtime: Path) -> None:
    """From the second time on, a result is written to memory of its own, which stays what it is while it is in use."""
    bias = np.arange(3, dtype=np.float32)
    with convgrad.local(workers=1) as client:
        results = [client.run("BiasAdd", {"src": LARGE + n, "bias": bias}, SUMS) for n in range(4)]
        with pytest.raises(convgrad.DeadlineExceeded):
            client.run("BiasAdd", {"src": LARGE, "bias": bias}, SUMS, deadline=1e-9)
        results.append(client.run("BiasAdd", {"src": LARGE + 4, "bias": bias}, SUMS))
    assert [result.base is None for result in results] == [True, False, False, False, False]
    assert all(result.flags.writeable for result in results)
    for n, result in enumerate(results):
        assert same_bits(result, LARGE + n + bias.reshape(1, 3, 1, 1))


def test_several_large_results_are_in_shared_memory(runtime: Path) -> None:
    """From the second time on, each large output of a call is in memory of its own, and the small ones in the reply."""
    attributes: dict[str, Any] = {key: [1, 1] for key in ("strides", "dilations")}
    attributes |= {"pads_begin": [0, 0], "pads_end": [0, 0], "data_format": "NCX", "weights_format": "OIX"}
    call = "ConvolutionBackwardWeights"
    names = ["diff_weights", "diff_src", "diff_bias"]
    inputs = {"src": LARGE, "weights": np.ones((2, 3, 1, 1), np.float32), "diff_dst": LARGE[:, :2]}
    shared = []
    with convgrad.local(workers=1) as client:
        right = client.run_detailed(call, inputs, attributes, outputs=names).outputs
        for _ in range(3):
            found = client.run_outputs(call, inputs, attributes, outputs=names)
            assert list(found) == names
            assert all(same_bits(found[name], right[name]) for name in names)
            shared.append([found[name].base is not None for name in names])
        assert list(client.run_outputs(call, inputs, attributes, outputs=names[:1])) == names[:1]
    assert shared == [[False, False, False], [False, True, False], [False, True, False]]


def test_winograd_needs_compiled_code(runtime: Path) -> None:
    """Where no compiled code works, the algorithm is refused, and `auto` sums directly."""
    shapes = {"src": {"dtype": "f32", "shape": [1, 16, 4, 4]}, "diff_dst": {"dtype": "f32", "shape": [1, 16, 4, 4]}}
    attributes = {key: [1, 1] for key in ("strides", "dilations", "pads_begin", "pads_end")} | {
        "weights_shape": [16, 16, 3, 3]
    }
    formats = {"data_format": "NCX", "weights_format": "OIX"}
    with convgrad.local(workers=1) as client:
        call = "ConvolutionBackwardWeights", shapes, attributes | formats
        with pytest.raises(convgrad.InvalidParams, match="winograd needs compiled code; none works on this machine"):
            client.validate(*call, algorithm="winograd")
        assert client.validate(*call, algorithm="auto")["resolved"]["algorithm"] == "direct"


def test_async(runtime: Path) -> None:
    """`async with` gives an asynchronous client, which shares the service with a blocking one."""

    async def run() -> None:
        local = convgrad.local(workers=1)
        async with local as client, local as other:
            assert client.service_pid == other.service_pid
            results = await asyncio.gather(*(client.run("BiasAddBackward", {"diff_dst": LARGE}, SUMS) for _ in "abc"))
            assert all(same_bits(result, LARGE.sum(axis=(0, 2, 3))) for result in results)

    with convgrad.local(workers=1) as client:
        asyncio.run(run())
        assert computes(client)


def test_shared_between_processes(runtime: Path) -> None:
    """A second process uses the running service; it ends when both have left, whichever started it."""
    with user() as (first, pid), watched(pid) as service:
        with convgrad.local(workers=1) as client:
            assert client.service_pid == pid
            first.communicate("\n")
            assert computes(client)
            assert not ends(service, 0)
        assert ends(service, 10)


def test_other_parameters_are_another_service(runtime: Path) -> None:
    """Services with other settings, and those that are not shared, have processes of their own."""
    with (
        convgrad.local(workers=1) as one,
        convgrad.local(workers=1, settings={"queue_length": 3}) as two,
        convgrad.local(workers=1, share=False) as three,
    ):
        assert len({one.service_pid, two.service_pid, three.service_pid}) == 3
        assert computes(three)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_user_takes_the_service_along(runtime: Path, number: signal.Signals) -> None:
    """When its only user is killed, the service ends, its workers too, and nothing is left in /dev/shm."""
    before = set(SHM.iterdir())
    with user() as (process, pid), watched(pid) as service:
        children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        assert children
        with ExitStack() as stack:
            below = [stack.enter_context(watched(child)) for child in children]
            process.send_signal(number)
            assert ends(service, 5)
            assert all(ends(child, 5) for child in below)
    assert set(SHM.iterdir()) <= before


def test_a_child_of_a_killed_user_does_not_keep_the_service(runtime: Path) -> None:
    """A forked child that still has the connection open does not count as a user."""
    code = """
import os, sys, convgrad
with convgrad.local(workers=1) as client:
    print(client.service_pid, flush=True)
    if os.fork() == 0:
        sys.stdin.readline()
        os._exit(0)
    os.kill(os.getpid(), 9)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as it:
        assert it.stdout is not None
        with watched(int(it.stdout.readline())) as service:
            assert ends(service, 5)


def test_a_crashed_service_is_noticed_and_replaced(runtime: Path) -> None:
    """After the service is killed, a call says so at once; the next block starts another, in spite of what is left."""
    with convgrad.local(workers=1) as client:
        with watched(client.service_pid) as service:
            os.kill(client.service_pid, signal.SIGKILL)
            assert ends(service, 10)
        message = rf"the local service \(process {client.service_pid}\) has ended"
        for inputs in ({"diff_dst": LARGE}, {"diff_dst": LARGE[:, :, :4, :4]}):
            with pytest.raises(convgrad.TransportError, match=message):
                client.run("BiasAddBackward", inputs, SUMS)
        assert "ended" in repr(client)
        (folder,) = (runtime / "convgrad").iterdir()
        assert (folder / "users").is_socket()  # left behind
        with convgrad.local(workers=1) as other:
            assert other.service_pid != client.service_pid
            assert computes(other)


def test_what_ended_services_left_is_removed(runtime: Path) -> None:
    """Starting a service removes the folders of others that have ended, but not those of running ones."""
    old = runtime / "convgrad" / "0123456789abcdef"
    running = runtime / "convgrad" / "fedcba9876543210"
    for folder in (old, running):
        folder.mkdir(parents=True)
        folder.parent.chmod(0o700)
        (folder / "lock").touch()
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(folder / "http"))
    with (running / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with convgrad.local(workers=1):
            assert not old.exists()
            assert running.exists()


def test_a_service_that_can_not_start_says_why(runtime: Path) -> None:
    """The error has the last line of the service's log."""
    with pytest.raises(convgrad.ConnectFailed, match=r"has ended.*queue_length"):
        convgrad.local(workers=1, settings={"queue_length": 0}).open()


def test_a_folder_that_others_can_enter_is_not_used(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sockets are made only where nobody else can connect."""
    (runtime / "convgrad").mkdir(mode=0o755)
    monkeypatch.setattr(tempfile, "tempdir", str(runtime))
    with convgrad.local(workers=1) as client:
        assert f"{runtime}/convgrad-local-{os.getuid()}/" in repr(client)
    (runtime / f"convgrad-local-{os.getuid()}").chmod(0o777)
    with pytest.raises(OSError, match="only yours"):
        convgrad.local(workers=1).open()


def test_without_the_service_it_says_what_to_install(runtime: Path, tmp_path: Path) -> None:
    """Where only the client is installed, the error names the extra."""
    shutil.copytree(Path(convgrad.__file__).parent, tmp_path / "convgrad")
    code = (
        "import sys; from pathlib import Path; sys.path = [p for p in sys.path if not Path(p, 'app').is_dir()];"
        "import convgrad; convgrad.local().open()"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert "ConnectFailed: the service is not installed here: pip install '.[server]' in a clone" in done.stderr


def test_it_describes_itself(runtime: Path) -> None:
    """Text and HTML say which service a client has."""
    with convgrad.local(workers=1) as client:
        for text in (repr(client), client._repr_html_()):
            assert str(client.service_pid) in text
            assert "running" in text
            assert REFERENCE.name in text


def test_progress_is_shown(runtime: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """While the service starts, a bar is drawn and then cleared."""
    convgrad.local(workers=1, progress=True).open().close()
    shown = capsys.readouterr().err
    assert "local service: starting" in shown
    assert shown.endswith("\r\x1b[K")


def test_the_page(runtime: Path) -> None:
    """The examples of docs/local.md run as printed."""
    page = (ROOT / "docs" / "local.md").read_text(encoding="utf-8")
    first, opened, closed, *_ = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    command = [sys.executable, "-c", f"{first}\n{opened}\nprint(client)\n{closed}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    shape, client = done.stdout.splitlines()
    assert shape == "(32, 64, 3, 3)"
    assert client.startswith("<convgrad.LocalClient: service process ")


def test_the_command(runtime: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--local` computes and verifies without a service that somebody has started."""
    np.save(tmp_path / "diff_dst.npy", LARGE)
    given = ["BiasAddBackward", "--input", f"diff_dst={tmp_path / 'diff_dst.npy'}", "--attr", "data_format=NCX"]
    result = str(tmp_path / "diff_bias.npy")
    assert main(["run", *given, "--local", "-o", result]) == 0
    assert same_bits(np.load(result), LARGE.sum(axis=(0, 2, 3)))
    assert main(["verify", *given, "--local", "--result", result]) == 0
    assert "PASS" in capsys.readouterr().out.upper()


def test_the_fixture(runtime: Path, tmp_path: Path) -> None:
    """Tests elsewhere get a client from the fixture, and the service ends with the session."""
    (tmp_path / "conftest.py").write_text("from convgrad.testing import convgrad_client\n", encoding="utf-8")
    (tmp_path / "test_it.py").write_text(
        "import numpy\n"
        "def test_it(convgrad_client):\n"
        "    ones = numpy.ones((1, 2, 3, 1), numpy.float32)\n"
        "    found = convgrad_client.run('BiasAddBackward', {'diff_dst': ones}, {'data_format': 'NCX'})\n"
        "    assert found.tolist() == [3, 3]\n",
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "1 passed" in done.stdout, done.stdout
    (folder,) = (runtime / "convgrad").iterdir()
    with (folder / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # waits until the service has ended
