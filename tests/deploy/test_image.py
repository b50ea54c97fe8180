"""The files that images are made from: what they say about the project is true."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.live import LiveService

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text("utf-8")


def test_what_is_copied_is_in_the_context() -> None:
    """.dockerignore lets everything through that the Dockerfile copies from the checkout."""
    allowed = set(re.findall(r"^!/?([^/\n]+)", (ROOT / ".dockerignore").read_text("utf-8"), re.MULTILINE))
    copied = [line.split()[:-1] for line in re.findall(r"^COPY (?!--)(.+)$", DOCKERFILE, re.MULTILINE)]
    assert {source.split("/")[0] for sources in copied for source in sources} <= allowed


@pytest.mark.parametrize("variable", ["CONVGRAD_PORT", "CONVGRAD_OPS_PORT"])
def test_the_health_check_queries_readiness(service: LiveService, variable: str) -> None:
    """The image's command succeeds with the service's answer where one listens, and fails elsewhere."""
    command = re.search(r"^HEALTHCHECK .*?CMD python (.*?[^\\])$", DOCKERFILE, re.MULTILINE | re.DOTALL)
    assert command
    shell = f"{sys.executable} {command[1]}".replace("\\\n", "")
    port = service.url.rpartition(":")[2]
    done = subprocess.run(shell, shell=True, check=True, capture_output=True, env={variable: port})
    assert b'"status":"ready"' in done.stdout
    with pytest.raises(subprocess.CalledProcessError):
        subprocess.run(shell, shell=True, check=True, capture_output=True, env={variable: "1"})
