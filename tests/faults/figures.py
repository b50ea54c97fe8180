"""How fast faults are detected and how much is lost: `scripts/soak --figures [NAME ..]` measures it.

Everything is measured on a service in this process or in its own, with two workers. If the clients and the workers
share a few processors, the figures include the time that they take from each other.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from tests.app.resident import Resident, resident_service
from tests.faults.apis import APIS
from tests.faults.chaos import CALLS, Tally, family_service, prepare_all
from tests.faults.draining import drain
from tests.faults.leaving import LONG, MOMENTS, busy, leave, prepared, seconds_until, sent
from tests.faults.overload import overload

__all__ = ["main"]

_TIMES = 8


@contextmanager
def two_workers() -> Iterator[Resident]:
    """Run a service in this process."""
    with resident_service(workers=2) as resident:
        yield resident


def show(what: str, seconds: Sequence[float]) -> None:
    """Print the median and the longest time in milliseconds."""
    print(f"{what:34} median {statistics.median(seconds) * 1000:7.1f} ms, longest {max(seconds) * 1000:7.1f} ms")


def disconnect() -> None:
    """Measure how long a call keeps anything busy after its client has disconnected."""
    with two_workers() as resident:
        for moment in MOMENTS:
            for api in APIS:
                show(f"left while {moment}, {api}", [leave(resident, api, moment) for _ in range(_TIMES)])


def cancel() -> None:
    """Measure how long workers continue after a running call is cancelled."""
    with two_workers() as resident:
        found = []
        for _ in range(_TIMES):
            with sent(resident, prepared("rest npy", LONG)):
                resident.until(lambda: busy(resident))
                (call,) = resident.service.calls
                found.append(seconds_until(resident, call.cancel, lambda: not busy(resident)))
            resident.run(resident.service.admission.idle())
        show("cancelled while computing", found)


def back() -> None:
    """Measure how long it takes to replace a killed worker."""

    def workers() -> dict[int, bool]:
        return {each["pid"]: each["ready"] for each in resident.service.engine.snapshot()["workers"]}

    def whole(without: int) -> bool:
        return without not in workers() and sum(workers().values()) == 2

    with two_workers() as resident:
        found = []
        for _ in range(_TIMES):
            resident.until(lambda: sum(workers().values()) == 2)
            pid = next(iter(workers()))
            found.append(seconds_until(resident, partial(os.kill, pid, signal.SIGKILL), partial(whole, pid)))
        show("killed worker replaced", found)


def drained() -> None:
    """Count the outcomes of 200 calls that are in flight when SIGTERM arrives."""
    tally = Tally()
    with family_service("--workers", "2", "--queue-length", "256", "--drain-s", "120") as (service, family):
        left = asyncio.run(drain(service, family, prepare_all(CALLS), tally, 200))
    print(f"drain: {tally.right.total()} of 200 right, {len(tally.lost)} lost, {len(tally.wrong)} wrong")
    print(f"drain: exit status {service.process.returncode}, processes left: {left}")


FIGURES: dict[str, Callable[[], None]] = {
    "disconnect": disconnect, "cancel": cancel, "back": back, "drain": drained, "overload": overload,
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the named figures, or all of them."""
    parser = argparse.ArgumentParser(prog="scripts/soak --figures", description=(__doc__ or "").partition(":")[0])
    parser.add_argument("names", nargs="*", choices=[[], *FIGURES], metavar="NAME", help=", ".join(FIGURES))
    for name in parser.parse_args(arguments).names or FIGURES:
        FIGURES[name]()
    return 0


if __name__ == "__main__":
    sys.exit(main())
