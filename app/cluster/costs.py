"""Whether a call is faster on the cluster than here: transfer against compute."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from app.cluster.units import Portion, portions
from kernels import Plan, storage_dtype

__all__ = ["Costs"]


@dataclass(frozen=True, slots=True)
class Costs:
    """Constants of the estimate: times in seconds, rates in units a second.

    Measured by `benchmarks/cluster.py` with two network namespaces of one machine (AMD EPYC, Zen 3, one processor
    each); a real network is slower, so `gain` asks for more than an equal time.
    """

    call_s: float = 0.015
    """What a call takes beyond its units."""
    unit_s: float = 0.0045
    """What a unit takes beyond its computation."""
    put_rate: float = 4.5e9
    """Bytes a second into the shared memory of this machine's node."""
    send_rate: float = 0.6e9
    """Bytes a second from one node to the others, all together."""
    mac_rate: float = 3.0e10
    """Multiply-adds a second of one worker."""
    gain: float = 1.2
    """How many times as long a call must take here."""

    def here(self, plan: Plan, workers: int) -> float:
        """Estimate the seconds of a plan on workers of this machine."""
        return plan.macs / (self.mac_rate * max(1, workers))

    def there(self, plan: Plan, workers: int, nodes: int) -> float:
        """Estimate the seconds of a plan on workers of that many nodes, one of which is this machine's."""
        return self._there(plan, _reads(plan), workers, nodes)

    def nodes(self, plan: Plan, *, here: int, there: int, nodes: int) -> int:
        """Return on how many of `nodes` nodes, which have `there` workers, a plan is worth the transfer.

        The fewest that are fastest: each node needs inputs sent. 0 means that `here` workers of our own are as good.
        """
        reads = _reads(plan)
        best, least = 0, self.here(plan, here) / self.gain
        for count in range(1, min(nodes, len(plan.units)) + 1):
            if workers := there * count // nodes:
                seconds = self._there(plan, reads, workers, count)
                if seconds < least:
                    best, least = count, seconds
        return best

    def _there(self, plan: Plan, reads: Sequence[tuple[int, int]], workers: int, nodes: int) -> float:
        problem = plan.problem
        written = plan.scratch_bytes or prod(problem.output_shape) * problem.output_dtype.itemsize
        units = sum(unit.stage == 0 for unit in plan.units)
        remote = max(0, nodes - 1)
        sent = written * remote / max(1, nodes)
        sent += sum(size * min(remote, readers * remote / max(1, nodes)) for size, readers in reads)
        return (
            self.call_s
            + self.unit_s * -(-units // max(1, workers))
            + (sum(size for size, _ in reads) + written) / self.put_rate
            + sent / self.send_rate
            + plan.macs / (self.mac_rate * max(1, min(workers, units)))
        )


def _reads(plan: Plan) -> list[tuple[int, int]]:
    """Return the bytes of each portion of an input that units read, and how many units read it."""
    problem = plan.problem
    item = storage_dtype(problem.dtype).itemsize
    found: Counter[tuple[int, Portion]] = Counter()
    for unit in plan.units:
        if unit.stage == 0:
            found.update(enumerate(portions(plan, unit)))
    return [
        (prod(portion.shape(problem.input_shapes[number])) * item, readers)
        for (number, portion), readers in found.items()
    ]
