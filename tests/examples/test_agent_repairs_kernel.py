"""The scripted program tells the seeded bugs apart and repairs each, by the tools alone."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from mcp import Client

from convgrad._mcp.local import LocalCalls
from convgrad._mcp.server import make_server
from examples.agent_repairs_kernel import BUGS, KERNEL, Agent

pytestmark = pytest.mark.heavy


async def repaired(bug: str, folder: Path) -> tuple[str | None, str, dict[str, object]]:
    """Repair the kernel with a bug; return the diagnosis, the source, and the outcome of a check."""
    right, wrong = BUGS[bug]
    async with Client(make_server(LocalCalls(folder))) as client:
        agent = Agent(client, folder, KERNEL.replace(right, wrong))
        found = await agent.repair()
        assert await agent.repair() is None
        return found, agent.source, await agent.prove(4)


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_told_from_the_others(bug: str, tmp_path: Path) -> None:
    """The findings lead to the line that was changed, after which all calls and a check pass."""
    found, source, outcome = asyncio.run(repaired(bug, tmp_path))
    assert found == bug
    assert source == KERNEL
    assert outcome["passed"]
