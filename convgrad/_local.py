"""`convgrad.local()`: the same calls, computed in this process."""

from __future__ import annotations

import asyncio
import difflib
import inspect
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

from convgrad._async_client import AsyncClient
from convgrad._base import BaseClient
from convgrad._client import Client
from convgrad._launch import install_hint
from convgrad._progress import ProgressBar

if TYPE_CHECKING:
    from engine.process import Engine

__all__ = ["AsyncLocalClient", "LocalClient", "local"]

_TARGET = "CONVGRAD_TARGET"
_NEEDS = ("numba", "pydantic")

Device = Literal["cpu", "cuda"]

_loading = threading.Lock()


def _in_child() -> None:
    global _loading
    _loading = threading.Lock()  # the thread that holds it, perhaps for a minute, is not in a child


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


def local(
    *, threads: int = 0, target: str | None = None, device: Device = "cpu", progress: bool | None = None, **unknown: Any
) -> LocalClient:
    """Return a client that computes in this process: the methods of `Client`, without a service.

    >>> with convgrad.local() as client:  # doctest: +SKIP
    ...     dw = client.convolution_backward_weights(src, diff_dst, **attributes)

    Calls run on `threads` threads, by default one per processor; the bits of a result do not depend on their number.
    Arrays of NumPy and tensors of PyTorch are read in place where they are contiguous; results are arrays that own
    their memory. `target` chooses the code by the name of a processor (docs/running.md), before the kernels are first
    used. The client works without a block too, and in ``async with`` it gives its asyncio twin.

    With `device` "cuda" operations are computed on the first GPU (docs/gpu.md), which needs the extra ``gpu``. Tensors
    of PyTorch that are there are not copied, and results are such tensors; other results are arrays. All else is
    computed on the CPU; only `verify` projects tensors on a GPU there.

    The first time on a machine the kernels are compiled, which took 15 seconds on two processors of Zen 4;
    `progress` shows a bar meanwhile, by default in terminals and notebooks.

    The first call raises `ImportError` if a package that computes is missing (the extra ``compute``), and
    `RuntimeError` if the compiled code does not work on this processor, or no GPU can be used. `ValueError` is raised
    for an unknown device, an unknown target, or one that comes too late, and `TypeError` for an unknown argument.
    """
    if unknown:
        name = next(iter(unknown))
        known = [name for name, each in inspect.signature(local).parameters.items() if each.kind is each.KEYWORD_ONLY]
        close = {"workers": ["threads"]}.get(name) or difflib.get_close_matches(name, known, 1, 0.5)
        hint = f"; did you mean {close[0]}?" if close else f": it has {', '.join(known)}"
        raise TypeError(f"convgrad.local() has no argument {name}{hint}")
    if not isinstance(threads, int) or isinstance(threads, bool) or threads < 0:
        raise ValueError(f"threads must be an integer of at least 0, but is {threads!r}")
    if device not in get_args(Device):
        raise ValueError(f"device must be {' or '.join(get_args(Device))}, but is {device!r}")
    return LocalClient(threads, target, progress, device)


class LocalClient(Client):
    """A `Client` that computes in this process; made by `local`."""

    def __init__(self, threads: int, target: str | None, progress: bool | None, device: Device = "cpu") -> None:
        self._threads = threads
        self._target = target
        self._progress = progress
        self._device = device

    @cached_property
    def _engine(self) -> Engine:
        with _loading:
            return _load(self._threads, self._target, self._progress, self._device)

    @cached_property
    def _async(self) -> BaseClient:  # type: ignore[override] # made when it is first needed
        from convgrad._process import Process

        return BaseClient(Process(self._engine))

    def open(self) -> Self:
        """Load the kernels, which are compiled if they are not yet, and return this client."""
        assert self._engine
        return self

    def close(self) -> None:
        """Do nothing: no call holds anything when it has ended."""

    def __enter__(self) -> Self:
        return self.open()

    async def __aenter__(self) -> AsyncLocalClient:
        await asyncio.to_thread(self.open)
        return AsyncLocalClient(self._engine)

    async def __aexit__(self, *_: object) -> None:
        pass

    def __repr__(self) -> str:
        return f"<convgrad.LocalClient: {vars(self).get('_engine', 'not used yet')}>"


class AsyncLocalClient(AsyncClient):
    """An `AsyncClient` that computes in this process, on threads; made by ``async with local()``."""

    def __init__(self, engine: Engine) -> None:
        from convgrad._process import AsyncProcess

        BaseClient.__init__(self, AsyncProcess(engine))
        self._engine = engine

    def __repr__(self) -> str:
        return f"<convgrad.AsyncLocalClient: {self._engine}>"


def _load(threads: int, target: str | None, progress: bool | None, device: Device) -> Engine:
    """Load the packages that compute and the kernels, which are compiled if they are not yet."""
    if missing := [name for name in _NEEDS if find_spec(name) is None]:
        hint = install_hint("compute")
        raise ImportError(f"convgrad.local() computes in this process and needs {' and '.join(missing)}: {hint}")
    with _chosen(target):
        from engine.compiling import ready
        from engine.process import Engine

        engine = Engine(threads, device)
        if target not in (None, engine.target):
            raise ValueError(f"target {target} comes too late: this process has loaded the kernels for {engine.target}")
    shown = progress
    if shown is None:
        shown = sys.stderr is not None and (sys.stderr.isatty() or "ipykernel" in sys.modules)
    with ProgressBar(sys.stderr, "kernels") if shown else nullcontext() as bar:
        ready(None if bar is None else lambda done, total: bar.trying("compiling", done / total))
    return engine


@contextmanager
def _chosen(target: str | None) -> Iterator[None]:
    """Choose the target of this process while its kernels are imported; undo it if that fails."""
    before = os.environ.get(_TARGET)
    try:
        if target is not None:
            os.environ[_TARGET] = target
        yield
    except BaseException:
        os.environ.pop(_TARGET, None)
        if before is not None:
            os.environ[_TARGET] = before
        raise
