"""The bridge: the machines of a job, what is written of its units, and the answers to the server."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.cluster.bridge import _Bridge
from app.cluster.machines import Machines, _task
from app.cluster.messages import Node, Reply, Request
from app.pool.messages import pair, receive
from kernels import plan
from tests.app.cluster.site import DEEP
from tests.app.pool.fleet import random_inputs

PLAN, INPUTS = plan(DEEP, workers=8), random_inputs(DEEP)


def machines(**ready: int) -> Machines:
    """Return machines with these numbers of workers that are ready."""
    made = Machines(identity="", home="home")
    made.states = {name: Node(name, count, 1) for name, count in ready.items()}
    return made


@pytest.mark.parametrize("most", [1, 2, 4])
def test_a_job_uses_as_many_machines_as_it_may(most: int) -> None:
    """They are ready, and those with the fewest jobs."""
    load = Counter(one=3, two=1, three=2)
    found = machines(one=1, two=1, three=1, broken=0).choose((), most, load.__getitem__)
    assert found == set(("two", "three", "one")[:most])


def test_another_machine_takes_the_place_of_a_lost_one() -> None:
    """The machines that already have the inputs of a job are kept."""
    load = Counter(one=9, three=1)
    assert machines(one=1, two=1, three=1).choose({"one", "gone"}, 2, load.__getitem__) == {"one", "two"}


def set_state(folder: Path, **broken: str) -> None:
    """Say what is wrong with the machine."""
    (folder / "new").write_text(json.dumps({"machines": {"one": 1}, "broken": broken}), "utf-8")
    (folder / "new").replace(folder / "state")


@pytest.fixture
def ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The stand-in for Ray, in this process, with one machine."""
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "ray"}
    for name in before:
        del sys.modules[name]
    monkeypatch.syspath_prepend(str(Path(__file__).with_name("stand_in")))
    monkeypatch.setenv("STAND_IN", str(tmp_path / "state"))
    set_state(tmp_path)
    made = importlib.import_module("ray")
    made.init(runtime_env={"env_vars": {}})
    _task.cache_clear()  # else the tasks of an earlier stand-in, whose cluster has shut down
    yield made
    made.shutdown()
    for name in [name for name in sys.modules if name.partition(".")[0] == "ray"]:
        del sys.modules[name]
    sys.modules.update(before)


def memory(array: np.ndarray[Any, Any]) -> int:
    """Return the descriptor of a file in memory with these elements."""
    descriptor = os.memfd_create("test")
    os.pwrite(descriptor, array.tobytes(), 0)
    return descriptor


def test_the_answer_of_a_cancelled_unit_is_not_written(ray: Any, tmp_path: Path) -> None:
    """The server computes the unit meanwhile, and an answer would be written over in parts."""
    before = np.full(DEEP.output_shape, 7.0, DEEP.output_dtype).tobytes()
    output = memory(np.frombuffer(before))
    set_state(tmp_path, one="silent")
    sock, other = pair()

    async def scenario() -> None:
        bridge = _Bridge(other, machines(one=1))
        await bridge.begin(1, PLAN, 1, *map(memory, INPUTS), os.dup(output))
        unit = asyncio.create_task(bridge.compute(1, 0))
        while not (tmp_path / "state.units").exists():  # noqa: ASYNC110 - a thread writes it
            await asyncio.sleep(0.001)
        unit.cancel()
        await asyncio.wait({unit})
        assert bridge._abandoned
        set_state(tmp_path)
        while bridge._abandoned:  # noqa: ASYNC110 - the answer comes
            await asyncio.sleep(0.001)
        await bridge.release(1)

    with sock, other:
        asyncio.run(scenario())
    assert os.pread(output, len(before), 0) == before
    os.close(output)


def test_a_request_that_is_cancelled_at_once_is_answered(ray: Any) -> None:
    """The server waits for the answer before it gives the memory to others."""
    sock, other = pair()
    sock.settimeout(30.0)

    async def scenario() -> None:
        bridge = _Bridge(other, machines(one=1))
        await bridge.begin(1, PLAN, 1, *map(memory, INPUTS), memory(np.zeros(DEEP.output_shape, DEEP.output_dtype)))
        bridge._on_request(Request(7, "compute", (1, 0)), [])
        bridge._on_request(Request(7), [])
        while bridge._requests or bridge._abandoned:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.001)
        await bridge.release(1)

    with sock, other:
        asyncio.run(scenario())
        assert receive(sock) == (Reply(7, None), [])
