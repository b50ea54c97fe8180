"""The processor as a value: which paths are chosen, and what the compiler may emit, come from the same `Target`."""

from kernels.target.host import BUILD, IMITATE, NAME, host_arch, host_features, host_target, target
from kernels.target.known import KNOWN, REFERENCE, Target, best, narrower

__all__ = [
    "BUILD",
    "IMITATE",
    "KNOWN",
    "NAME",
    "REFERENCE",
    "Target",
    "best",
    "host_arch",
    "host_features",
    "host_target",
    "narrower",
    "target",
]
