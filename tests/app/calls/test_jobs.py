"""The spool: who is next, whose claim is valid, what survives a crash, and what it may hold."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.api.jobs import Run
from app.calls.jobs.jobs import Jobs
from app.calls.jobs.spool import LEASE_S, Job, NewJob, Spool, SpoolLimits
from convgrad import InternalError, InvalidParams, NotFound
from convgrad._errors import SpoolFull
from tests.app.resident import Resident

LIMITS = SpoolLimits(total=10_000, key_bytes=6_000, key_jobs=50, keep_s=3600.0)


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    """A spool with small limits."""
    spool = Spool(tmp_path, LIMITS)
    yield spool
    spool.close()


def new(owner: str = "key a", size: int = 10, digest: str = "d", again: str | None = None) -> NewJob:
    """Return a job that is to be added."""
    job = os.urandom(16).hex()
    return NewJob(job, owner, owner[4:], "-", "request", "compute", "BiasAdd", "text/plain", digest, again, size)


def added(spool: Spool, *args: Any, **members: Any) -> Job:
    """Add a job with its request."""
    job = new(*args, **members)
    assert spool.repeated(job) is None
    spool.write_request(job, [b"request"])
    return spool.add(job)


def claimed(spool: Spool) -> Job:
    """Claim a job, which there is."""
    found = spool.claim()
    assert found is not None
    return found[0]


def files(folder: Path) -> list[str]:
    """Return the requests and results on the disk."""
    return sorted(path.name for kind in ("requests", "results") for path in (folder / kind).iterdir())


def expire(spool: Spool) -> None:
    """Let the claims of replicas that are gone end."""
    spool._index.execute("UPDATE jobs SET lease = ?", (time.monotonic() - 1,))


def test_owners_take_turns(spool: Spool) -> None:
    """An owner with many jobs does not hold up another one, and the places say so."""
    many = [added(spool, "key a") for _ in range(4)]
    few = [added(spool, "key b") for _ in range(2)]
    assert spool.places("key a") == dict(zip((job.id for job in many), (2, 4, 5, 6), strict=True))
    assert spool.places("key b") == dict(zip((job.id for job in few), (2, 4), strict=True))
    order = [claimed(spool).owner[-1] for _ in range(6)]
    assert sorted(order[:2]) == sorted(order[2:4]) == ["a", "b"]
    assert order[4:] == ["a", "a"]
    assert spool.claim() is None


def test_only_the_last_claim_ends_a_job(spool: Spool, tmp_path: Path) -> None:
    """A job is not claimed twice while its claim is renewed; once it is taken over, the first result is dropped."""
    job = added(spool)
    other = Spool(tmp_path, LIMITS)
    first = claimed(spool)
    assert other.claim() is None
    assert spool.renew({(job.id, first.attempt): (3, 4)}) == set()
    assert (other.find(job.id, "key a").done, other.find(job.id, "key a").total) == (3, 4)
    expire(spool)
    found = other.claim()
    assert found is not None
    second, begun = found
    assert begun
    assert spool.renew({(job.id, first.attempt): (4, 4)}) == {job.id}
    spool.write_result(first, [b"stale"])
    other.write_result(second, [b"right"])
    assert not spool.finish(first, 5)
    assert other.finish(second, 5)
    assert files(tmp_path) == [other.result_path(second).name]
    assert other.result_path(spool.find(job.id, "key a")).read_bytes() == b"right"
    other.close()


def test_a_killed_attempt_leaves_nothing(spool: Spool, tmp_path: Path) -> None:
    """The result of an attempt whose replica was killed before it ended the job goes with the job."""
    job = added(spool)
    spool.write_result(claimed(spool), [b"first"])
    expire(spool)
    second = claimed(spool)
    spool.write_result(second, [b"second"])
    assert spool.finish(second, 6)
    spool.cancel(job.id, "key a")
    assert files(tmp_path) == []


def test_clocks(spool: Spool) -> None:
    """A claim renewed after another replica has looked at the clock is valid; one from before a restart is not."""
    added(spool)
    claimed(spool)
    for ahead, is_valid in ((1.5 * LEASE_S, True), (100 * LEASE_S, False)):
        spool._index.execute("UPDATE jobs SET lease = ?", (time.monotonic() + ahead,))
        assert (spool.claim() is None) is is_valid


def test_a_job_that_ends_its_replicas_fails(spool: Spool) -> None:
    """A job during which replica after replica has ended is not tried forever."""
    job = added(spool)
    for _ in range(8):
        claimed(spool)
        expire(spool)
    assert spool.claim() is None
    found = spool.find(job.id, "key a")
    assert found.state == "failed"
    assert "8 times" in str(found.error)


def test_the_index_survives(spool: Spool, tmp_path: Path) -> None:
    """A process that is killed leaves whole jobs; files that the index does not name are removed later."""
    code = f"""
import os, signal
from pathlib import Path
from app.calls.jobs.spool import Spool
from tests.app.calls.test_jobs import LIMITS, added, claimed, new
spool = Spool(Path({str(tmp_path)!r}), LIMITS)
added(spool), added(spool)
job = claimed(spool)
spool.write_result(job, [b"result"])
spool.write_request(new(), [b"request"])
(Path({str(tmp_path)!r}) / "results" / "x.part").write_bytes(b"half")
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[3], check=False)
    assert done.returncode == -signal.SIGKILL
    assert [job.state for job in spool.of("key a")] == ["queued", "running"]
    spool.sweep()
    assert len(files(tmp_path)) == 5
    for kind in ("requests", "results"):
        for path in (tmp_path / kind).iterdir():
            os.utime(path, (0, 0))
    spool.sweep()
    jobs = spool.of("key a")
    assert files(tmp_path) == sorted([job.id for job in jobs] + [f"{jobs[1].id}-1"])


def test_results_expire(spool: Spool, tmp_path: Path) -> None:
    """After its time a job is forgotten, with its result."""
    job, left = added(spool), added(spool)
    spool.write_result(claimed(spool), [b"result"])
    assert spool.finish(spool.find(job.id, "key a"), 6)
    spool._index.execute("UPDATE jobs SET finished = finished - ?", (LIMITS.keep_s + 1,))
    spool.sweep()
    assert [each.id for each in spool.of("key a")] == [left.id]
    assert files(tmp_path) == [left.id]


@pytest.mark.parametrize(
    ("reason", "before", "last"),
    [
        ("spool_key", [("key a", 5_000)], ("key a", 1_001)),
        ("spool", [("key a", 5_000), ("key b", 5_000)], ("key c", 1)),
        ("spool_jobs", [("key a", 1)] * 50, ("key a", 1)),
    ],
)
def test_limits(
    spool: Spool, tmp_path: Path, reason: str, before: list[tuple[str, int]], last: tuple[str, int]
) -> None:
    """Bytes of a key and of all, and the number of a key's jobs, are limited; a refused job leaves no file."""
    jobs = [added(spool, owner, size) for owner, size in before]
    kept = files(tmp_path)
    refused = new(*last)
    with pytest.raises(SpoolFull, match=r"DELETE /v1/jobs") as first:
        spool.repeated(refused)
    assert first.value.data["reason"] == reason
    spool.write_request(refused, [b"request"])  # two at a time may both have found room
    with pytest.raises(SpoolFull):
        spool.add(refused)
    assert files(tmp_path) == kept
    spool.cancel(jobs[0].id, jobs[0].owner)
    if reason == "spool_jobs":  # one that has ended counts, until it is deleted
        spool.cancel(jobs[0].id, jobs[0].owner)
    added(spool, *last)


def test_a_key_is_one_job(tmp_path: Path) -> None:
    """Submitted at the same time with the same idempotency key, by many replicas, it is one job with one request."""
    found, start = [], threading.Barrier(8)

    def submit() -> None:
        spool, job = Spool(tmp_path, LIMITS), new(again="mine")
        start.wait()
        spool.write_request(job, [b"request"])
        found.append(spool.add(job).id)
        spool.close()

    threads = [threading.Thread(target=submit) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert {*found} == {*files(tmp_path)}
    assert len({*found}) == 1


def test_a_key_of_another_request(spool: Spool) -> None:
    """An idempotency key belongs to one request of one owner, also when the job has ended."""
    job = added(spool, again="mine")
    repeated = spool.repeated(new(again="mine"))
    assert repeated is not None
    assert repeated.id == job.id
    with pytest.raises(InvalidParams) as refused:
        spool.repeated(new(again="mine", digest="other"))
    assert refused.value.errors[0]["type"] == "other_request"
    assert added(spool, "key b", again="mine").id != job.id
    spool.cancel(job.id, "key a")
    repeated = spool.repeated(new(again="mine"))
    assert repeated is not None
    assert repeated.state == "cancelled"


def test_cancelling(spool: Spool, tmp_path: Path) -> None:
    """A cancelled job keeps its row and loses its files; its replica finds out; the second time it is forgotten."""
    job = added(spool)
    running = claimed(spool)
    assert spool.cancel(job.id, "key a").state == "cancelled"
    assert spool.renew({(job.id, running.attempt): (0, 0)}) == {job.id}
    spool.write_result(running, [b"result"])
    assert not spool.finish(running, 6)
    assert not spool.fail(running, InternalError("x"))
    assert files(tmp_path) == []
    assert spool.cancel(job.id, "key a").state == "cancelled"
    with pytest.raises(NotFound):
        spool.cancel(job.id, "key a")
    with pytest.raises(NotFound):
        spool.find(added(spool).id, "key b")


def test_a_full_disk(spool: Spool, tmp_path: Path) -> None:
    """A file that the disk has no room for is an error with advice, and leaves nothing."""
    added(spool)
    kept = files(tmp_path)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1][1]))
        with pytest.raises(SpoolFull, match="the disk of the spool is full") as refused:
            spool.write_request(new(), [bytes(1 << 19)] * 3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before[1])
        signal.signal(signal.SIGXFSZ, before[0])
    assert refused.value.data["reason"] == "spool_disk"
    assert files(tmp_path) == kept


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    """An index of another version, or of something else, is an error at the start."""
    spool = Spool(tmp_path, LIMITS)
    spool._index.execute("PRAGMA user_version = 99")
    spool.close()
    with pytest.raises(ValueError, match="made by another version"):
        Spool(tmp_path, LIMITS)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "index.sqlite").write_bytes(b"no index" * 999)
    with pytest.raises(ValueError, match="can't be used"):
        Spool(tmp_path / "other", LIMITS)


def test_a_job_cancelled_before_it_is_opened(tight: Resident, spool: Spool, caplog: pytest.LogCaptureFixture) -> None:
    """A job that is cancelled once a replica has claimed it ends as that, which is no error of the service."""
    jobs = Jobs(spool)
    job = added(spool)
    running = claimed(spool)
    spool.cancel(job.id, job.owner)

    async def outcome() -> str:
        return await Run(tight.service, jobs, running).task

    assert tight.run(outcome()) == "cancelled"
    assert "error" not in caplog.text
    assert spool.find(job.id, job.owner).state == "cancelled"
