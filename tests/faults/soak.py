"""A long run of calls through every API while processes are killed: what is lost, what is wrong, what grows.

    scripts/soak [--minutes 30 | --calls 1000] [--kills 5] [--at-once 8] [--pause 0]

The service runs in its own process, with two workers. Every result is compared, bit for bit, with the oracle's.
Every few seconds the run records the memory of the server, that of all processes together (PSS: shared pages count
once), and the shared memory for tensors. The exit status is 1 if a call was lost or wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx

from benchmarks.startup import memory_mib
from tests.faults.chaos import Family, Striker, Tally, family_service, load, prepare_all

__all__ = ["Sample", "main", "sample"]

_PROGRESS_EVERY_S = 60.0


@dataclass(frozen=True)
class Sample:
    """The state at one moment; memory in MiB."""

    seconds: float
    calls: int
    lost: int
    strikes: int
    server_rss: float
    server_pss: float
    all_pss: float
    shared_used: float
    shared_idle: float
    descriptors: int
    processes: int


def sample(family: Family, url: str, tally: Tally, striker: Striker, seconds: float) -> Sample:
    """Return the current state of the service."""
    page = httpx.get(f"{url}/metrics", timeout=30).text
    shared = dict(re.findall(r'^convgrad_shared_memory_bytes\{state="(\w+)"\} (\S+)', page, re.MULTILINE))
    pids = [family.server, *family.members()]
    return Sample(
        round(seconds, 1),
        tally.count,
        len(tally.lost) + len(tally.wrong),
        striker.struck.total(),
        round(memory_mib(family.server, "Rss"), 1),
        round(memory_mib(family.server, "Pss"), 1),
        round(sum(_pss(pid) for pid in set(pids)), 1),
        round(float(shared["used"]) / 2**20, 1),
        round(float(shared["idle"]) / 2**20, 1),
        sum(1 for _ in Path(f"/proc/{family.server}/fd").iterdir()),
        len(set(pids)),
    )


def _pss(pid: int) -> float:
    try:
        return memory_mib(pid, "Pss")
    except (FileNotFoundError, ProcessLookupError):
        return 0.0  # it was just killed


async def soak(options: argparse.Namespace, family: Family, url: str) -> tuple[Tally, Striker, list[Sample]]:
    """Run the load with its faults; return the outcomes and the samples taken along the way."""
    tally, samples, calls = Tally(), [], prepare_all()
    start = time.monotonic()
    until = None if options.calls else start + options.minutes * 60
    every = max(1.0, min(10.0, options.minutes * 60 / 100))

    async def watch() -> None:
        while True:
            samples.append(await asyncio.to_thread(sample, family, url, tally, striker, time.monotonic() - start))
            if samples[-1].seconds // _PROGRESS_EVERY_S != (samples[-1].seconds - every) // _PROGRESS_EVERY_S:
                print(", ".join(f"{name} {value}" for name, value in asdict(samples[-1]).items()), flush=True)
            await asyncio.sleep(every)

    async with Striker(family, options.kills, options.seed) as striker:
        watching = asyncio.create_task(watch())
        await load(
            url, calls, tally, count=options.calls, until=until, at_once=options.at_once, pause_s=options.pause,
            seed=options.seed,
        )  # fmt: skip
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    return tally, striker, samples


def summary(tally: Tally, striker: Striker, samples: Sequence[Sample]) -> str:
    """Return the outcome as text: the calls, and the memory in the second quarter and in the last one."""
    took = sorted(tally.seconds)
    lines = [
        f"{tally.count} calls, {len(tally.lost)} lost, {len(tally.wrong)} wrong; strikes: {dict(striker.struck)}",
        f"median {statistics.median(took):.3f} s, p99 {took[int(len(took) * 0.99)]:.3f} s, longest {took[-1]:.3f} s",
    ]
    quarter = max(1, len(samples) // 4)
    for name in ("server_rss", "server_pss", "all_pss", "shared_used", "shared_idle", "descriptors", "processes"):
        early = statistics.median(getattr(each, name) for each in samples[quarter : 2 * quarter] or samples)
        late = statistics.median(getattr(each, name) for each in samples[-quarter:])
        lines.append(f"{name:12} {early:8.1f} in the second quarter, {late:8.1f} in the last")
    return "\n".join([*lines, *tally.lost[:10]])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the soak test and print the outcome."""
    parser = argparse.ArgumentParser(prog="scripts/soak", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--calls", type=int, default=None, help="end after so many calls, however long they take")
    parser.add_argument("--kills", type=float, default=5.0, help="strikes a second")
    parser.add_argument("--at-once", type=int, default=8, help="calls at a time")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between two calls of one caller, on average")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    with family_service("--workers", "2") as (service, family):
        tally, striker, samples = asyncio.run(soak(options, family, service.url))
    print(summary(tally, striker, samples))
    return 1 if tally.lost or tally.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
