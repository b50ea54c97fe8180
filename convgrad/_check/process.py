"""The kernel's process, as seen from the command: started, called with a time limit, ended and started again."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import site
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from convgrad._check import isolation
from convgrad._check.problems import Problem, Takes
from convgrad._dtypes import dtype as dtype_of

__all__ = ["KernelProcess", "Memory", "Outcome", "signal_name"]

Array = npt.NDArray[Any]

_START_S = 120.0
"""Seconds for loading the kernel: importing a framework may take a while."""

_STDLIB = str(Path(os.__file__).parent)
_SAID = 4000
"""Bytes of the kernel's standard error that are kept after a crash."""


@dataclass(frozen=True)
class Memory:
    """Placement of a call's tensors; the memory of the result is filled with bytes of `poison` before."""

    poison: int = 0xFF  # NaN, in every dtype
    at_end: bool = True
    aligned: bool = True


@dataclass(frozen=True)
class Outcome:
    """The outcome of a call: `done`, `unsupported`, or a fault that `text` describes.

    Faults are `raised`, `crashed`, `hung`, `dtype` and `shape`. `modified` are the inputs that were changed, `outside`
    the tensors beside which memory was written.
    """

    status: str
    text: str = ""
    result: Array | None = None
    seconds: float = 0.0
    modified: list[str] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)


class KernelProcess:
    """Runs one kernel; `takes` is what the kernel takes. Starting raises `ValueError` if it can't be used.

    With `hidden`, texts that the kernel must not find, it is isolated as far as the system can, unless it is a URL.
    """

    def __init__(
        self, kernel: str, *, arrays: str = "numpy", takes: Mapping[str, Any], limit: float, api_key: str | None = None,
        hidden: Collection[str] | None = None,
    ) -> None:  # fmt: skip
        self._first = {"kernel": kernel, "arrays": arrays, "takes": dict(takes), "api_key": api_key,
                       "alone": hidden is not None}  # fmt: skip
        self._limit = limit
        self._hidden = hidden
        self._isolates = hidden is not None and not kernel.startswith(("http://", "https://"))
        self.isolation: list[str] = []
        """The `MEASURES` in force."""
        self._process: subprocess.Popen[bytes] | None = None
        self.restarts = -1
        self.takes = self._start()

    def _start(self) -> Takes:
        if sys.platform == "win32":
            raise ValueError("convgrad check needs Linux or macOS")
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)  # too
        # What malloc gives and what was freed is never zero, and large blocks are not fresh pages, which are.
        poisoned = {"MALLOC_PERTURB_": "1", "MALLOC_MMAP_THRESHOLD_": str(1 << 25), "PYTHONUNBUFFERED": "1"}
        path = [os.environ.get("PYTHONPATH"), str(Path(__file__).parents[2])]
        command = [sys.executable, "-m", "convgrad._check.host"]
        if self._isolates:
            command = [sys.executable, "-I", "-S", isolation.__file__, self._folder.name, *command]
        self._process = subprocess.Popen(  # noqa: S603
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            bufsize=0,
            env={**self._environment(), **poisoned, "PYTHONPATH": os.pathsep.join(filter(None, path))},
            start_new_session=True,  # so that what it starts can be ended with it, and Ctrl-C is for the command
        )
        self._buffer = b""
        self.restarts += 1
        head = self._receive(_START_S) if self._isolates else {"isolation": []}
        if head is not None:
            self.isolation = head["isolation"]
            head = self._receive(_START_S) if self._send(self._first) else None
        if head is None:
            fault = self._ended(f"did not load within {_START_S:g} s").text
            raise ValueError(f"the kernel can't be loaded: it {fault}")
        if "error" in head:
            self.close()
            raise ValueError(head["error"])
        return Takes.from_json(head["takes"])

    def _environment(self) -> dict[str, str]:
        """Return the variables for the process; where it is isolated, caches and files go to its folder."""
        if self._hidden is None:
            return dict(os.environ)
        found = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("CONVGRAD_")
            and not name.lower().endswith("_proxy")
            and not any(text in value for text in self._hidden)
        }
        if self._isolates:
            found |= {"PYTHONUSERBASE": site.getuserbase(), "HOME": self._folder.name, "TMPDIR": self._folder.name}
        return found

    @contextlib.contextmanager
    def limited(self, seconds: float | None) -> Iterator[None]:
        """Lower the time limit in the block, if one is given: a kernel that hung is not waited for as long again."""
        whole = self._limit
        self._limit = whole if seconds is None else min(whole, seconds)
        try:
            yield
        finally:
            self._limit = whole

    def call(self, problem: Problem, inputs: Mapping[str, Array], memory: Memory) -> Outcome:
        """Run the kernel once."""
        if self._process is None:
            self._start()
        head = {"problem": problem.as_json(), "poison": memory.poison, "at_end": memory.at_end,
                "aligned": memory.aligned}  # fmt: skip
        answer = self._receive(self._limit) if self._send(head, [each.tobytes() for each in inputs.values()]) else None
        if answer is None:
            return self._ended(f"did not return within {self._limit:g} s")
        size = answer.pop("bytes")
        data = self._read(size, time.monotonic() + _START_S)
        if data is None:
            return self._ended(f"did not return within {self._limit:g} s")
        result = None
        if answer["status"] == "done":
            result = np.frombuffer(data, dtype_of(problem.dtype).numpy).reshape(problem.output_shape)
        return Outcome(**answer, result=result)

    def project(self, problem: Problem, seed: int) -> dict[str, Any]:
        """Run the kernel on data that its process draws: `status`, `text`, `seconds` and the `projected` result.

        The time limit is 30 times as long.
        """
        if self._process is None:
            self._start()
        seconds = 30 * self._limit
        answer = self._receive(seconds) if self._send({"problem": problem.as_json(), "seed": seed}) else None
        if answer is None:
            ended = self._ended(f"did not return within {seconds:g} s")
            answer = {"status": ended.status, "text": ended.text}
        return answer

    def _send(self, head: Mapping[str, Any], pieces: list[bytes] | None = None) -> bool:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            for piece in (json.dumps(head).encode() + b"\n", *(pieces or ())):
                rest = memoryview(piece)
                while rest:
                    rest = rest[self._process.stdin.write(rest) :]
        except OSError:
            return False
        return True

    def _receive(self, seconds: float) -> dict[str, Any] | None:
        end = time.monotonic() + seconds
        while b"\n" not in self._buffer:
            if not self._more(end):
                return None
        line, _, self._buffer = self._buffer.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found

    def _read(self, size: int, end: float) -> bytes | None:
        pieces, have = [self._buffer], len(self._buffer)
        while have < size:
            self._buffer = b""
            if not self._more(end):
                return None
            pieces.append(self._buffer)
            have += len(self._buffer)
        whole = b"".join(pieces)
        self._buffer = whole[size:]
        return whole[:size]

    def _more(self, end: float) -> bool:
        """Wait for bytes of the process; False at the end of the time or of the process."""
        assert self._process is not None
        assert self._process.stdout is not None
        left = end - time.monotonic()
        if left <= 0 or not _is_readable(self._process.stdout, left):
            return False
        new = self._process.stdout.read(1 << 20)
        self._buffer += new or b""
        return bool(new)

    def _ended(self, slow: str) -> Outcome:
        """Return the outcome of a process that does not answer, and end it if it still runs."""
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):  # it may be writing a core file
            self._process.wait(0.0 if _is_open(self._process) else 5.0)
        code = self._process.poll()
        self._said.seek(max(0, self._said.seek(0, os.SEEK_END) - _SAID))
        said = self._said.read().decode(errors="replace").strip()
        self.close()
        if code is None:
            return Outcome("hung", slow)
        how = f"was ended by {signal_name(-code)}" if code < 0 else f"ended with status {code}"
        return Outcome("crashed", f"{how}{_place(said)}")

    def close(self) -> None:
        """End the process, and all that it started."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdin, process.stdout, self._said):
            assert stream is not None
            with contextlib.suppress(OSError):
                stream.close()
        self._folder.cleanup()

    def __enter__(self) -> KernelProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def signal_name(number: int) -> str:
    """Return the name of a signal, such as SIGSEGV."""
    return signal.Signals(number).name if number in {*signal.Signals} else f"signal {number}"


def _is_open(process: subprocess.Popen[bytes]) -> bool:
    """Whether the process still has its end of the pipe, so that it has not ended."""
    assert process.stdout is not None
    return not _is_readable(process.stdout, 0)


def _is_readable(stream: IO[bytes], seconds: float) -> bool:
    """Wait at most so long for bytes of a stream, or its end."""
    with selectors.DefaultSelector() as ready:  # unlike select(), it takes descriptors above 1023
        ready.register(stream, selectors.EVENT_READ)
        return bool(ready.select(seconds))


def _place(said: str) -> str:
    """Return the innermost line of the kernel that `faulthandler` names, or else the last line of what was said."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    traced = [line for line in lines if line.startswith("File ")]
    other = (f'File "{_STDLIB}', 'File "<frozen ')
    own = [line for line in traced if "/convgrad/_check/" not in line and not line.startswith(other)]
    if own or traced:
        return f", in {own[0][5:]}" if own else ""
    return f": {lines[-1][:200]}" if lines else ""
