"""What a machine allows, and whether a service on it still computes."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence

import httpx

from tests.app.samples import NPY, SMALL, post, read, same_bits
from tests.live import LiveService

__all__ = ["can", "right"]


def can(under: Sequence[str]) -> bool:
    """Return whether this machine lets us run a command under that one."""
    found = shutil.which(under[0])
    return bool(found) and subprocess.run([*under, "true"], check=False, capture_output=True).returncode == 0


def right(service: LiveService) -> bool:
    """Return whether a small call returns the oracle's bits."""
    inputs = SMALL.inputs()
    with httpx.Client(base_url=service.url, timeout=60) as http:
        return same_bits(read(post(http, SMALL, inputs, NPY)), SMALL.expected(inputs))
