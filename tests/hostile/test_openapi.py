"""The OpenAPI document is true: statuses, content types and schemas of every page, for valid and invalid data."""

from __future__ import annotations

import pytest

from tests.hostile.openapi import run_schemathesis
from tests.live import LiveService

_CALLS = r"^/v1/ops/[{A-Z]"


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("examples", "flags"),
    [
        # The schemas of the calls can be violated in thousands of places: `scripts/fuzz openapi` tries them all.
        (2, ("--phases", "coverage,fuzzing", "--exclude-path-regex", _CALLS)),
        (2, ("--phases", "examples,fuzzing", "--include-path-regex", _CALLS)),
    ],
    ids=["pages", "calls"],
)
def test_pages_match_the_document(service: LiveService, examples: int, flags: tuple[str, ...]) -> None:
    """Every answer to what the document allows or forbids is one that it describes, and none is a server error."""
    done = run_schemathesis(service.url, *flags, examples=examples)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "No issues found" in done.stdout
