"""Load on a running service whose processes are killed or stopped while it answers."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx

from tests.app.samples import SMALL, doubled, same_bits, square
from tests.faults.apis import APIS, Prepared, prepare
from tests.live import LiveService, running_service
from tests.problems import Case

__all__ = ["CALLS", "Family", "Striker", "Tally", "family_service", "load", "prepare_all"]

_MARK = "CONVGRAD_TEST_FAMILY"
PAUSE_S = 6.0

# Tens of milliseconds for a worker, in several units.
MIDDLE = replace(square(8, 64, 96, 34, 32), dtype="bf16")
# A result of some megabytes, in tiles.
WIDE = doubled(64, 32, 16, n=2)
CALLS = (SMALL, MIDDLE, WIDE)
"""The calls of the load; their data are integers, so that the oracle's answer is the only right one."""


def prepare_all(cases: Sequence[Case] = CALLS, apis: Sequence[str] = tuple(APIS)) -> list[Prepared]:
    """Return each case prepared for each API."""
    made = []
    for case in cases:
        inputs = case.inputs()
        expected = case.expected(inputs)
        made += [prepare(api, case, inputs, expected) for api in apis]
    return made


class Family:
    """All processes of one service, including orphans: they are found by a mark in their environment."""

    def __init__(self, server: int, mark: str) -> None:
        self.server = server
        self._mark = f"{_MARK}={mark}".encode()

    def members(self) -> dict[int, int]:
        """Return the running processes and their parents."""
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal() and (parent := self._parent(entry)) is not None:
                found[int(entry.name)] = parent
        return found

    def fork_server(self) -> int | None:
        """Return the process that workers are forked from, if it is running."""
        return next((pid for pid, parent in self.members().items() if parent == self.server), None)

    def workers(self) -> list[int]:
        """Return the workers."""
        return sorted(pid for pid, parent in self.members().items() if self.server not in (pid, parent))

    def strike(self, pid: int, number: signal.Signals = signal.SIGKILL) -> bool:
        """Send a signal to one of them, never to another process that reused its id; return whether it was sent."""
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            return False
        try:
            if self._parent(Path(f"/proc/{pid}")) is None:
                return False
            signal.pidfd_send_signal(pidfd, number)
        except ProcessLookupError:
            return False
        finally:
            os.close(pidfd)
        return True

    def _parent(self, entry: Path) -> int | None:
        try:
            if self._mark not in (entry / "environ").read_bytes().split(b"\0"):
                return None
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            return None
        return None if state in "ZX" else int(parent)


@contextmanager
def family_service(*flags: str, **environment: str) -> Iterator[tuple[LiveService, Family]]:
    """Run a service whose processes can be told from all others."""
    mark = os.urandom(8).hex()
    with running_service(*flags, wait=True, **{**environment, _MARK: mark}) as service:
        yield service, Family(service.pid, mark)


class Striker:
    """Signal processes `rate` times a second: mostly a random worker, sometimes the fork server; use ``async with``.

    One signal in `pause_one_in` stops its worker for `PAUSE_S` instead of killing it, as swapping does; one in
    `fork_server_one_in` kills the fork server.
    """

    def __init__(
        self, family: Family, rate: float, seed: int, *, pause_one_in: int = 40, fork_server_one_in: int = 60
    ) -> None:
        self._family = family
        self._rate = rate
        self._random = random.Random(seed)
        self._odds = pause_one_in, fork_server_one_in
        self.struck = Counter[str]()

    async def __aenter__(self) -> Striker:
        self._task = asyncio.create_task(self._go())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _go(self) -> None:
        while True:
            await asyncio.sleep(self._random.uniform(0.5, 1.5) / self._rate)
            self._strike()

    def _strike(self) -> None:
        pause_one_in, fork_server_one_in = self._odds
        if self._random.randrange(fork_server_one_in) == 0 and (fork_server := self._family.fork_server()) is not None:
            self.struck["fork_server"] += self._family.strike(fork_server)
        elif workers := self._family.workers():
            pause, worker = self._random.randrange(pause_one_in) == 0, self._random.choice(workers)
            number = signal.SIGSTOP if pause else signal.SIGKILL
            self.struck["stopped" if pause else "killed"] += self._family.strike(worker, number)
            if pause:
                asyncio.get_running_loop().call_later(PAUSE_S, self._family.strike, worker, signal.SIGCONT)


@dataclass
class Tally:
    """The outcomes of a load's calls."""

    right: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def count(self) -> int:
        """Return the number of completed calls."""
        return self.right.total() + len(self.wrong) + len(self.lost)


async def load(
    url: str,
    calls: Sequence[Prepared],
    tally: Tally,
    *,
    count: int | None = None,
    until: float | None = None,
    at_once: int = 8,
    pause_s: float = 0.0,
    seed: int = 0,
) -> None:
    """Make `count` calls, or call until `until` (of `time.monotonic`), with `at_once` in parallel."""
    chosen, left = random.Random(seed), count

    async def caller(client: httpx.AsyncClient) -> None:
        nonlocal left
        while (until is None or time.monotonic() < until) and left != 0:
            left = None if left is None else left - 1
            await _one(client, chosen.choice(calls), tally)
            await asyncio.sleep(chosen.uniform(0.0, 2 * pause_s))

    limits = httpx.Limits(max_connections=at_once, max_keepalive_connections=at_once)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        await asyncio.gather(*(caller(client) for _ in range(at_once)))


async def _one(client: httpx.AsyncClient, call: Prepared, tally: Tally) -> None:
    start = time.perf_counter()
    try:
        got = call.read(await call.send(client))
    except (AssertionError, httpx.HTTPError, KeyError, ValueError) as error:
        tally.lost.append(f"{call.api}: {type(error).__name__}: {str(error)[:300]}")
        return
    tally.seconds.append(time.perf_counter() - start)
    if same_bits(got, call.expected):
        tally.right[call.api] += 1
    else:
        tally.wrong.append(call.api)
