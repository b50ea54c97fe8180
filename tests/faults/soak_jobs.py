"""Jobs on two replicas that share a spool, while workers and whole services are killed.

    scripts/soak-jobs [--jobs 500] [--kills 2] [--restarts 15] [--at-once 8]

Each replica has two workers and a client that submits to it or the other one. Workers are killed all the time, and
every few seconds one replica with all its processes (SIGKILL), which is then started again. Each result is compared,
bit for bit, with the oracle's. From the logs and the times of the kills follows when each attempt at a job ran: no two
may overlap. At the end the run shows what the disk held. The exit status is 1 if a job was lost, wrong, or computed
twice at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import httpx

from app.calls.jobs.spool import Spool, SpoolLimits
from tests.app.samples import HEAVY, same_bits
from tests.faults.apis import Prepared, prepare
from tests.faults.chaos import Striker, family_service, prepare_all

__all__ = ["Attempt", "Outcome", "attempts", "main", "overlapping", "soak"]

_APIS = ("rest json", "rest npy", "rest frames")
_LINE = re.compile(r"^(\S+ \S+) \w+ +job (\w+).* job=(\w+)(?:.* attempt=(\d+))?")
_PATIENCE_S = 600.0


@dataclass(frozen=True)
class Attempt:
    """When an attempt at a job ran, and how it ended; one of a killed replica ended with that."""

    job: str
    number: int
    begin: float
    end: float
    outcome: str


@dataclass
class Outcome:
    """What came of the jobs."""

    right: int = 0
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    strikes: Counter[str] = field(default_factory=Counter)
    attempts: list[Attempt] = field(default_factory=list)
    held: dict[str, int] = field(default_factory=dict)
    """Bytes on the disk when all jobs had ended, and after they were deleted."""
    left: list[str] = field(default_factory=list)
    """Files of jobs after they were deleted."""

    @property
    def failed(self) -> bool:
        """Whether a job was lost, wrong, or computed twice at a time."""
        return bool(self.wrong or self.lost or self.left or overlapping(self.attempts))


def attempts(lines: Sequence[str], killed: float) -> Iterator[Attempt]:
    """Yield the attempts in the log of a process that was killed then."""
    open_: dict[tuple[str, int], float] = {}
    for line in lines:
        if (found := _LINE.match(line)) is None or found[4] is None:
            continue
        at = datetime.strptime(found[1], "%Y-%m-%d %H:%M:%S,%f").astimezone().timestamp()
        key = found[3], int(found[4])
        if found[2] == "running":
            open_[key] = at
        elif key in open_:
            yield Attempt(*key, open_.pop(key), at, found[2])
    for key, begin in open_.items():
        yield Attempt(*key, begin, killed, "killed")


def overlapping(found: Sequence[Attempt]) -> list[tuple[Attempt, Attempt]]:
    """Return the attempts at the same job that ran at the same time."""
    by_job = defaultdict(list)
    for each in found:
        by_job[each.job].append(each)
    pairs = []
    for same in by_job.values():
        ordered = sorted(same, key=lambda attempt: attempt.begin)
        pairs += [(one, two) for one, two in pairwise(ordered) if two.begin < one.end]
    return pairs


class Replica:
    """A service that is killed and started again on another port; use ``async with``."""

    def __init__(self, spool: Path, options: argparse.Namespace, number: int) -> None:
        self.url = ""
        self._flags = ("--workers", "2", "--spool", str(spool), "--spool-key-jobs", "100000")
        self._options = options
        self._number = number
        self.outcome = Outcome()
        self._killed = 0.0
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Replica:
        await self._start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._end()

    async def _start(self) -> None:
        processes = ExitStack()
        self._service, self._family = await asyncio.to_thread(processes.enter_context, family_service(*self._flags))
        self._stack.push_async_callback(asyncio.to_thread, processes.close)
        seed = self._options.seed + self._number
        self._striker = await self._stack.enter_async_context(
            Striker(self._family, self._options.kills, seed, pause_one_in=10**9)
        )
        self.url = self._service.url

    async def _end(self) -> None:
        """Collect the log; the process may have been killed."""
        self.url, striker = "", self._striker
        await self._stack.aclose()
        self.outcome.strikes += striker.struck
        self.outcome.attempts += attempts(self._service.log, self._killed or time.time())
        self._stack, self._killed = AsyncExitStack(), 0.0

    async def kill(self) -> None:
        """Kill the service while it computes a job; its workers end then. Start it again."""
        while all(each.outcome != "killed" for each in attempts(self._service.log[-100:], 0.0)):  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        self.url = ""
        assert self._family.strike(self._family.server)
        await asyncio.to_thread(self._service.process.wait)
        self._killed = time.time()
        self.outcome.strikes["services"] += 1
        await self._end()
        await self._start()


async def _ask(replicas: Sequence[Replica], method: str, path: str, **request: object) -> httpx.Response:
    """Send a request to a replica that is alive, as often as it takes."""
    until = time.monotonic() + _PATIENCE_S
    while time.monotonic() < until:
        replica = random.choice(replicas)
        if replica.url:
            try:
                async with httpx.AsyncClient(base_url=replica.url, timeout=60) as client:
                    reply = await client.request(method, path, **request)  # type: ignore[arg-type] # by the callers
                if reply.status_code not in (429, 503):
                    return reply
            except httpx.HTTPError:
                pass
        await asyncio.sleep(0.1)
    raise TimeoutError(f"{method} {path} had no answer")


async def _one(replicas: Sequence[Replica], call: Prepared, number: int, outcome: Outcome) -> None:
    headers = {**call.headers, "prefer": "respond-async", "idempotency-key": f"job-{number}"}
    try:
        reply = await _ask(replicas, "POST", call.path, content=call.content, headers=headers)
        assert reply.status_code == 202, reply.text
        path, until = reply.headers["location"], time.monotonic() + _PATIENCE_S
        while (state := (await _ask(replicas, "GET", path)).json()).get("state") in ("queued", "running"):
            assert time.monotonic() < until, state
            await asyncio.sleep(0.2)
        assert state.get("state") == "done", state
        found = await _ask(replicas, "GET", f"{path}/result", headers={"accept": call.headers["accept"]})
        right = same_bits(call.read(found), call.expected)
    except (AssertionError, TimeoutError, ValueError, KeyError) as error:
        outcome.lost.append(f"job {number}: {type(error).__name__}: {str(error)[:300]}")
        return
    outcome.right += right
    outcome.wrong += [] if right else [f"job {number}: {call.api}"]


def _long_calls() -> list[Prepared]:
    """Return calls of some seconds under kills, so that these hit jobs that run."""
    inputs = HEAVY.inputs()
    expected = HEAVY.expected(inputs)
    return [prepare(api, HEAVY, inputs, expected, reference=True) for api in _APIS] * 2


def _held(spool: Path) -> dict[str, int]:
    names = {"requests": "requests/*", "results": "results/*", "index": "index.sqlite*"}
    return {name: sum(path.stat().st_size for path in spool.glob(pattern)) for name, pattern in names.items()}


def _left(spool: Path) -> list[str]:
    """Return the files of jobs that are left when those that killed replicas left are old enough to be removed."""
    for path in spool.glob("re*/*"):
        os.utime(path, (0, 0))
    index = Spool(spool, SpoolLimits(1, 1, 1, 1.0))
    index.sweep()
    index.close()
    return [path.name for path in spool.glob("re*/*")]


async def soak(options: argparse.Namespace, spool: Path) -> Outcome:
    """Run the jobs with their faults; return what came of them."""
    outcome, calls, drawn = Outcome(), [*prepare_all(apis=_APIS), *_long_calls()], random.Random(options.seed)
    numbers = iter(range(options.jobs))

    async def client(replicas: Sequence[Replica]) -> None:
        for number in numbers:
            await _one(replicas, drawn.choice(calls), number, outcome)

    async def killer(replicas: Sequence[Replica]) -> None:
        while True:
            for replica in replicas:
                await asyncio.sleep(drawn.uniform(0.5, 1.5) * options.restarts)
                await replica.kill()

    replicas = [Replica(spool, options, number) for number in range(2)]
    async with AsyncExitStack() as stack:
        for replica in replicas:
            await stack.enter_async_context(replica)
        killing = asyncio.create_task(killer(replicas))
        try:
            await asyncio.gather(*(client(replicas) for _ in range(options.at_once)))
        finally:
            killing.cancel()
            await asyncio.gather(killing, return_exceptions=True)
        outcome.held = _held(spool)
        for replica in replicas:
            if not replica.url:
                await replica._start()
        for job in (await _ask(replicas, "GET", "/v1/jobs")).json()["jobs"]:
            await _ask(replicas, "DELETE", f"/v1/jobs/{job['job']}")
        outcome.left = _left(spool)
    for replica in replicas:
        outcome.strikes += replica.outcome.strikes
        outcome.attempts += replica.outcome.attempts
    return outcome


def summary(outcome: Outcome) -> str:
    """Return the outcome as text."""
    found = Counter(each.outcome for each in outcome.attempts)
    lines = [
        f"{outcome.right} right, {len(outcome.wrong)} wrong, {len(outcome.lost)} lost",
        f"strikes: {dict(outcome.strikes)}",
        f"{len(outcome.attempts)} attempts: {dict(found)}; {len(overlapping(outcome.attempts))} at the same time",
        f"bytes on the disk when all had ended: {outcome.held}; files left after all were deleted: {outcome.left}",
    ]
    pairs = map(str, overlapping(outcome.attempts)[:10])
    return "\n".join([*lines, *pairs, *outcome.wrong[:10], *outcome.lost[:10]])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the soak test and print the outcome."""
    parser = argparse.ArgumentParser(prog="scripts/soak-jobs", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=500)
    parser.add_argument("--kills", type=float, default=2.0, help="workers of each replica killed a second")
    parser.add_argument(
        "--restarts", type=float, default=15.0, help="seconds between two kills of a replica, on average"
    )
    parser.add_argument("--at-once", type=int, default=8, help="jobs at a time")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        outcome = asyncio.run(soak(options, Path(folder)))
    print(summary(outcome))
    return int(outcome.failed)


if __name__ == "__main__":
    sys.exit(main())
