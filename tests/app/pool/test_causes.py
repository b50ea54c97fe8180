"""Error causes: one line, with the reason and the remedy."""

from __future__ import annotations

import errno
import os

import pytest

from app.pool.causes import explain, how_it_ended, is_final


@pytest.mark.parametrize(
    ("error", "reason", "remedy"),
    [
        (OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)), "Resource temporarily unavailable", "process limit"),
        (RuntimeError("can't start new thread"), "can't start new thread", "process limit"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "No space left on device", "free disk space"),
        (MemoryError(), "Cannot allocate memory", "allow more memory"),
    ],
)
def test_a_cause_ends_with_the_remedy(error: BaseException, reason: str, remedy: str) -> None:
    """What failed, why, and what to do about it are in one line."""
    what, _, rest = explain("it failed", error).partition(": ")
    assert what == "it failed"
    assert reason in rest.partition("; ")[0]
    assert remedy in rest.partition("; ")[2]


def test_a_cause_is_one_line_whatever_the_error() -> None:
    """An error without an errno has no remedy; its line breaks become spaces."""
    assert explain("it failed", ValueError("one\ntwo")) == "it failed: ValueError: one two"


def test_only_a_missing_system_call_is_final() -> None:
    """A missing system call stays missing; limits may be raised and memory freed."""
    assert is_final(OSError(errno.ENOSYS, "no"))
    assert not is_final(OSError(errno.EAGAIN, "no"))
    assert not is_final(MemoryError())


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (-9, "was killed by SIGKILL, as when memory runs out"),
        (-11, "was killed by SIGSEGV"),
        (1, "exited with status 1"),
    ],
)
def test_how_a_process_ended(status: int, text: str) -> None:
    """Signals are named."""
    assert how_it_ended(status) == text
