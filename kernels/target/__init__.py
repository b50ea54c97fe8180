"""The processor as a value: what it has, and what the compiler may emit for it."""

from kernels.target.host import IMITATE, SETTING, Target, target

__all__ = ["IMITATE", "SETTING", "Target", "target"]
