"""Requests computed in this process: two backends over `engine`, one that blocks and one for asyncio."""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy as np

from convgrad import _core as core
from convgrad._dtypes import DTYPES
from convgrad._errors import ConvgradError, NotFound
from convgrad._events import Array, Event, Health, Progress, Result, Tile
from convgrad._graphs import dump_of
from convgrad._inference import json_bytes
from convgrad._requests import (
    CheckHealth,
    CheckMethod,
    Compute,
    Describe,
    GetJob,
    GetJobResult,
    GetTolerance,
    Inputs,
    ListOperations,
    NextCase,
    Request,
    RunGraph,
    SubmitJob,
    SubmitResult,
    Validate,
    ValidateGraph,
    Verify,
)
from convgrad._sealed import case_in, require_id
from convgrad._stream import AsyncStream, OnProgress
from convgrad._tensors import NpyFile, Part, array_of, part
from engine.graphs import GraphCall, read_graph_call
from engine.options import Options, parse_options
from engine.planning import Prepared
from engine.prepare import Metas
from engine.process import Computed, Engine, metas_of
from engine.sealed.selftest import SelfTests
from engine.threads import Stop

__all__ = ["AsyncProcess", "Process"]

_DIRECT = {DTYPES[name].numpy for name in ("f32", "f16", "bf16")}
"""Dtypes that every call takes."""

_DEFAULT = Options()
_SELF_TESTS = SelfTests()

_PROGRESS_STEPS = 100
"""A call of thousands of units reports its progress about this many times."""


class Process:
    """A `Backend` that computes in this process and blocks."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    async def fetch(self, request: Request, deadline: float | None = None) -> Any:
        """Return what the request asks for."""
        return self.answer(request, _stop(deadline))

    async def result(
        self,
        request: Compute | Verify | GetTolerance,
        deadline: float | None,
        on_progress: OnProgress | None = None,
    ) -> Any:
        """Return the `Result` of a computation, or the report of a verification."""
        return self.answer(request, _stop(deadline), on_progress)

    @asynccontextmanager
    async def stream(self, request: Compute, deadline: float | None) -> AsyncIterator[AsyncStream]:
        """Compute in a thread, and stream what becomes final."""
        streaming, events = _Streaming(self, request, _stop(deadline)), SimpleQueue[Event | None]()

        async def received() -> AsyncIterator[Event]:
            while (event := events.get()) is not None:
                yield event
            streaming.close()

        with ThreadPoolExecutor(1) as thread:
            thread.submit(streaming.run, events.put)
            try:
                yield AsyncStream(received(), streaming.close)
            finally:
                streaming.stop.set()

    async def sleep(self, seconds: float) -> None:
        """Return at once: there is nothing to wait for."""

    async def aclose(self) -> None:
        """Nothing is held between calls."""

    def answer(self, request: Request, stop: Stop, on_progress: OnProgress | None = None) -> Any:
        """Return what a request asks for, computed in this thread and others."""
        engine = self.engine
        match request:
            case Compute(whole=whole):
                if (metas := engine.metas_on_gpu(request.inputs)) is not None:
                    found = engine.run_tensors(self._prepared(request, metas), request.inputs)
                else:
                    found = engine.run(*self.prepared(request), stop)
                return Result(request.op, found.outputs) if whole else _detailed(found)
            case Verify(op, inputs, attributes, options) | GetTolerance(op, inputs, attributes, options):
                given, verify = _tensors(inputs, f64=True), isinstance(request, Verify)
                call = op, _plain(attributes), metas_of(given), _options(options)
                prepared = engine.preparer.prepare(*call, verify=verify, tolerance=not verify)
                if verify:
                    return engine.judge(prepared, given, stop, _reporting(on_progress), _on_gpu(inputs))
                report, outputs = engine.tolerance(prepared, given, stop, _reporting(on_progress))
                return report | {"outputs": outputs}
            case Validate(op, inputs, attributes, options):
                return engine.validate(op, _plain(attributes), _described(inputs), _options(options))
            case RunGraph(graph, inputs, outputs, options):
                arrays = _tensors({str(number): value for number, value in inputs.items()}, f64=True)
                graph_call = _graph(graph, options, None if outputs is None else list(outputs))
                return engine.run_graph(graph_call, arrays, stop)
            case ValidateGraph(graph, options):
                return engine.validate_graph(_graph(graph, options, None))
            case ListOperations():
                return engine.operations()
            case Describe(op):
                return engine.describe(op)
            case CheckHealth():
                return Health(True, {"status": "ready", "target": engine.target})
            case SubmitJob() | GetJob() | GetJobResult():
                raise NotFound("convgrad.local() has no jobs: a service with CONVGRAD_SPOOL has")
            case NextCase(check, seed):
                sent = {"check": check, "send": "seed" if seed else "tensors"}
                return case_in(self._checked("check.next", sent, stop), {})
            case SubmitResult(check, case, output, result):
                answer = {"check": check, "case": case, "inputs": {output: _array(part(result), result)}}
                return self._checked("check.submit", answer, stop)
            case CheckMethod(method, params):
                return self._checked(method, _plain(params), stop)

    def _checked(self, method: str, params: Mapping[str, Any], stop: Stop) -> dict[str, Any]:
        require_id(params.get("check"))
        return _SELF_TESTS.answer(self.engine, method, params, stop)

    def prepared(self, request: Compute) -> tuple[Prepared, dict[str, Any]]:
        """Check and plan a computation; return it with its tensors."""
        given = _tensors(request.inputs, f64=_options(request.options).uses_reference)
        return self._prepared(request, metas_of(given)), given

    def _prepared(self, request: Compute, metas: Metas) -> Prepared:
        preparer, options, attributes = self.engine.preparer, _options(request.options), request.attributes
        prepared = preparer.known(request.op, attributes, metas, options)
        return prepared or preparer.prepare(request.op, _plain(attributes), metas, options)


class AsyncProcess:
    """A `Backend` that computes in threads of this process; a cancelled call stops."""

    def __init__(self, engine: Engine) -> None:
        self._process = Process(engine)

    async def fetch(self, request: Request, deadline: float | None = None) -> Any:
        """Return what the request asks for."""
        return await self._run(request, _stop(deadline))

    async def result(
        self,
        request: Compute | Verify | GetTolerance,
        deadline: float | None,
        on_progress: OnProgress | None = None,
    ) -> Any:
        """Return the `Result` of a computation, or the report of a verification."""
        loop = asyncio.get_running_loop()
        report = None if on_progress is None else partial(_soon, loop, on_progress)
        return await self._run(request, _stop(deadline), report)

    @asynccontextmanager
    async def stream(self, request: Compute, deadline: float | None) -> AsyncIterator[AsyncStream]:
        """Compute in a thread, and stream what becomes final."""
        streaming, events = _Streaming(self._process, request, _stop(deadline)), asyncio.Queue[Event | None]()

        async def received() -> AsyncIterator[Event]:
            while (event := await events.get()) is not None:
                yield event
            streaming.close()

        put = partial(_soon, asyncio.get_running_loop(), events.put_nowait)
        running = asyncio.ensure_future(asyncio.to_thread(streaming.run, put))
        try:
            yield AsyncStream(received(), streaming.close)
        finally:
            streaming.stop.set()
            await running

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        await asyncio.sleep(seconds)

    async def aclose(self) -> None:
        """Nothing is held between calls."""

    async def _run(self, request: Request, stop: Stop, on_progress: OnProgress | None = None) -> Any:
        running = asyncio.ensure_future(asyncio.to_thread(self._process.answer, request, stop, on_progress))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            stop.set()
            with suppress(ConvgradError):
                await running
            raise


def _soon(loop: asyncio.AbstractEventLoop, call: Callable[[Any], object], value: object) -> None:
    loop.call_soon_threadsafe(call, value)


class _Streaming:
    """A call whose events are delivered while it is computed: those of one output after those of the other."""

    def __init__(self, process: Process, request: Compute, stop: Stop) -> None:
        self.stop = stop
        self._process = process
        self._request = request
        self._result: Result | None = None
        self._error: BaseException | None = None

    def run(self, put: Callable[[Event | None], object]) -> None:
        """Compute, and `put` each event, then None."""
        try:
            prepared, given = self._process.prepared(self._request)
            put(Progress(0, prepared.units))
            found = self._process.engine.run(prepared, given, self.stop, _Delivery(prepared, put))
            self._result = _detailed(found)
        except BaseException as error:  # noqa: BLE001 - `close` raises it where the events are read
            self._error = error
        put(None)

    def close(self) -> Result:
        """Return the result; raises what the call raised."""
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result


class _Delivery:
    """Deliver the events of a call in the order of its outputs."""

    def __init__(self, prepared: Prepared, put: Callable[[Event | None], object]) -> None:
        self._names = [prepared.op.wire_name(each.output.name) for each in prepared.computations]
        self._left = [len(each.plan.units) for each in prepared.computations]
        self._waiting: list[list[Event]] = [[] for _ in self._names]
        self._tiles = [0] * len(self._names)
        self._done, self._total, self._current = 0, prepared.units, 0
        self._step = max(1, prepared.units // _PROGRESS_STEPS)
        self._put = put

    def __call__(self, output: int, offset: tuple[int, ...] | None, box: Array | None) -> None:
        """Note that a unit is done; `box` is the part of the output that is final then."""
        self._done += 1
        self._left[output] -= 1
        if self._done % self._step == 0 or self._done == self._total:
            self._put(Progress(self._done, self._total))
        if box is not None and offset is not None:
            box.flags.writeable = False
            tile = Tile(self._names[output], self._tiles[output], offset, box.shape, box)
            self._tiles[output] += 1
            self._waiting[output].append(tile)
        while self._current < len(self._names):
            for event in self._waiting[self._current]:
                self._put(event)
            self._waiting[self._current].clear()
            if self._left[self._current]:
                return
            self._current += 1


def _stop(deadline: float | None) -> Stop:
    return Stop(None if deadline is None or deadline == math.inf else time.monotonic() + deadline)


def _options(options: Mapping[str, Any]) -> Options:
    """Return the options of a call; its deadline is that of `_stop`."""
    if not options:
        return _DEFAULT
    return parse_options({name: value for name, value in options.items() if name != "deadline_ms"})


def _detailed(found: Computed) -> Result:
    op = found.prepared.op
    stats = found.prepared.stats(found.seconds)
    return Result(op.called_as, found.outputs, found.prepared.resolved, stats, tuple(op.warnings))


def _reporting(on_progress: OnProgress | None) -> Callable[[int, int], object] | None:
    return None if on_progress is None else lambda done, total: on_progress(Progress(done, total))


def _graph(graph: Any, options: Mapping[str, Any], outputs: list[int] | None) -> GraphCall:
    chosen = {name: value for name, value in options.items() if name != "deadline_ms"}
    document = {"graph": dump_of(graph), "options": chosen, "outputs": outputs}
    return read_graph_call(json.loads(json_bytes(document)))


def _plain(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return attributes as a service reads them: numbers, strings and lists. Raises `InvalidParams` for others."""
    found: dict[str, Any] = json.loads(json_bytes(attributes))
    return found


def _tensors(inputs: Inputs, *, f64: bool) -> dict[str, Any]:
    """Return the inputs as arrays in C order and native byte order, read in place if they are, and lists of integers.

    Raises `Unsupported`, `ParseError` and `OSError` as a client of a service does.
    """
    found: dict[str, Any] = {}
    torch = sys.modules.get("torch")
    for name, value in inputs.items():
        if torch is not None and isinstance(value, torch.Tensor):
            value = array_of(value)
        if type(value) is np.ndarray and value.flags.c_contiguous and value.dtype in _DIRECT:
            found[name] = value
        elif core.is_list(name, value):
            found[name] = _list(value)
        else:
            found[name] = _array(core.tensor(name, value, f64=f64), value)
    return found


def _on_gpu(inputs: Inputs) -> dict[str, Any]:
    """Return the tensors of PyTorch that are on a GPU and have images."""
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    return {
        name: value.detach()
        for name, value in inputs.items()
        if isinstance(value, torch.Tensor) and value.is_cuda and "weights" not in name
    }


def _list(value: Any) -> Any:
    """Return a list as a service reads it."""
    for number in value:
        if type(number) is not int:
            return json.loads(json_bytes({"": value}))[""]
    return list(value)


def _array(sent: Part, value: Any) -> Array:
    """Return the elements of a tensor whose dtype and shape are known."""
    path = value.path if isinstance(value, NpyFile) else value
    array = np.load(path) if isinstance(path, str | os.PathLike) else array_of(value)
    kind = sent.dtype.numpy
    if array.dtype.kind in "Vu" and array.dtype != kind:  # how .npy files hold bfloat16
        array = array.view(kind)
    return np.ascontiguousarray(array, kind).reshape(sent.shape)


def _described(inputs: Inputs) -> dict[str, Any]:
    """Return dtype and shape of each input, and the lists."""
    found: dict[str, Any] = {}
    for name, value in inputs.items():
        if core.is_list(name, value) or isinstance(value, Mapping):
            found[name] = json.loads(json_bytes({"": value}))[""]
        else:
            found[name] = part(value).describe()
    return found
