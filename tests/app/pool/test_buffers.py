"""Shared memory: sizes, limits, reuse, and above all that nothing is reused while somebody can still see it."""

from __future__ import annotations

import asyncio
import errno
import mmap
import os
import re
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from app.pool.buffers import Segment, SegmentPool, size_class
from convgrad._errors import Overloaded, TooLarge
from tests.app.pool.proc import descriptors, opened_since
from tests.confined import without

_KIB = 1 << 10
_MIB = 1 << 20


@pytest.fixture
def pool() -> Iterator[SegmentPool]:
    """A pool of 4 MiB."""
    pool = SegmentPool(4 * _MIB)
    yield pool
    pool.close()


@given(st.integers(0, 1 << 40))
def test_size_classes_waste_at_most_an_eighth(nbytes: int) -> None:
    """A class holds what was requested, in whole pages, and above 64 KiB is at most an eighth larger."""
    size = size_class(nbytes)
    assert size >= nbytes
    assert size % mmap.PAGESIZE == 0
    assert size == 64 * _KIB or size * 8 <= nbytes * 9 + 8 * mmap.PAGESIZE
    assert size_class(size) == size


# Fails if the file has a name, or would stay open in a program that this process starts.
NAMELESS = """
import os
from app.pool.buffers import anonymous_file
descriptor = anonymous_file()
assert os.fstat(descriptor).st_nlink == 0
assert not os.get_inheritable(descriptor)
os.posix_fallocate(descriptor, 0, 1 << 20)
print(os.readlink(f"/proc/self/fd/{descriptor}"))
"""


def test_shared_memory_has_no_name() -> None:
    """No path leads to the file, so nothing is left when its processes exit."""
    done = subprocess.run([sys.executable, "-c", NAMELESS], check=True, capture_output=True, text=True)
    assert done.stdout == "/memfd:convgrad (deleted)\n"
    assert not done.stderr


def test_without_memfd_create_it_is_a_temporary_file_without_a_name(tmp_path: Path) -> None:
    """If the system call fails, whether Python has it or not, an unlinked temporary file is used instead."""
    command = [*without("memfd_create"), sys.executable, "-c", NAMELESS]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    assert re.fullmatch(rf"{tmp_path}/convgrad-\w+ \(deleted\)\n", done.stdout)
    assert "memfd_create failed ([Errno 38] Function not implemented)" in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_released_block_serves_the_next_call(pool: SegmentPool) -> None:
    """A block is reused under the same id, also for a somewhat smaller request."""
    first = pool.acquire(100_000)
    first.release()
    second = pool.acquire(90_000)
    assert (second.id, second.fd) == (first.id, first.fd)
    assert (second.size, len(second.view)) == (90_000, 90_000)
    assert (pool.stats().created, pool.stats().reused) == (1, 1)


def test_a_much_larger_block_is_not_wasted_on_a_small_call(pool: SegmentPool) -> None:
    """A small request gets new memory rather than a block of several times its size."""
    large = pool.acquire(2 * _MIB)
    large.release()
    assert pool.acquire(64 * _KIB).id != large.id


def test_a_released_segment_gives_no_view(pool: SegmentPool) -> None:
    """Using a segment after its release is an error; releasing it twice is not."""
    segment = pool.acquire(10)
    segment.release()
    segment.release()
    with pytest.raises(ValueError, match="was released"):
        _ = segment.view


def test_a_view_outlives_its_release(pool: SegmentPool) -> None:
    """Memory from which a transport still sends is not reused, even after the segment's release."""
    segment = pool.acquire(_MIB)
    array = np.frombuffer(segment.view, np.uint8)
    array[...] = 7
    tail = segment.view[-100:]
    del array
    segment.release()
    other = pool.acquire(_MIB)
    assert other.id != segment.id
    other.view[:] = bytes(_MIB)
    assert bytes(tail) == b"\7" * 100
    del tail
    assert pool.acquire(_MIB).id == segment.id


def test_a_forgotten_segment_is_no_leak(pool: SegmentPool) -> None:
    """A segment that is dropped without a release returns to the pool too."""
    pool.acquire(100)
    assert pool.stats().used == 0


def test_a_full_pool_refuses_and_recovers(pool: SegmentPool) -> None:
    """A request that does not fit now raises Overloaded with a time to retry; after a release it fits."""
    kept = [pool.acquire(_MIB) for _ in range(4)]
    with pytest.raises(Overloaded) as caught:
        pool.acquire(1)
    assert caught.value.retry_after
    assert caught.value.data["reason"] == "memory"
    assert pool.stats().refused == 1
    kept.pop().release()
    assert pool.acquire(_MIB).size == _MIB


def test_requests_over_the_limit_are_too_large(pool: SegmentPool) -> None:
    """A request over the whole limit raises TooLarge; one of exactly the limit fits."""
    with pytest.raises(TooLarge):
        pool.acquire(4 * _MIB + 1)
    assert pool.acquire(4 * _MIB).size == 4 * _MIB


def test_idle_blocks_make_room(pool: SegmentPool) -> None:
    """Before a request is rejected, idle blocks of other sizes are freed, the longest idle first."""
    retired: list[int] = []
    pool.on_retire = retired.append
    segments = [pool.acquire(_MIB) for _ in range(4)]
    ids = [segment.id for segment in segments]
    for segment in segments:
        segment.release()
        pool.stats()
    assert pool.acquire(2 * _MIB).size == 2 * _MIB
    assert retired == ids[:2]
    assert pool.stats().total == 4 * _MIB


def test_trim_frees_the_pages_of_other_mappings(pool: SegmentPool) -> None:
    """Memory of an idle block is freed at once even if a worker has it mapped: its file becomes empty."""
    segment = pool.acquire(_MIB)
    copy = os.dup(segment.fd)
    try:
        segment.release()
        assert pool.trim(idle_s=3600) == 0
        assert pool.trim() == _MIB
        assert os.fstat(copy).st_size == 0
    finally:
        os.close(copy)
    assert pool.stats().total == 0


def test_closing_frees_leased_blocks_later(pool: SegmentPool) -> None:
    """After close, memory is freed when its last lease ends."""
    segment = pool.acquire(_MIB)
    pool.close()
    assert pool.stats().total == _MIB
    segment.release()
    assert pool.stats().total == 0


def test_no_memory_is_an_error_not_a_signal(pool: SegmentPool) -> None:
    """If the system has no memory, the request is rejected before any write could end in SIGBUS."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = descriptors()
    resource.setrlimit(resource.RLIMIT_FSIZE, (_MIB, hard))
    try:
        with pytest.raises(Overloaded, match=os.strerror(errno.EFBIG)):
            pool.acquire(2 * _MIB)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert pool.stats().total == 0
    assert not opened_since(before)
    assert pool.acquire(2 * _MIB).size == 2 * _MIB


def test_idle_blocks_release_their_descriptors(pool: SegmentPool) -> None:
    """If no more files may be opened, the request is rejected; the next one gets the descriptors of idle blocks."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    pool.acquire(1 << 16).release()
    most = max(descriptors()) + 1
    taken = [os.dup(0) for _ in range(most - len(descriptors()))]  # fills the gaps among the open ones
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    try:
        with pytest.raises(Overloaded, match="Too many open files"):
            pool.acquire(1 << 20)
        assert pool.acquire(1 << 20).size == 1 << 20
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for number in taken:
            os.close(number)


async def test_large_segments_are_created_off_the_event_loop(pool: SegmentPool) -> None:
    """`acquire_async` returns the same as `acquire`, new or reused, and rejects the same requests."""
    first = await pool.acquire_async(3 * _MIB)
    first.view[-1] = 1
    with pytest.raises(Overloaded):
        await pool.acquire_async(3 * _MIB)
    first.release()
    assert (await pool.acquire_async(3 * _MIB)).id == first.id


def test_a_cancelled_acquire_leaves_a_block_to_reuse() -> None:
    """A caller cancelled while memory is allocated leaks nothing: the next caller gets the block."""
    pool = SegmentPool(8 * _MIB)

    async def scenario() -> None:
        task = asyncio.create_task(pool.acquire_async(4 * _MIB))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())  # joins the thread that allocates the block
    assert pool.stats().used == 0
    assert pool.acquire(4 * _MIB).id == 1
    pool.close()


def test_a_block_made_in_a_thread_is_the_caller_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other call can take it while its caller resumes, so the event loop allocates nothing."""
    pool, makers = SegmentPool(32 * _MIB), []
    reserve, to_thread = SegmentPool._reserve, asyncio.to_thread

    def recording(self: SegmentPool, *arguments: Any) -> Any:
        makers.append(threading.current_thread())
        return reserve(self, *arguments)

    async def raced(*arguments: Any, **options: Any) -> Any:
        made = await to_thread(*arguments, **options)
        rival = pool._reuse(4 * _MIB, 4 * _MIB, "")
        assert rival is None
        return made

    monkeypatch.setattr(SegmentPool, "_reserve", recording)
    monkeypatch.setattr(asyncio, "to_thread", raced)
    asyncio.run(pool.acquire_async(4 * _MIB))
    assert len(makers) == 1
    assert makers[0] is not threading.main_thread()
    pool.close()


class PoolMachine(RuleBasedStateMachine):
    """In any order of leases, views and holds, none sees another's bytes, and the totals are consistent."""

    segments = Bundle("segments")
    watched = Bundle("watched")

    def __init__(self) -> None:
        super().__init__()
        self.pool = SegmentPool(2 * _MIB)
        self.marks: dict[int, int] = {}
        self.views: dict[int, tuple[memoryview, int]] = {}
        self.next_mark = 0

    @rule(target=segments, nbytes=st.integers(0, 900 * _KIB))
    def acquire(self, nbytes: int) -> Segment | None:
        """Fill a new lease with its own mark, or be rejected because others have the memory."""
        try:
            segment = self.pool.acquire(nbytes)
        except Overloaded:
            stats = self.pool.stats()
            assert stats.used + size_class(nbytes) > self.pool.limit
            return None
        self.next_mark += 1
        self.marks[id(segment)] = self.next_mark % 251
        segment.view[:] = bytes([self.next_mark % 251]) * nbytes
        return segment

    @rule(target=watched, segment=segments)
    def look(self, segment: Segment | None) -> int | None:
        """Keep a view of a part of the memory."""
        if segment is None:
            return None
        self.views[len(self.views)] = segment.view[len(segment.view) // 2 :], self.marks[id(segment)]
        return len(self.views) - 1

    @rule(segment=consumes(segments))
    def release(self, segment: Segment | None) -> None:
        """Release a lease."""
        if segment is not None:
            assert set(segment.view) <= {self.marks.pop(id(segment))}
            segment.release()

    @rule(number=watched)
    def look_away(self, number: int | None) -> None:
        """Drop a view."""
        if number is not None:
            self.views[number] = memoryview(b""), 0

    @rule()
    def trim(self) -> None:
        """Free the idle blocks."""
        self.pool.trim()
        assert self.pool.stats().idle_blocks == 0

    @invariant()
    def views_keep_their_marks(self) -> None:
        """No memory with a live view was overwritten."""
        for view, mark in self.views.values():
            assert set(view) <= {mark}

    @invariant()
    def the_sums_add_up(self) -> None:
        """Used memory is at most what exists, and that is at most the limit."""
        stats = self.pool.stats()
        assert stats.used <= stats.total <= self.pool.limit
        assert stats.peak >= stats.total

    def teardown(self) -> None:
        """All memory is freed when the last view is dropped."""
        self.views.clear()
        self.pool.close()


PoolMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestPoolMachine = PoolMachine.TestCase
