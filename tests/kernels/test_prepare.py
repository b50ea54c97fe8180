"""Compiling in several processes: in an order in which nothing is compiled twice, with honest progress."""

from __future__ import annotations

from itertools import pairwise

from kernels.emit.compiler import ENTRIES, needs
from kernels.prepare import _heights, _work, compile_all, read_verdict
from tests.live import LiveService


def test_a_function_waits_for_what_it_calls() -> None:
    """Whatever the order of the sources: what is called by others has the longer chain, and less work inside."""
    waits = needs(ENTRIES)
    heights, work = _heights(waits), _work(waits)
    names = [entry.name for entry in ENTRIES]
    assert len(set(names)) == len(names)
    gather, pack = names.index("forward.gather.gather"), names.index("pack.panels.pack_panel")
    assert names.index("forward.gather.write") in waits[gather]
    assert all(heights[needed] > heights[place] for place, each in enumerate(waits) for needed in each)
    assert all(work[needed] < work[place] for place, each in enumerate(waits) for needed in each)
    assert work[gather] > work[pack]


def test_progress_rises_to_the_whole_and_nothing_is_compiled_again(service: LiveService) -> None:
    """Where everything is cached, each entry is loaded by one of the processes, and the report ends at its total."""
    assert service.url
    verdict = read_verdict()
    assert verdict is not None
    assert verdict.unfit is None
    told: list[tuple[int, int]] = []
    assert compile_all(lambda done, total: told.append((done, total)), 2) == (0, None)
    assert len(told) == len(ENTRIES) + 1
    assert all(before < after for (before, _), (after, _) in pairwise(told))
    assert told[-1][0] == told[-1][1]
