"""The server's side of a worker: what it has sent is delivered before its death."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess

import pytest

from app.pool.handle import WorkerHandle
from app.pool.messages import pair, send
from tests.app.pool.proc import descriptors, opened_since


@pytest.mark.parametrize("answers", [True, False])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, None])
def test_a_worker_is_ready_when_it_has_sent_a_message(answers: bool, number: signal.Signals | None) -> None:
    """A process that dies, or whose socket closes, is dead once, with its signal; its first message is not lost."""
    before = descriptors()
    events: list[object] = []

    async def scenario(process: subprocess.Popen[bytes]) -> None:
        gone = asyncio.Event()

        def died(_: WorkerHandle, code: int | None) -> None:
            events.append(code)
            gone.set()

        ours, theirs = pair()
        with theirs:
            WorkerHandle(
                process.pid, ours.detach(), os.pidfd_open(process.pid), on_ready=lambda _: events.append("ready"),
                on_done=lambda *_: None, on_death=died,
            )  # fmt: skip
            if answers:
                send(theirs, ())
            if number is not None:
                process.send_signal(number)
                os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222 - it dies at once
        await gone.wait()

    with subprocess.Popen(["sleep", "60"]) as process:
        asyncio.run(scenario(process))
    assert events == ["ready"] * answers + [-(number or signal.SIGKILL)]
    assert not opened_since(before)
