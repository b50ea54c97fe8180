"""The GPU that a caller chose: whether these kernels can run there, and what it is."""

from __future__ import annotations

import os
import sys
from typing import Any

__all__ = ["LEAST_CAPABILITY", "LEAST_TRITON", "REFERENCE_NAME", "GpuMemoryError", "describe", "main", "refuse"]

LEAST_CAPABILITY = 80
LEAST_TRITON = (3, 6)

REFERENCE_NAME = "triton_reference_f64"
"""The name of the kernel that has the bits of the CPU's reference, in plans."""


class GpuMemoryError(MemoryError):
    """A call needs more of the GPU's memory than is free; both in bytes."""

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(f"the call needs at least {needed} bytes of the GPU's memory, but {free} are free")
        self.needed = needed
        self.free = free


def refuse(device: Any = None) -> str | None:
    """Return in one line why a GPU, by default the first, can't be used: packages, driver or GPU; None if it can."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        found = version("triton")
    except PackageNotFoundError:
        return "a GPU needs Triton, which is not installed: pip install 'convgrad[gpu]'"
    if tuple(int(each) for each in found.split(".")[:2]) < LEAST_TRITON:
        return f"a GPU needs Triton {'.'.join(map(str, LEAST_TRITON))} or newer, but {found} is installed"
    try:
        import torch
    except ImportError:
        return "a GPU needs PyTorch, which is not installed: pip install 'convgrad[gpu]'"
    if os.environ.get("TRITON_INTERPRET") == "1":  # computes on the CPU
        return None
    if torch.version.cuda is None:
        return f"this PyTorch ({torch.__version__}) was built without CUDA"
    if not torch.cuda.is_available():
        try:
            torch.cuda.init()
        except RuntimeError as error:  # it says if the driver is missing or too old
            return f"no GPU can be used: {str(error).splitlines()[0]}"
        return "this machine has no GPU that PyTorch can use"
    major, minor = torch.cuda.get_device_capability(device)
    if 10 * major + minor < LEAST_CAPABILITY:
        name, least = torch.cuda.get_device_name(device), LEAST_CAPABILITY / 10
        return f"{name} has compute capability {major}.{minor}, but these kernels need {least} or newer"
    return None


def describe() -> str:
    """Return the name and compute capability of the first GPU."""
    import torch

    if os.environ.get("TRITON_INTERPRET") == "1":
        return "Triton's interpreter"
    major, minor = torch.cuda.get_device_capability()
    return f"{torch.cuda.get_device_name()} (compute capability {major}.{minor})"


def main() -> int:
    """Print the GPU, or why none can be used; return the exit status."""
    refusal = refuse()
    sys.stdout.write(f"{refusal or describe()}\n")
    return int(refusal is not None)
