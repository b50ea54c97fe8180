"""The server's side of a worker: it is ready once the process has answered, over the socket and in shared memory."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess

import pytest

from app.pool.control import ControlPage
from app.pool.handle import WorkerHandle
from app.pool.messages import Hello, MessageDecoder, Probe, receive, send


@pytest.mark.parametrize("answers", [True, False])
def test_a_worker_is_ready_when_it_has_answered_the_probe(answers: bool) -> None:
    """A hello alone is not enough: the probe's token must be on the page that both sides share."""

    async def scenario(pid: int) -> None:
        ready, gone = asyncio.Event(), asyncio.Event()
        worker = WorkerHandle(7, on_ready=lambda _: ready.set(), on_done=lambda *_: None, on_death=lambda _: gone.set())
        theirs, descriptor = (os.dup(each) for each in worker.descriptors)
        worker.handed_over()
        page = ControlPage(descriptor)
        os.close(descriptor)
        with socket.socket(fileno=theirs) as sock:
            worker.spawned(pid, os.pidfd_open(pid))
            sock.setblocking(True)
            found = await asyncio.to_thread(receive, sock, MessageDecoder())
            assert found == (Probe(7), [])
            assert not ready.is_set()
            if answers:
                page.answer(7)
            send(sock, Hello())
            sock.shutdown(socket.SHUT_RDWR)  # the end of the socket ends the process
            await gone.wait()
            assert ready.is_set() == answers
        page.close()

    with subprocess.Popen(["sleep", "60"]) as process:
        asyncio.run(scenario(process.pid))
