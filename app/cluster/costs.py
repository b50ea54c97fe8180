"""Whether a call is faster on the cluster than here: transfer against compute."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from app.cluster.units import Portion, first_stage, portions
from kernels import Plan, storage_dtype

__all__ = ["Costs", "reads_of"]


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
        units = first_stage(plan)
        return plan.macs / self.mac_rate * -(-units // max(1, workers)) / units

    def stays(self, plan: Plan, workers: int) -> bool:
        """Whether a plan is so small that it is faster here, whatever the cluster."""
        return self.here(plan, workers) <= self.gain * self.call_s

    def nodes(self, plan: Plan, *, here: int, there: int, nodes: int) -> int:
        """Return on how many of `nodes` other machines, which have `there` workers, a plan is worth the transfer.

        The fewest that are fastest: each needs inputs sent. 0 means that the `here` workers of this one are as good.
        """
        reads = reads_of(plan)
        best, least = 0, self.here(plan, here) / self.gain
        for count in range(1, min(nodes, first_stage(plan)) + 1):
            if workers := there * count // nodes:
                seconds = self.there(plan, reads, here=here, there=workers, nodes=count)
                if seconds < least:
                    best, least = count, seconds
        return best

    def there(self, plan: Plan, reads: Sequence[tuple[int, int]], *, here: int, there: int, nodes: int) -> float:
        """Estimate the seconds of a plan on `here` workers of this machine and `there` workers of `nodes` others.

        `reads` are those of the plan (`reads_of`).
        """
        problem, units = plan.problem, first_stage(plan)
        share = there / (here + there)
        written = plan.scratch_bytes or prod(problem.output_shape) * problem.output_dtype.itemsize
        copied = sum(size * min(1, readers * share) for size, readers in reads)
        sent = sum(size * min(nodes, readers * share) for size, readers in reads)
        # The others begin when all have their inputs, for which the workers here do not wait.
        delay = self.call_s + copied / self.put_rate + sent / self.send_rate
        work, rounds = plan.macs / self.mac_rate, -(-units // (here + there))
        least = max(work * rounds / units, delay + work / units)
        even = (work + there * delay) / (here + there)
        return max(even, least) + self.unit_s * rounds + written * share / self.send_rate


def reads_of(plan: Plan) -> list[tuple[int, int]]:
    """Return the bytes of each portion of an input that units read, and how many units read it."""
    problem = plan.problem
    item = storage_dtype(problem.dtype).itemsize
    found: Counter[tuple[int, Portion]] = Counter()
    for unit in plan.units[: first_stage(plan)]:
        found.update(enumerate(portions(plan, unit)))
    return [
        (prod(portion.shape(problem.input_shapes[number])) * item, readers)
        for (number, portion), readers in found.items()
    ]
