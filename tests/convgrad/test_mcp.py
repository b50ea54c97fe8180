"""`convgrad mcp`: every tool over standard streams, by the official client; files are those of one folder."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable, Coroutine, Mapping
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from mcp import Client
from mcp.client.stdio import StdioServerParameters

from convgrad._cli import main
from convgrad._mcp.local import LocalCalls
from convgrad._mcp.server import make_server
from tests.mcp_tools import ATTRIBUTES, MODES, OP, SEEDS, failed, gradient, long_verification, walk

Array = npt.NDArray[Any]


def blocking(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test that is a coroutine function."""

    @wraps(test)
    def run(**fixtures: Any) -> None:
        asyncio.run(test(**fixtures))

    return run


class Folder:
    """The allowed folder, as the walk through the tools uses it."""

    def __init__(self, root: Path) -> None:
        self.root = root

    async def put(self, name: str, array: Array) -> dict[str, Any]:
        """Write a file; return its reference."""
        np.save(self.root / f"{name}.npy", array)
        return {"path": f"{name}.npy"}

    async def get(self, reference: Mapping[str, Any]) -> Array:
        """Read the file of a reference."""
        found: Array = np.load(self.root / reference["path"])
        return found


@pytest.mark.heavy
@pytest.mark.parametrize("mode", MODES)
@blocking
async def test_every_tool(mode: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both revisions have the tools, the resources and the prompt; the record is a file that anybody can verify."""
    command = ["-m", "convgrad", "mcp", "--root", str(tmp_path)]
    folder = Folder(tmp_path)
    async with Client(StdioServerParameters(command=sys.executable, args=command), mode=mode) as client:
        assert client.protocol_version == MODES[mode]
        outcome = await walk(client, folder.put, folder.get)
    assert Path(outcome["record"]).parent.parent == tmp_path / "convgrad-mcp"
    assert main(["check", "--verify-signature", outcome["record"]]) == 1  # it is valid, and a case was not taken
    assert "mine: INCOMPLETE; 2 of 3 cases passed" in capsys.readouterr().out


@blocking
async def test_paths_outside_the_folder(tmp_path: Path) -> None:
    """Parents, absolute paths, links out of the folder, and the folder itself are refused; so are all without one."""
    root, outside = tmp_path / "root", tmp_path / "outside.npy"
    root.mkdir()
    np.save(outside, gradient())
    (root / "link.npy").symlink_to(outside)
    (root / "inside.npy").symlink_to("real.npy")
    np.save(root / "real.npy", gradient())
    (root / "folder").symlink_to(tmp_path)
    (root / "loop").symlink_to("loop")
    (root / "hidden.npy").symlink_to("loop/../folder/outside.npy")
    asked: dict[str, Any] = {"op": OP, "attributes": ATTRIBUTES, "inputs": SEEDS}
    async with Client(make_server(LocalCalls(root))) as client:
        for path in (
            "../outside.npy", str(outside), "link.npy", "folder/outside.npy", ".", "a/../../outside.npy", "\0",
            "hidden.npy", "loop/../folder/outside.npy",
        ):  # fmt: skip
            error = await failed(client, "verify", **asked, result={"path": path})
            assert error["code"] == "forbidden", path
        for path in ("none.npy", "loop", "x" * 5000, "real.npy/x"):
            assert (await failed(client, "verify", **asked, result={"path": path}))["code"] == "not_found", path
        assert (await failed(client, "verify", **asked, result={"handle": "0" * 32}))["code"] == "not_found"
        inside = await client.call_tool("verify", {**asked, "result": {"path": "inside.npy"}})
        assert (inside.structured_content or {})["passed"]
    async with Client(make_server(LocalCalls(None))) as client:
        assert (await failed(client, "verify", **asked, result={"path": "real.npy"}))["code"] == "forbidden"


@blocking
async def test_results_are_not_written_through_a_link(tmp_path: Path) -> None:
    """A link out of the folder under the name of the tools' own folder gets no file."""
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    (root / "convgrad-mcp").symlink_to(outside)
    async with Client(make_server(LocalCalls(root))) as client:
        assert (await failed(client, "compute", op=OP, attributes=ATTRIBUTES, inputs=SEEDS))["code"] == "forbidden"
    assert not [*outside.iterdir()]


@blocking
async def test_references_that_name_no_tensor(tmp_path: Path) -> None:
    """A reference with two places, none, or a seed without a shape or of too many elements is refused."""
    asked: dict[str, Any] = {"op": OP, "attributes": ATTRIBUTES, "inputs": SEEDS}
    async with Client(make_server(LocalCalls(tmp_path))) as client:
        many = {"seed": 1, "shape": [1] * 65}
        for result in ({}, {"seed": 1}, {"seed": 1, "shape": [-1]}, many, {"path": "a", "handle": "b"}):
            assert (await failed(client, "verify", **asked, result=result))["code"] == "invalid_params"
        large = {"seed": 1, "shape": [1 << 13, 1 << 13]}
        assert (await failed(client, "verify", **asked, result=large))["code"] == "too_large"
        unknown = await client.call_tool("verify", {**asked, "result": {"url": "http://localhost"}})
        assert unknown.is_error


@pytest.mark.heavy
@pytest.mark.parametrize("mode", MODES)
@blocking
async def test_cancelling(mode: str) -> None:
    """A verification stops soon after its client gives it up, and the server answers others.

    Soon is less than a third of the processor time until then; all that was left would take three quarters.
    """
    before, began = children(), asyncio.Event()

    async def progress(progress: float, total: float | None, message: str | None) -> None:
        began.set()

    command = ["-m", "convgrad", "mcp"]
    async with Client(StdioServerParameters(command=sys.executable, args=command), mode=mode) as client:
        (server,) = children() - before
        asked = client.call_tool("verify", long_verification(), progress_callback=progress)
        call = asyncio.create_task(asked)
        await began.wait()
        assert computes(server)
        until_then = processor_s(server)
        call.cancel()
        quiet = 0
        while quiet < 20:  # a thread that computes may wait for memory for a moment
            await asyncio.sleep(0.01)
            quiet = 0 if computes(server) else quiet + 1
        assert processor_s(server) - until_then < until_then / 3
        assert not (await client.call_tool("describe", {"op": OP})).is_error


def children() -> set[int]:
    """Return the processes that this thread has started."""
    return {int(pid) for pid in Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()}


def computes(pid: int) -> bool:
    """Return whether a thread of a process runs, or waits for a processor."""
    stats = [path.read_text().rpartition(")")[2].split() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return any(state == "R" for state, *_ in stats)


def processor_s(pid: int) -> float:
    """Return the seconds that a process's threads have computed."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def test_the_folder_must_exist(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A missing folder is an error before the server reads anything."""
    assert main(["mcp", "--root", str(tmp_path / "none")]) == 2
    assert "--root must be a folder that exists" in capsys.readouterr().err
