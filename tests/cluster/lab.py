"""Two machines of a Ray cluster, each a network namespace with one processor, and ways to break them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

HUB, PORT, MARK = "cg-hub", 6399, "CLUSTER_NODE"
"""The namespace of the switch, the head's port, and the variable by which the processes of a node are found."""


def address(node: int) -> str:
    """Return a node's address; node 1 is the head, in whose namespace the tests run."""
    return f"10.88.77.{node}"


HEAD = f"{address(1)}:{PORT}"


class Lab:
    """Start and end the nodes; all of Ray's processes and files are gone after `close`."""

    def __init__(self) -> None:
        self._folders: list[str] = []
        self._ray = str(Path(sys.executable).with_name("ray"))

    def start(self, node: int, **environment: str) -> None:
        """Start a node; returns when Ray says that it runs."""
        # short, because Ray's sockets have long names in it
        folder = tempfile.mkdtemp(prefix=f"cg{node}-", dir="/tmp")
        self._folders.append(folder)
        role = ["--head", f"--port={PORT}", "--include-dashboard=false"] if node == 1 else [f"--address={HEAD}"]
        processor = sorted(os.sched_getaffinity(0))[(node - 1) % len(os.sched_getaffinity(0))]
        command = [
            *("ip", "netns", "exec", f"cg-{node}", "taskset", "-c", str(processor)),
            *(self._ray, "start", *role, f"--node-ip-address={address(node)}", "--num-cpus=1"),
            *("--object-store-memory=300000000", f"--temp-dir={folder}"),
        ]
        known = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
        subprocess.run(
            command, env={**known, MARK: str(node), **environment}, check=True, capture_output=True, timeout=90
        )

    def pids(self, node: int) -> list[int]:
        """Return the processes of a node."""
        mark = f"{MARK}={node}".encode()
        found = []
        for folder in Path("/proc").iterdir():
            with suppress(OSError):
                if folder.name.isdigit() and mark in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
        return found

    def kill(self, node: int) -> None:
        """Kill all processes of a node at once."""
        while pids := self.pids(node):
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def workers(self, node: int) -> Iterator[int]:
        """Yield the processes of a node that have loaded kernels."""
        for pid in self.pids(node):
            with suppress(OSError):
                if "llvmlite" in Path(f"/proc/{pid}/maps").read_text():
                    yield pid

    def cut(self, node: int) -> None:
        """Cut a node's link without a word: packets are lost."""
        subprocess.run(["ip", "-n", HUB, "link", "set", f"port{node}", "nomaster"], check=True)

    def mend(self, node: int) -> None:
        """Mend it."""
        subprocess.run(["ip", "-n", HUB, "link", "set", f"port{node}", "master", "switch"], check=True)

    def close(self) -> None:
        """End every process and remove every file."""
        for node in (2, 1):
            self.kill(node)
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)
