"""What the fork server's workers do when nobody is left to work for."""

from __future__ import annotations

import subprocess
import sys

_FORK = """
import os
from app.pool.fork_server import _fork
from app.pool.messages import pair

server, peer = pair()
peer.close()
workers = set()
try:
    _fork(server, workers)
except BrokenPipeError:
    os._exit(os.waitstatus_to_exitcode(os.waitpid(workers.pop(), 0)[1]))
"""


def test_a_worker_whose_server_hangs_up_before_its_first_message_ends_quietly() -> None:
    """It is no failure of the worker: no traceback, status 0."""
    forked = subprocess.run([sys.executable, "-c", _FORK], capture_output=True, text=True, check=False)
    assert (forked.returncode, forked.stderr) == (0, "")
