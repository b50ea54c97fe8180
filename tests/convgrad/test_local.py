"""`convgrad.local()`: the calls of a client, computed in this process."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numba.core.compiler_lock import global_compiler_lock

import convgrad
from convgrad import Client
from engine.options import Options
from engine.process import Engine, metas_of
from engine.threads import Stop
from kernels.cache import CACHE
from kernels.problem import ConvProblem
from tests.app import graph
from tests.app.samples import SLOW, SMALL, same_bits
from tests.live import LiveService
from tests.problems import random_case

INPUTS = SMALL.inputs()
ATTRIBUTES = SMALL.attributes()
SEVERAL = ["diff_weights", "diff_src", "diff_bias"]


@pytest.fixture(scope="module")
def local() -> convgrad.LocalClient:
    """A client that computes here."""
    return convgrad.local(threads=2).open()


def several() -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Return a call with all three gradients."""
    case = replace(SMALL, n=3)
    return case.op, case.floats() | {"weights": np.ones(case.weights_shape, np.float32)}, case.attributes()


def raised(call: Callable[[], object]) -> tuple[type, str, dict[str, Any]]:
    """Return class, message and data of the error of a call."""
    with pytest.raises(convgrad.ConvgradError) as caught:
        call()
    data = {name: value for name, value in caught.value.data.items() if name not in ("instance", "request_id")}
    return type(caught.value), caught.value.message, data


@pytest.mark.parametrize("seed", range(12))
def test_any_number_of_threads_gives_the_same_bits(seed: int) -> None:
    """Sums of random numbers have the bits of one thread on 1, 2, 3 and 7, of all outputs and algorithms."""
    case = replace(random_case(np.random.default_rng(seed), 400_000), seed=seed, n=1 + 39 * (seed % 2))
    inputs, attributes = case.floats(), case.attributes()
    for algorithm in ("direct", "auto"):
        first, *others = (
            convgrad.local(threads=threads).run(case.op, inputs, attributes, algorithm=algorithm)
            for threads in (1, 2, 3, 7)
        )
        assert all(same_bits(first, other) for other in others), case


def test_the_service_gives_the_same_bits(local: convgrad.LocalClient, service: LiveService) -> None:
    """Outputs of one call, the reference's and those of a graph have the service's bits and names."""
    op, inputs, attributes = several()
    with Client(service.url) as remote:
        for options in ({}, {"reference": True}, {"algorithm": "auto"}):
            mine = local.run_outputs(op, inputs, attributes, outputs=SEVERAL, **options)
            theirs = remote.run_outputs(op, inputs, attributes, outputs=SEVERAL, **options)
            assert list(mine) == list(theirs) == SEVERAL
            assert all(same_bits(mine[name], theirs[name]) for name in SEVERAL)
        given = graph.tensors(5)
        mine_of_graph, theirs_of_graph = (each.run_graph(graph.EXAMPLE, given, [2, 4, 6]) for each in (local, remote))
        assert list(mine_of_graph) == list(theirs_of_graph)
        assert all(same_bits(mine_of_graph[number], theirs_of_graph[number]) for number in mine_of_graph)


def test_replies_are_those_of_a_service(local: convgrad.LocalClient, service: LiveService) -> None:
    """Details, validations, descriptions and lists are the same, but for times and the cut into units."""
    op, inputs, attributes = several()
    with Client(service.url) as remote:
        mine, theirs = (each.run_detailed(op, inputs, attributes, outputs=SEVERAL) for each in (local, remote))
        assert (mine.op, mine.resolved, mine.warnings) == (theirs.op, theirs.resolved, theirs.warnings)
        assert mine.stats.keys() == theirs.stats.keys()
        assert (mine.stats["kernel"], mine.stats["gmac"]) == (theirs.stats["kernel"], theirs.stats["gmac"])
        assert local.operations() == remote.operations()
        assert local.describe(op) == remote.describe(op)
        told, known = (each.validate(op, inputs, attributes) for each in (local, remote))
        assert told["resolved"] == known["resolved"]
        assert told["outputs"] == known["outputs"]
        assert local.validate_graph(graph.EXAMPLE) == remote.validate_graph(graph.EXAMPLE)
    assert local.health().ready


def test_errors_have_the_words_of_a_service(local: convgrad.LocalClient, service: LiveService) -> None:
    """What is refused is refused with the same class, message and broken rules."""
    op, inputs, attributes = SMALL.op, INPUTS, ATTRIBUTES
    integers = {name: np.ones(value.shape, np.int32) for name, value in inputs.items() if hasattr(value, "shape")}

    def calls(client: Client) -> list[Callable[[], object]]:
        return [
            lambda: client.run(op, inputs, attributes | {"strides": [0, 2], "groups": 7}),
            lambda: client.run(op, inputs, {}),
            lambda: client.run(op, {"src": inputs["src"]}, attributes),
            lambda: client.run(op, inputs | {"sre": inputs["src"]}, attributes),
            lambda: client.run("Convolutoin", inputs, attributes),
            lambda: client.run(op, integers, attributes),
            lambda: client.run(op, inputs, attributes | {"strides": [True, 2]}),
            lambda: client.run(op, inputs, attributes | {"strides": [2.0, 2]}),
            lambda: client.run(op, inputs, attributes | {"strides": {2, 1}}),
            lambda: client.run(op, inputs, attributes, algorithm="winograd"),
            lambda: client.run(op, inputs, attributes, algorithm="fast"),  # type: ignore[arg-type]
            lambda: client.validate(op, inputs, attributes | {"pads_begin": [-1, 0]}),
            lambda: client.verify(op, inputs, np.zeros((1, 2), np.float32), attributes),
            lambda: client.run_graph({"graph": [{"id": 0, "kind": "ReLU"}]}, {}),
            lambda: client.run_graph(graph.EXAMPLE, {}),
        ]

    with Client(service.url) as remote:
        for mine, theirs in zip(calls(local), calls(remote), strict=True):
            assert raised(mine) == raised(theirs)


def test_verdicts(local: convgrad.LocalClient) -> None:
    """A right result passes and a wrong one fails, with the reference and with projections; progress is reported."""
    case, events = replace(SMALL, n=40), list[convgrad.Progress]()
    inputs, attributes = case.floats(), case.attributes()
    right = local.run(case.op, inputs, attributes)
    wrong = right.copy()
    wrong[0, 0, 0, 0] *= 1.5
    for fast in (False, True):
        assert local.verify(case.op, inputs, right, attributes, fast=fast).passed
        report = local.verify(case.op, inputs, wrong, attributes, fast=fast, on_progress=events.append)
        assert not report.passed
    assert events[-1].share == 1
    given = graph.tensors()
    results = local.run_graph(graph.EXAMPLE, given, [2, 6])
    assert all(report.passed for report in local.verify_graph(graph.EXAMPLE, given, results).values())


def test_tensors_are_read_in_place_and_results_own_their_memory(local: convgrad.LocalClient) -> None:
    """A contiguous input is not copied or changed, and a result is no view of anything."""
    inputs = {name: value.copy() if hasattr(value, "copy") else value for name, value in INPUTS.items()}
    for array in inputs.values():
        if isinstance(array, np.ndarray):
            array.flags.writeable = False
    found = local.run(SMALL.op, inputs, ATTRIBUTES)
    assert found.flags.owndata
    assert found.flags.writeable
    strided = {name: np.asfortranarray(value) for name, value in inputs.items() if isinstance(value, np.ndarray)}
    swapped = {name: value.astype(value.dtype.newbyteorder(">")) for name, value in strided.items()}
    for other in (strided, swapped):
        assert same_bits(found, local.run(SMALL.op, inputs | other, ATTRIBUTES))


def test_small_work_stays_in_the_thread_of_the_caller() -> None:
    """Three gradients of a small layer are computed one after the other: another thread would begin when they end."""
    op, inputs, attributes = several()
    engine, computed = Engine(4), set[int]()
    prepared = engine.preparer.prepare(op, attributes, metas_of(inputs), Options(outputs=tuple(SEVERAL)))
    engine.run(prepared, inputs, Stop(), lambda *_: computed.add(threading.get_ident()))
    assert prepared.units == len(SEVERAL)
    assert computed == {threading.get_ident()}


def test_callers_in_several_threads(local: convgrad.LocalClient) -> None:
    """Calls of several threads at once have the bits of calls one after the other."""
    cases = [replace(random_case(np.random.default_rng(seed), 200_000), seed=seed) for seed in range(8)]
    expected = [local.run(case.op, case.floats(), case.attributes()) for case in cases]

    def all_of_them(_: int) -> bool:
        found = (local.run(case.op, case.floats(), case.attributes()) for case in cases)
        return all(same_bits(one, other) for one, other in zip(found, expected, strict=True))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(all_of_them, range(12)))


def test_a_child_has_threads_of_its_own(local: convgrad.LocalClient) -> None:
    """After a fork, while other threads compute, the child computes the same bits, and so does the parent."""
    case = replace(SLOW, kernel=(5, 5), dst_spatial=(36, 36))
    inputs, attributes = case.floats(), case.attributes()
    expected = local.run(case.op, inputs, attributes)
    busy = threading.Thread(target=local.run, args=(case.op, inputs, attributes))
    busy.start()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = 0 if same_bits(local.run(case.op, inputs, attributes), expected) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    busy.join()
    assert same_bits(local.run(case.op, inputs, attributes), expected)


PROPERTY = vars(ConvProblem)["weights_shape"]


@pytest.mark.parametrize(
    ("lock", "at"),
    [
        (CACHE, "lock"),
        (global_compiler_lock, "_lock"),
        pytest.param(PROPERTY, "lock", marks=pytest.mark.skipif(not hasattr(PROPERTY, "lock"), reason="has no lock")),
    ],
    ids=["cache", "compiler", "property"],
)
def test_a_child_waits_for_no_lock(local: convgrad.LocalClient, lock: object, at: str) -> None:
    """A child computes although another thread held a lock when it was forked: none is left that nobody releases."""
    held, forking, done = threading.Event(), threading.Event(), threading.Event()
    os.register_at_fork(before=forking.set)

    def hold() -> None:
        with getattr(lock, at):
            held.set()
            forking.wait()
            if lock is PROPERTY:  # the fork waits for the others
                done.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    pid = os.fork()
    if pid == 0:
        faulthandler.dump_traceback_later(60, exit=True)
        status = 1
        try:
            case = replace(SMALL, n=5)  # which is planned anew
            status = 0 if same_bits(local.run(case.op, case.inputs(), ATTRIBUTES), case.expected(case.inputs())) else 2
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    done.set()
    holder.join()
    assert status == 0


def test_a_deadline_ends_a_call(local: convgrad.LocalClient) -> None:
    """A call is stopped at its deadline, computing, verifying and in a graph, and the next one is right."""
    inputs, attributes = SLOW.floats(), SLOW.attributes()
    for call in (
        lambda: local.run(SLOW.op, inputs, attributes, reference=True, deadline=1e-4),
        lambda: local.verify(SLOW.op, inputs, np.zeros(SLOW.weights_shape, np.float32), attributes, deadline=1e-4),
        lambda: local.run_graph(graph.EXAMPLE, graph.tensors(), deadline=1e-9),
    ):
        with pytest.raises(convgrad.DeadlineExceeded):
            call()
    assert same_bits(local.run(SMALL.op, INPUTS, ATTRIBUTES), SMALL.expected(INPUTS))


INTERRUPTED = """
import os, signal, sys, threading, time
import numpy as np, convgrad
client = convgrad.local(threads=2).open()
src = np.ones((64, 64, 96, 96), np.float32)
given = dict(strides=[1, 1], dilations=[1, 1], auto_pad="same_upper", data_format="NCX", weights_format="OIX")
small = np.ones((1, 1, 4, 4), np.float32)
call = lambda x, channels, **options: client.convolution_backward_weights(
    x, x, weights_shape=[channels, channels, 3, 3], **given, **options)
expected = call(small, 1)
begun = []
def interrupt():
    begun.append(time.monotonic())
    os.kill(os.getpid(), signal.SIGINT)
timer = threading.Timer(0.3, interrupt)
timer.start()
try:
    call(src, 64, reference=True)
except KeyboardInterrupt:
    print("interrupted", time.monotonic() - begun[0] < 5, (call(small, 1) == expected).all())
"""


def test_an_interrupt_ends_a_call() -> None:
    """Ctrl-C in a call of many seconds raises KeyboardInterrupt soon, and the next call is right."""
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, check=False)
    assert done.stdout == "interrupted True True\n", done.stderr


def test_asyncio(local: convgrad.LocalClient) -> None:
    """The async twin computes without blocking the loop, streams, and stops a call that is cancelled."""

    async def main() -> None:
        async with local as client:
            found = await client.run(SMALL.op, INPUTS, ATTRIBUTES)
            assert same_bits(found, SMALL.expected(INPUTS))
            async with client.stream(SMALL.op, INPUTS, ATTRIBUTES) as stream:
                kinds = [type(event) async for event in stream]
                assert same_bits(await stream.result(), found)
            assert {convgrad.Progress, convgrad.Tile} == {*kinds}
            assert (await client.verify(SMALL.op, INPUTS, found, ATTRIBUTES)).passed
            slow = asyncio.ensure_future(client.run(SLOW.op, SLOW.floats(), SLOW.attributes(), reference=True))
            await asyncio.sleep(0)
            slow.cancel()
            with pytest.raises(asyncio.CancelledError):
                await slow

    asyncio.run(main())


def test_a_misspelt_argument_is_an_error() -> None:
    """Unknown arguments are refused with the right name, and wrong values with the rule."""
    wrong: dict[str, dict[str, Any]] = {
        "no argument thread; did you mean threads": {"thread": 2},
        "no argument workers; did you mean threads": {"workers": 2},
        "no argument settings: it has threads, target, device, progress": {"settings": {"memory_limits": "1GB"}},
    }
    for message, given in wrong.items():
        with pytest.raises(TypeError, match=message):
            convgrad.local(**given)
    for threads in (-1, 1.5, True):
        with pytest.raises(ValueError, match="threads must be an integer"):
            convgrad.local(threads=threads)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="comes too late"):
        convgrad.local(target="nonsense").open()


def test_memory_that_is_not_there(local: convgrad.LocalClient) -> None:
    """A result that does not fit into the machine's memory is refused before anything is allocated."""
    src = np.zeros((1, 1, 1, 1), np.float32)
    pads = {"pads_begin": [1 << 20, 1 << 20], "pads_end": [1 << 20, 1 << 20]}
    attributes = {"strides": [1, 1], "dilations": [1, 1], **pads}
    with pytest.raises(convgrad.TooLarge) as caught:
        local.run("Convolution", {"src": src, "weights": np.zeros((1, 1, 1, 1), np.float32)}, attributes)
    assert caught.value.data["reason"] == "memory"
