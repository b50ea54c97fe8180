"""Jobs by the clients and the command, on a real service."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import convgrad
from convgrad import AsyncClient, Client, Progress
from convgrad._cli import main
from tests.app import graph
from tests.app.everywhere import command
from tests.app.resident import Resident, resident_service
from tests.app.samples import SMALL, square
from tests.convgrad.server import Handler, Received, Server

SRC = np.arange(8, dtype=np.float32).reshape(1, 2, 4)
# Seconds of work for one worker with the reference kernel, in 40 MB.
LASTING = square(16, 128, 128, 40, 20)


@pytest.fixture(scope="module")
def resident(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Resident]:
    """A service with jobs."""
    with resident_service(workers=1, spool=tmp_path_factory.mktemp("spool"), spool_key_limit=64 << 20) as resident:
        yield resident


@pytest.fixture
def jobs(resident: Resident) -> Iterator[Client]:
    """A client of it; at the end no job is left."""
    with Client(resident.url) as client:
        yield client
        for _ in range(2):
            for state in client.jobs():
                client.job(state["job"]).cancel()
        assert client.jobs() == []


def test_a_job(jobs: Client) -> None:
    """What is submitted is computed, and its result is that of the call; another client finds it by its id."""
    inputs, names = SMALL.inputs(), ["diff_weights", "diff_bias"]
    job = jobs.submit(SMALL.op, inputs, SMALL.attributes(), outputs=names)
    assert job.state["state"] in ("queued", "running", "done")
    assert job.wait() == "done"
    found, called = job.result(), jobs.run_detailed(SMALL.op, inputs, SMALL.attributes(), outputs=names)
    assert isinstance(found, convgrad.Result)
    assert list(found.outputs) == names
    for name, array in called.outputs.items():
        assert found.outputs[name].tobytes() == array.tobytes()
    assert (found.op, found.resolved) == (called.op, called.resolved)
    assert jobs.job(job.id).result().array.tobytes() == SMALL.expected(inputs).tobytes()
    assert [state["job"] for state in jobs.jobs()] == [job.id]


def test_verifications_and_graphs(jobs: Client) -> None:
    """They are jobs too, whose results have the types of their methods."""
    inputs = SMALL.inputs()
    wrong = SMALL.expected(inputs) + 1
    report = jobs.submit_verification(SMALL.op, inputs, wrong, SMALL.attributes()).result()
    assert isinstance(report, convgrad.Report)
    assert not report.passed
    given = graph.tensors(3)
    found = jobs.submit_graph(graph.EXAMPLE, given, [6, 2]).result()
    assert list(found) == [6, 2]
    for number, array in found.items():
        np.testing.assert_array_equal(array, graph.expected(given)[number])


def test_idempotency(jobs: Client) -> None:
    """The same key is the same job, with another call an error; without a key each submission is a job."""
    inputs, attributes = SMALL.inputs(), SMALL.attributes()
    first = jobs.submit(SMALL.op, inputs, attributes, idempotency_key="mine")
    assert jobs.submit(SMALL.op, inputs, attributes, idempotency_key="mine").id == first.id
    with pytest.raises(convgrad.InvalidParams, match="another request"):
        jobs.submit(SMALL.op, inputs, attributes, idempotency_key="mine", reference=True)
    assert len({jobs.submit(SMALL.op, inputs, attributes).id for _ in range(2)} | {first.id}) == 3


def test_progress_and_cancelling(jobs: Client) -> None:
    """A running job reports its progress, and can be waited for in vain, cancelled, and deleted."""
    job = jobs.submit(LASTING.op, LASTING.floats(), LASTING.attributes(), reference=True)
    seen: list[Progress] = []

    def stop(progress: Progress) -> None:
        seen.append(progress)
        with pytest.raises(convgrad.TimedOut, match="not ended within 0 s"):
            job.wait(0)
        job.cancel()

    with pytest.raises(convgrad.Cancelled):
        job.result(on_progress=stop)
    assert seen
    assert seen[0].total > seen[0].done
    job.cancel()
    with pytest.raises(convgrad.NotFound):
        job.refresh()


def test_errors(jobs: Client) -> None:
    """A call that is wrong, or beyond the spool, is refused at once; one that fails later raises when asked for."""
    inputs, attributes = SMALL.inputs(), SMALL.attributes()
    with pytest.raises(convgrad.InvalidParams, match="strides"):
        jobs.submit(SMALL.op, inputs, attributes | {"strides": [0, 0]})
    with pytest.raises(convgrad.Overloaded, match="DELETE /v1/jobs") as full:
        jobs.submit("BiasAddBackward", {"diff_dst": np.zeros((1, 1, 1, 17 << 20), np.float32)}, {})
    assert full.value.data["reason"] == "spool_key"
    late = jobs.submit(LASTING.op, LASTING.floats(), LASTING.attributes(), reference=True, deadline=0.5)
    with pytest.raises(convgrad.DeadlineExceeded):
        late.result()
    for unknown in ("0" * 32, "../ops", ""):
        with pytest.raises(convgrad.NotFound):
            jobs.job(unknown)


def test_the_async_client(resident: Resident) -> None:
    """The asyncio twins have the same results."""

    async def submit() -> list[Any]:
        async with AsyncClient(resident.url) as client:
            inputs = SMALL.inputs()
            found = [await client.submit(SMALL.op, inputs, SMALL.attributes()) for _ in range(2)]
            results = await asyncio.gather(*(job.result() for job in found))
            for job in found:
                await job.cancel()
            return [result.array for result in results]

    for array in asyncio.run(submit()):
        assert array.tobytes() == SMALL.expected(SMALL.inputs()).tobytes()


def test_where_there_are_no_jobs(server: Server, client: Client) -> None:
    """A service without jobs computes the call at once, which is an error, as is a submission in this process."""
    computed = {"op": "Op", "outputs": {}}
    server.script.append(lambda handler, _: handler.reply(200, json.dumps(computed).encode()))
    with pytest.raises(convgrad.NotFound, match="CONVGRAD_SPOOL"):
        client.submit("Op", {"src": SRC}, {})
    with convgrad.local() as here, pytest.raises(convgrad.NotFound, match="has no jobs"):
        here.submit("BiasAddBackward", {"diff_dst": SRC}, {})


def test_a_full_spool_is_not_retried(server: Server, client: Client) -> None:
    """A spool that is full stays full for a while: the error is raised at once."""
    server.script.append(lambda handler, _: handler.problem(507, "overloaded", reason="spool_key"))
    with pytest.raises(convgrad.Overloaded):
        client.submit("Op", {"src": SRC}, {})
    assert len(server.received) == 1


def test_a_lost_reply(server: Server, client: Client) -> None:
    """A submission whose reply is lost is sent again, with the same key."""

    def accept(handler: Handler, received: Received) -> None:
        handler.reply(202, json.dumps({"job": "0" * 32, "state": "queued"}).encode())

    server.script += [lambda handler, _: setattr(handler, "close_connection", True), accept]
    assert client.submit("Op", {"src": SRC}, {}).id == "0" * 32
    first, second = server.received
    assert first.headers["prefer"] == "respond-async"
    assert first.headers["idempotency-key"] == second.headers["idempotency-key"] != ""


def test_the_command(
    jobs: Client,
    resident: Resident,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`run --detach` prints an id, and `jobs` lists, shows, waits, writes and deletes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CONVGRAD_URL", resident.url)
    inputs = SMALL.inputs()
    call = command(SMALL, inputs)
    assert main(["run", *call, "--detach", "--idempotency-key", "mine"]) == 0
    job = capsys.readouterr().out.strip()
    assert main(["run", *call, "--detach", "--idempotency-key", "mine", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["job"] == job
    assert main(["jobs", job, "-o", "dw.npy"]) == 0
    assert f"{job} -> dw.npy" in capsys.readouterr().err
    assert np.load("dw.npy").tobytes() == SMALL.expected(inputs).tobytes()
    assert main(["jobs"]) == 0
    assert capsys.readouterr().out.startswith(f"{job} done      {SMALL.op} 20")
    report = jobs.submit_verification(SMALL.op, inputs, SMALL.expected(inputs), SMALL.attributes())
    assert main(["jobs", report.id, "-o", "report.json", "--quiet"]) == 0
    assert json.loads(Path("report.json").read_text("utf-8"))["passed"]
    for number, array in graph.tensors().items():
        np.save(f"{number}.npy", array)
    given = [word for number in graph.tensors() for word in ("--input", f"{number}={number}.npy")]
    assert main(["run", "--graph", str(graph.EXAMPLE), *given, "--output", "6=x.npy", "-o", "4=y.npy", "--detach"]) == 0
    assert main(["jobs", capsys.readouterr().out.strip(), "-o", "both.npz"]) == 0
    assert np.load("both.npz")["6"].tobytes() == graph.expected(graph.tensors())[6].tobytes()
    capsys.readouterr()
    assert main(["jobs", job, "--cancel", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "done"
    assert main(["jobs", job]) == 3
