"""Whether a call is faster on the cluster than here: transfer against compute."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from kernels import Plan, storage_dtype

__all__ = ["Costs"]


@dataclass(frozen=True, slots=True)
class Costs:
    """Constants of the estimate: times in seconds, rates in units a second.

    Measured by `benchmarks/cluster.py` with two network namespaces of one machine (AMD EPYC, Zen 3, one processor
    each); a real network is slower, so `gain` asks for more than an equal time.
    """

    call_s: float = 0.010
    """What a call takes beyond its units."""
    unit_s: float = 0.003
    """What a unit takes beyond its computation."""
    put_rate: float = 1.0e9
    """Bytes a second into the shared memory of this machine's node."""
    send_rate: float = 0.3e9
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
        size = storage_dtype(problem.dtype).itemsize
        read = sum(prod(shape) for shape in problem.input_shapes) * size
        written = plan.scratch_bytes + prod(problem.output_shape) * problem.output_dtype.itemsize
        remote = max(0, nodes - 1)
        units = len(plan.units)
        return (
            self.call_s
            + self.unit_s * -(-units // max(1, workers))
            + (read + written) / self.put_rate
            + (read * remote + written) / self.send_rate * (remote > 0)
            + plan.macs / (self.mac_rate * max(1, min(workers, units)))
        )

    def favour_cluster(self, plan: Plan, *, here: int, there: int, nodes: int) -> bool:
        """Whether `there` workers on `nodes` nodes are worth the transfer, compared with `here` workers of our own."""
        return there > 0 and self.here(plan, here) > self.gain * self.there(plan, there, nodes)
