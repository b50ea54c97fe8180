"""Schemathesis against a running service: it calls the pages as the OpenAPI document allows, and as it forbids."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

__all__ = ["run_schemathesis"]

_CONFIG = Path(__file__).with_name("schemathesis.toml")
_COMMAND = "import sys; from schemathesis.cli import schemathesis; sys.exit(schemathesis())"


def run_schemathesis(url: str, *flags: str, examples: int, seed: int = 1) -> subprocess.CompletedProcess[str]:
    """Run it; its exit status and report tell what it found, with calls to reproduce that."""
    command = [sys.executable, "-c", _COMMAND, "--config-file", str(_CONFIG), "run", f"{url}/openapi.json"]
    command += ["--seed", str(seed), "--max-examples", str(examples), "--no-color", "--suppress-health-check", "all"]
    with tempfile.TemporaryDirectory() as folder:  # it writes files to its working directory
        return subprocess.run([*command, *flags], cwd=folder, capture_output=True, text=True)
