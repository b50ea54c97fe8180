"""Whether a call is faster on the cluster than here: transfer against compute."""

from __future__ import annotations

from collections import Counter
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
        problem = plan.problem
        written = plan.scratch_bytes or prod(problem.output_shape) * problem.output_dtype.itemsize
        remote = max(0, nodes - 1)
        units = [unit for unit in plan.units if unit.stage == 0]
        sent = written * remote / max(1, nodes)
        read = 0
        for (number, portion), readers in _readers(plan).items():
            size = prod(portion.shape(problem.input_shapes[number])) * storage_dtype(problem.dtype).itemsize
            read += size
            sent += size * min(remote, readers * remote / max(1, nodes))
        return (
            self.call_s
            + self.unit_s * -(-len(units) // max(1, workers))
            + (read + written) / self.put_rate
            + sent / self.send_rate
            + plan.macs / (self.mac_rate * max(1, min(workers, len(units))))
        )

    def favour_cluster(self, plan: Plan, *, here: int, there: int, nodes: int) -> bool:
        """Whether `there` workers on `nodes` nodes are worth the transfer, compared with `here` workers of our own."""
        return there > 0 and self.here(plan, here) > self.gain * self.there(plan, there, nodes)


def _readers(plan: Plan) -> Counter[tuple[int, Portion]]:
    """Count the units that read each portion of each input."""
    found: Counter[tuple[int, Portion]] = Counter()
    for unit in plan.units:
        if unit.stage == 0:
            found.update(enumerate(portions(plan, unit)))
    return found
