"""Jobs on services that are killed: none is lost, wrong, or computed twice at a time."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from argparse import Namespace
from pathlib import Path

import httpx
import pytest

from tests.app.samples import JSON, SMALL, document, doubled, post, problem, read, same_bits, square, wait_for
from tests.faults.soak_jobs import Attempt, attempts, overlapping, soak, summary
from tests.live import running_service

ASYNC = {"prefer": "respond-async"}
# Half a megabyte, with a result of two.
WIDE = doubled(256, 2, 2)
# Seconds of work for one worker with the reference kernel.
LASTING = square(16, 128, 128, 40, 20)


def test_overlaps_are_found() -> None:
    """The log of a replica tells when its attempts ran; two of a job at the same time are found."""
    lines = [
        "2026-11-29 03:00:01,000 INFO    job queued job=aa kind=compute op=X key=- request_id=r",
        "2026-11-29 03:00:02,000 INFO    job running job=aa key=- attempt=1",
        "2026-11-29 03:00:02,500 INFO    job running job=bb key=- attempt=3",
        "2026-11-29 03:00:04,000 INFO    job done job=bb kind=compute op=X attempt=3 outcome=done ms=1500.0",
    ]
    begin = next(attempts(lines, 0.0)).begin
    killed = begin + 5
    found = {each.job: each for each in attempts(lines, killed)}
    assert found["bb"] == Attempt("bb", 3, begin, begin + 1.5, "done")
    assert found["aa"] == Attempt("aa", 1, begin - 0.5, killed, "killed")
    second = Attempt("aa", 2, killed + 1, killed + 2, "done")
    assert not overlapping([second, *found.values()])
    assert overlapping([Attempt("aa", 2, killed - 1, killed + 2, "done"), *found.values()])


@pytest.mark.heavy(minutes=1)
def test_a_killed_service(tmp_path: Path) -> None:
    """After `kill -9` the next service has the results, runs the others, and begins the one that ran again."""
    inputs = SMALL.inputs()
    with running_service("--spool", str(tmp_path), "--workers", "1") as service:
        with httpx.Client(base_url=service.url, timeout=60) as http:
            done = post(http, SMALL, inputs, headers=ASYNC).headers["location"]
            wait_for(lambda: http.get(done).json()["state"] == "done")
            long = [
                post(http, LASTING, LASTING.floats(), headers=ASYNC, reference=True).headers["location"]
                for _ in range(5)
            ]
            wait_for(lambda: http.get(long[0]).json()["state"] == "running")
            body, named = document(SMALL, inputs), ASYNC | {"idempotency-key": "mine"}
            queued = http.post(f"/v1/ops/{SMALL.op}", json=body, headers=named).headers["location"]
        service.process.send_signal(signal.SIGKILL)
        service.process.wait()
    with (
        running_service("--spool", str(tmp_path), "--workers", "1") as service,
        httpx.Client(base_url=service.url, timeout=60) as http,
    ):
        assert same_bits(read(http.get(f"{done}/result")), SMALL.expected(inputs))
        again = http.post(f"/v1/ops/{SMALL.op}", json=body, headers=named).headers["location"]
        assert again == queued
        for path in long[1:]:
            http.delete(path)
        wait_for(lambda: http.get(queued).json()["state"] == "done")
        assert same_bits(read(http.get(f"{queued}/result", headers={"accept": JSON})), SMALL.expected(inputs))
        wait_for(lambda: "running" in http.get(long[0]).json()["state"])
        wait_for(lambda: any("job taken over" in line for line in service.log))
        http.delete(long[0])
        assert {path.name for path in (tmp_path / "requests").iterdir()} == set()


@pytest.mark.heavy(minutes=1)
def test_a_drained_service(tmp_path: Path) -> None:
    """A service that is told to stop puts its jobs back into the queue, and the next one runs them at once."""
    flags = ("--spool", str(tmp_path), "--workers", "1", "--drain-s", "0")
    with running_service(*flags) as service, httpx.Client(base_url=service.url, timeout=60) as http:
        path = post(http, LASTING, LASTING.floats(), headers=ASYNC, reference=True).headers["location"]
        wait_for(lambda: http.get(path).json()["state"] == "running")
        service.process.send_signal(signal.SIGTERM)
        assert service.process.wait(60) == 0
        assert any("job released" in line for line in service.log)
    with running_service(*flags) as service, httpx.Client(base_url=service.url, timeout=60) as http:
        wait_for(lambda: http.get(path).json()["state"] == "running")
        assert not any("taken over" in line for line in service.log)
        http.delete(path)


@pytest.mark.heavy(minutes=1)
def test_a_full_disk(tmp_path: Path) -> None:
    """Without room for a result its job fails, without room for a request it is refused; then the next one works."""
    mount = ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs -o size=12m spool {tmp_path} && exec "$@"', "sh"]
    if subprocess.run([*mount, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a file system")
    inputs = WIDE.inputs()
    with (
        running_service("--spool", str(tmp_path), "--workers", "1", under=mount) as service,
        httpx.Client(base_url=service.url, timeout=60) as http,
    ):
        spool, done = Path(f"/proc/{service.pid}/root{tmp_path}"), []
        while True:
            path = post(http, WIDE, inputs, headers=ASYNC).headers["location"]
            wait_for(lambda path=path: http.get(path).json()["state"] not in ("queued", "running"))  # type: ignore[misc]
            state = http.get(path).json()
            if state["state"] == "failed":
                break
            done.append(path)
        assert state["error"]["data"]["reason"] == "spool_disk"
        assert "DELETE /v1/jobs" in problem(http.get(f"{path}/result"), 507, "overloaded")["detail"]
        refused = post(http, LASTING, LASTING.floats(), headers=ASYNC)
        assert problem(refused, 507, "overloaded")["reason"] == "spool_disk"
        assert all(each.stat().st_size > WIDE.expected(inputs).nbytes for each in (spool / "results").iterdir())
        assert len([*(spool / "results").iterdir()]) == len(done)
        assert not [*(spool / "requests").iterdir()]
        for path in done:
            assert same_bits(read(http.get(f"{path}/result")), WIDE.expected(inputs))
        http.delete(done[0])
        path = post(http, WIDE, inputs, headers=ASYNC).headers["location"]
        wait_for(lambda: http.get(path).json()["state"] == "done")


@pytest.mark.release
@pytest.mark.heavy(minutes=3)
def test_two_replicas_under_kills(tmp_path: Path) -> None:
    """Workers and replicas are killed: every job is right, once, and in the end the spool is empty."""
    options = Namespace(jobs=20, kills=1.0, restarts=5.0, at_once=6, seed=3)
    outcome = asyncio.run(soak(options, tmp_path))
    assert not outcome.failed, summary(outcome)
    assert outcome.right == 20
    assert outcome.strikes["services"]
    assert any(each.outcome == "killed" for each in outcome.attempts)
