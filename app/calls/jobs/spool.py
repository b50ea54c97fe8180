"""The spool: a folder with the requests and results of jobs, and their index, which replicas on one machine share.

A file is written under another name, synchronised and renamed before the index names it, so a crash leaves no half of
one; files that the index does not name are removed later. A replica claims a job for some seconds, and renews that
while it computes. If it does not, another one takes the job over, and what the first one then writes is dropped: each
claim has a number, `attempt`, and only the last one may end the job.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields, replace
from datetime import UTC, datetime
from io import BufferedReader
from pathlib import Path
from typing import Any, Literal

from convgrad._errors import Cancelled, ConvgradError, InternalError, NotFound, SpoolFull
from convgrad._frames import Bytes
from schemas.broken_rules import broken_rule, invalid_params

__all__ = ["LEASE_S", "STATES", "Job", "NewJob", "Spool", "SpoolLimits", "State"]

State = Literal["queued", "running", "done", "failed", "cancelled"]
STATES: tuple[State, ...] = ("queued", "running", "done", "failed", "cancelled")

LEASE_S = 20.0
"""Seconds until a claim that is not renewed ends."""

_VERSION = 1
# A job fails after this many crashes of replicas that computed it.
_MOST_CRASHES = 8
# Files are in the index within seconds: older ones are left from a crash.
_ORPHAN_S = 600.0
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_ADVICE = "delete jobs whose results you have (DELETE /v1/jobs/{job}), or try again when some have expired"


@dataclass(frozen=True, slots=True)
class SpoolLimits:
    """Bytes of all jobs, bytes and number of those of a key or address, and seconds that results are kept."""

    total: int
    key_bytes: int
    key_jobs: int
    keep_s: float


@dataclass(frozen=True, slots=True)
class NewJob:
    """A job to be added; `size` are the bytes of its request and, in all likelihood, its result."""

    id: str
    owner: str
    key: str
    address: str
    request_id: str
    kind: str
    op: str
    content_type: str
    digest: str
    idempotency_key: str | None
    size: int


@dataclass(frozen=True, slots=True)
class Job(NewJob):
    """A row of the index. Times are in seconds since 1970, but `lease` is by `time.monotonic`."""

    number: int
    state: State
    created: float
    started: float | None
    finished: float | None
    attempt: int
    crashes: int
    lease: float | None
    done: int
    total: int
    error: str | None

    def describe(self, place: int | None, keep_s: float) -> dict[str, Any]:
        """Return what the owner may see, as JSON; `place` is that in the queue."""
        found: dict[str, Any] = {"job": self.id, "state": self.state, "kind": self.kind, "op": self.op or None}
        found["created"] = _date(self.created)
        if self.state == "queued":
            found["place"] = place
        elif self.state == "running":
            found["progress"] = {"done": self.done, "total": self.total}
        if self.finished is not None:
            found |= {"finished": _date(self.finished), "expires": _date(self.finished + keep_s)}
        return found if self.error is None else found | {"error": json.loads(self.error)}


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


_NEW = ", ".join(field.name for field in fields(NewJob))
_COLUMNS = ", ".join(field.name for field in fields(Job))
_SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, key TEXT NOT NULL,
    address TEXT NOT NULL, request_id TEXT NOT NULL, kind TEXT NOT NULL, op TEXT NOT NULL, content_type TEXT NOT NULL,
    digest TEXT NOT NULL, idempotency_key TEXT, size INTEGER NOT NULL, state TEXT NOT NULL DEFAULT 'queued',
    created REAL NOT NULL, started REAL, finished REAL, attempt INTEGER NOT NULL DEFAULT 0,
    crashes INTEGER NOT NULL DEFAULT 0, lease REAL, done INTEGER NOT NULL DEFAULT 0, total INTEGER NOT NULL DEFAULT 0,
    error TEXT
);
CREATE UNIQUE INDEX IF NOT EXISTS repeated ON jobs (owner, idempotency_key) WHERE idempotency_key IS NOT NULL;
CREATE INDEX IF NOT EXISTS waiting ON jobs (state, number);
CREATE INDEX IF NOT EXISTS turns ON jobs (owner, started);
"""
# Owners take turns: the next job is the oldest one of the owner that has had no turn for the longest time. A claim that
# seems to last for much longer than claims do is from before the machine was restarted, when its clock began anew.
_NEXT = f"""
SELECT {_COLUMNS} FROM jobs WHERE state = 'queued' OR (state = 'running' AND lease NOT BETWEEN ? AND ? + {10 * LEASE_S})
ORDER BY (SELECT MAX(started) FROM jobs AS other WHERE other.owner = jobs.owner), number LIMIT 1
"""  # noqa: S608 -- our own names


class Spool:
    """The index and the files; every method but `write_request` and `write_result` is for one thread at a time.

    Raises `OSError` or `ValueError` for a folder that can't be used. A method raises `SpoolFull` if the disk is full.
    """

    def __init__(self, folder: Path, limits: SpoolLimits) -> None:
        self.limits = limits
        self._requests, self._results = folder / "requests", folder / "results"
        for each in (folder, self._requests, self._results):
            each.mkdir(mode=0o700, parents=True, exist_ok=True)
        import sqlite3  # a megabyte that only a service with jobs needs

        try:
            self._index = sqlite3.connect(folder / "index.sqlite", 30.0, isolation_level=None, check_same_thread=False)
            (mode,) = self._index.execute("PRAGMA journal_mode = WAL").fetchone()
            self._index.execute("PRAGMA synchronous = FULL")
            (version,) = self._index.execute("PRAGMA user_version").fetchone()
            if mode != "wal" or version not in (0, _VERSION):
                why = "it was made by another version" if mode == "wal" else "it must be on a disk of this machine"
                raise ValueError(f"the spool {folder} can't be used: {why}")
            self._index.executescript(f"{_SCHEMA}PRAGMA user_version = {_VERSION};")
        except sqlite3.Error as error:
            raise ValueError(f"the spool {folder} can't be used: {error}") from error

    def close(self) -> None:
        """Close the index."""
        self._index.close()

    # Adding jobs.

    def repeated(self, new: NewJob) -> Job | None:
        """Return the job with the idempotency key of a new one, or None if there is room for the new one.

        Raises `InvalidParams` if that is another request's, and `SpoolFull`.
        """
        if new.idempotency_key is not None:
            for found in self._select("owner = ? AND idempotency_key = ?", new.owner, new.idempotency_key):
                if found.digest != new.digest:
                    rule = "this idempotency key was used for another request"
                    raise invalid_params("jobs", [broken_rule(["idempotency_key"], rule, "other_request")])
                return found
        self._require_room(new)
        return None

    def write_request(self, new: NewJob, pieces: Iterable[Bytes]) -> None:
        """Write the body of a request that is to be added."""
        _write(self._requests / new.id, pieces)

    def add(self, new: NewJob) -> Job:
        """Add a job whose request was written, or return the one with its idempotency key; raises as `repeated`."""
        try:
            with self._transaction():
                if (found := self.repeated(new)) is None:
                    marks = ", ".join("?" * len(fields(NewJob)))
                    row = f"INSERT INTO jobs ({_NEW}, created) VALUES ({marks}, ?)"  # noqa: S608 -- our own names
                    self._index.execute(row, (*astuple(new), time.time()))
                    return self._row(new.id)
        except BaseException:
            self.forget_request(new.id)
            raise
        self.forget_request(new.id)
        return found

    def _require_room(self, new: NewJob) -> None:
        (total,) = self._index.execute("SELECT TOTAL(size) FROM jobs").fetchone()
        count, size = self._index.execute(
            "SELECT COUNT(*), TOTAL(size) FROM jobs WHERE owner = ?", (new.owner,)
        ).fetchone()
        limits = self.limits
        for reason, value, limit, what in (
            ("spool_jobs", count + 1, limits.key_jobs, "jobs of this key or address"),
            ("spool_key", int(size) + new.size, limits.key_bytes, "bytes of this key or address"),
            ("spool", int(total) + new.size, limits.total, "bytes"),
        ):
            if value > limit:
                message = f"the spool may hold {limit} {what}, and with this job would have {value}: {_ADVICE}"
                raise SpoolFull(message, data={"reason": reason, "limit": limit, "value": value})

    # What owners ask.

    def find(self, job: str, owner: str) -> Job:
        """Return a job; raises `NotFound` for an unknown one, or that of another owner."""
        for found in self._select("id = ? AND owner = ?", job, owner):
            return found
        raise NotFound("there is no such job: it has expired, or was deleted", data={"reason": "unknown_job"})

    def of(self, owner: str) -> list[Job]:
        """Return the jobs of an owner, the newest first."""
        return self._select("owner = ? ORDER BY number DESC", owner)

    def places(self, owner: str) -> dict[str, int]:
        """Return the places of an owner's jobs in the queue, from 1 on, when owners take turns."""
        queued = self._index.execute("SELECT id, owner FROM jobs WHERE state = 'queued' ORDER BY number").fetchall()
        counts = Counter(each for _, each in queued)
        mine = [job for job, each in queued if each == owner]
        others = [count for each, count in counts.items() if each != owner]
        return {job: at + sum(min(count, at) for count in others) for at, job in enumerate(mine, 1)}

    def cancel(self, job: str, owner: str) -> Job:
        """Cancel a job, or forget one that has ended, with its result; raises `NotFound`."""
        with self._transaction():
            found = self.find(job, owner)
            if found.finished is not None:
                self._index.execute("DELETE FROM jobs WHERE id = ?", (job,))
            else:
                row = "UPDATE jobs SET state = 'cancelled', finished = ?, lease = NULL, size = 0 WHERE id = ?"
                self._index.execute(row, (time.time(), job))
            after = found if found.finished is not None else self._row(job)
        self.forget_request(job)
        self.forget_result(found)
        return after

    # What replicas do.

    def claim(self) -> tuple[Job, bool] | None:
        """Claim the next job, and return it with whether another replica had begun it; None if there is none."""
        if self._index.execute(_NEXT, (now := time.monotonic(), now)).fetchone() is None:
            return None
        with self._transaction():
            row = self._index.execute(_NEXT, (now := time.monotonic(), now)).fetchone()
            if row is None:
                return None
            found = Job(*row)
            begun = found.state == "running"
            self._index.execute(
                "UPDATE jobs SET state = 'running', lease = ?, started = ?, attempt = attempt + 1,"
                " crashes = crashes + ?, done = 0, total = 0 WHERE id = ?",
                (now + LEASE_S, time.time(), int(begun), found.id),
            )
            job = self._row(found.id)
        if job.crashes >= _MOST_CRASHES:
            self.fail(job, InternalError(f"the service has ended {job.crashes} times while it computed this job"))
            return self.claim()
        return job, begun

    def renew(self, progress: Mapping[tuple[str, int], tuple[int, int]]) -> set[str]:
        """Renew claims, given by job and attempt; return the jobs that were cancelled or taken over."""
        lost, until = set(), time.monotonic() + LEASE_S
        with self._transaction():
            for (job, attempt), (done, total) in progress.items():
                row = (
                    "UPDATE jobs SET lease = ?, done = ?, total = ? WHERE id = ? AND attempt = ? AND state = 'running'"
                )
                if not self._index.execute(row, (until, done, total, job, attempt)).rowcount:
                    lost.add(job)
        return lost

    def release(self, job: Job) -> None:
        """Put a job that could not be computed now back into the queue."""
        self._end(job, "state = 'queued', lease = NULL")

    def write_result(self, job: Job, pieces: Iterable[Bytes]) -> int:
        """Write a result, which `finish` makes that of the job; return its bytes."""
        return _write(self.result_path(job), pieces)

    def finish(self, job: Job, size: int) -> bool:
        """End a job whose result was written; return whether the claim was still valid."""
        ended = self._end(job, "state = 'done', finished = ?, lease = NULL, size = ?", time.time(), size)
        self.forget_request(job.id) if ended else self.forget_result(job)
        return ended

    def fail(self, job: Job, error: ConvgradError) -> bool:
        """End a job with an error; return whether the claim was still valid."""
        text = json.dumps({"code": error.code, "message": error.message, "data": error.data})
        ended = self._end(job, "state = 'failed', finished = ?, lease = NULL, size = 0, error = ?", time.time(), text)
        if ended:
            self.forget_request(job.id)
        return ended

    def _end(self, job: Job, changes: str, *values: object) -> bool:
        with self._transaction():
            row = f"UPDATE jobs SET {changes} WHERE id = ? AND attempt = ? AND state = 'running'"  # noqa: S608 -- as above
            return bool(self._index.execute(row, (*values, job.id, job.attempt)).rowcount)

    def sweep(self) -> None:
        """Forget jobs whose time is over, and remove files that a crash has left."""
        with self._transaction():
            over = self._select("finished < ?", time.time() - self.limits.keep_s)
            self._index.executemany("DELETE FROM jobs WHERE id = ?", [(job.id,) for job in over])
        for job in over:
            self.forget_result(job)
        jobs = self._select("state IN ('queued', 'running', 'done')")
        kept = {job.id for job in jobs if job.finished is None} | {self.result_path(job).name for job in jobs}
        for path in (*self._requests.iterdir(), *self._results.iterdir()):
            if path.name not in kept and _age(path) > _ORPHAN_S:
                path.unlink(missing_ok=True)

    def counts(self) -> tuple[dict[str, int], int]:
        """Return the number of jobs by state, and the bytes of all."""
        rows = self._index.execute("SELECT state, COUNT(*), TOTAL(size) FROM jobs GROUP BY state").fetchall()
        found = {state: count for state, count, _ in rows}
        return {state: found.get(state, 0) for state in STATES}, int(sum(size for *_, size in rows))

    def open_request(self, job: Job) -> BufferedReader:
        """Open the request of a claimed job; raises `Cancelled` if the job was cancelled meanwhile."""
        try:
            return (self._requests / job.id).open("rb")
        except FileNotFoundError:
            raise Cancelled("the job was cancelled or taken over") from None

    def result_path(self, job: Job) -> Path:
        """Return where an attempt puts its result."""
        return self._results / f"{job.id}-{job.attempt}"

    def forget_request(self, job: str) -> None:
        """Remove the request of a job."""
        (self._requests / job).unlink(missing_ok=True)

    def forget_result(self, job: Job) -> None:
        """Remove the result of an attempt, and those of attempts before it, whose replicas may have been killed."""
        for attempt in range(1, job.attempt + 1):
            self.result_path(replace(job, attempt=attempt)).unlink(missing_ok=True)

    def _select(self, condition: str, *values: object) -> list[Job]:
        rows = self._index.execute(f"SELECT {_COLUMNS} FROM jobs WHERE {condition}", values)  # noqa: S608 -- as above
        return [Job(*row) for row in rows]

    def _row(self, job: str) -> Job:
        (found,) = self._select("id = ?", job)
        return found

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with _reported(), self._index:
            self._index.execute("BEGIN IMMEDIATE")
            yield


def _write(path: Path, pieces: Iterable[Bytes]) -> int:
    """Write a file durably, whole or not at all; return its bytes."""
    part = path.with_name(f"{path.name}.part")
    try:
        with _reported(), part.open("wb") as file:
            size = sum(file.write(piece) for piece in pieces)
            file.flush()
            os.fsync(file.fileno())
            part.rename(path)
            _synchronise(path.parent)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    return size


def _synchronise(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _reported() -> Iterator[None]:
    """Raise `SpoolFull` for a full disk."""
    try:
        yield
    except Exception as error:
        full = getattr(error, "sqlite_errorname", None) == "SQLITE_FULL"
        if not full and getattr(error, "errno", None) not in _FULL:
            raise
        message = f"the disk of the spool is full: {_ADVICE}"
        raise SpoolFull(message, data={"reason": "spool_disk"}) from error


def _age(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
