"""Record calls of compiled kernels, and build the image that replays them on an emulated processor.

    record.py calls OUT COUNT SEED    run problems here on imitated instructions and write each call's memory
    record.py objects FOLDER PATH FEATURES    compile the same functions for Sapphire Rapids, with a table of them in C

The two run in separate processes, because the path is chosen when the kernels are imported.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def _functions() -> dict[str, Any]:
    """Return every compiled function of the kernels by name."""
    from numba.core.registry import CPUDispatcher

    import kernels.registry  # noqa: F401 -- imports all of them

    found = {}
    for name, module in sorted(sys.modules.items()):
        if name.startswith("kernels."):
            for value in vars(module).values():
                if isinstance(value, CPUDispatcher):
                    found[f"{value.py_func.__module__}.{value.py_func.__name__}"] = value
    return dict(sorted(found.items()))


def _callbacks() -> dict[str, Any]:
    """Return every function that compiled code calls by its address, by name."""
    from kernels.emit.compiler import ENTRIES

    made = {entry.name: entry.make() for entry in ENTRIES}
    return {name: compiled for name, compiled in made.items() if hasattr(compiled, "address")}


class _Recorder:
    """Replaces a compiled function and records the memory before and after each of its calls."""

    def __init__(self, out: Any, index: dict[str, int], watched: Callable[[], list[Any]]) -> None:
        self.out, self.index, self.watched, self.calls = out, index, watched, 0
        addresses = [compiled.address for compiled in _callbacks().values()]
        self.number = {address: number for number, address in enumerate(addresses)}
        self.addresses = np.array(addresses, np.uint64)

    def wrap(self, name: str, function: Any) -> Callable[..., Any]:
        """Return a function that records `function` and calls it."""

        def call(*arguments: Any) -> Any:
            arrays = [np.zeros(8, np.int64)]
            words = [arrays[0].ctypes.data, arrays[0].ctypes.data + 32]  # where Numba writes its result and its error
            for value in _flat(arguments):
                if isinstance(value, np.ndarray):
                    arrays.append(value)
                    words += [0, 0, value.size, value.itemsize, value.ctypes.data, *value.shape, *value.strides]
                else:
                    assert isinstance(value, (int, np.integer)), name
                    assert value not in self.number, name
                    words.append(int(value) % (1 << 64))
            spans = [piece for span in _spans([*arrays, *self.watched()]) for piece in self._pieces(*span)]
            before = [ctypes.string_at(start, size) for start, size, _ in spans]
            result = function(*arguments)
            assert result is None or isinstance(result, (int, bool)), name
            arrays[0][0] = int(result or 0)
            self._write(name, words, spans, before)
            return result

        return call

    def _pieces(self, start: int, size: int) -> Iterator[tuple[int, int, int]]:
        """Cut memory at the addresses of callbacks: give start, size and kind of each piece.

        The emulated side has these functions elsewhere: it fills in their addresses by the kind.
        """
        first = start + -start % 8
        words = np.frombuffer(ctypes.string_at(first, max(0, start + size - first) // 8 * 8), np.uint64)
        for at in np.flatnonzero(np.isin(words, self.addresses)).tolist():
            place = first + 8 * at
            if start < place:
                yield start, place - start, 0
            yield place, 8, 1 + self.number[int(words[at])]
            size, start = start + size - place - 8, place + 8
        if size:
            yield start, size, 0

    def _write(self, name: str, words: list[int], spans: list[tuple[int, int, int]], before: list[bytes]) -> None:
        self.calls += 1
        self.out.write(struct.pack("<QQ", self.index[name], len(words)))
        self.out.write(b"".join(struct.pack("<Q", word % (1 << 64)) for word in words))
        self.out.write(struct.pack("<Q", len(spans)))
        for (start, size, kind), old in zip(spans, before, strict=True):
            self.out.write(struct.pack("<QQQ", start, size, kind))
            if not kind:
                pad = b"\0" * (-size % 8)
                self.out.write(old + pad + ctypes.string_at(start, size) + pad)


def _flat(arguments: Iterable[Any]) -> Iterator[Any]:
    """Yield arguments as compiled code gets them: those of a tuple one by one."""
    for value in arguments:
        yield from _flat(value) if isinstance(value, tuple) else [value]


def _spans(arrays: list[Any]) -> list[tuple[int, int]]:
    """Return the memory of arrays as disjoint spans."""
    spans: list[tuple[int, int]] = []
    for start, end in sorted({(array.ctypes.data, array.ctypes.data + array.nbytes) for array in arrays}):
        if spans and start <= sum(spans[-1]):
            spans[-1] = (spans[-1][0], max(end, sum(spans[-1])) - spans[-1][0])
        elif end > start:
            spans.append((start, end - start))
    return spans


def _cases(count: int, seed: int) -> Iterator[Any]:
    from tests.problems import random_case

    rng = np.random.default_rng(seed)
    for _ in range(count):
        yield random_case(rng, macs=int(rng.choice([30_000, 30_000, 30_000, 500_000])))


def record(path: Path, count: int, seed: int) -> None:
    """Run random problems, some with Inf and NaN, and write their calls."""
    from kernels import arena, plan, run_unit, storage_dtype, warmup
    from tests.kernels.harness import problem_of, stored

    list(warmup())
    index = {name: i for i, name in enumerate(_functions())}
    inside: list[Any] = []
    with path.open("wb") as out:
        out.write(struct.pack("<Q", 0))
        recorder = _Recorder(out, index, lambda: [*inside, *(array for array, _ in arena._local.held.values())])

        def address(array: Any) -> int:
            """Return the address of an array, whose memory is recorded from now on."""
            inside.append(array)
            return find(array)

        def hold(name: str, floats: int) -> Any:
            """Return scratch memory that begins with zeros: sums of rows that nobody reads would overflow otherwise."""
            before, found = arena._local.held.get(name), made(name, floats)
            if before is not found:
                found[0][...] = 0
            return found

        find, made = arena.address, arena._hold
        _replace(find, address)
        _replace(made, hold)
        for name, function in _functions().items():
            _replace(function, recorder.wrap(name, function))
        rng = np.random.default_rng(seed + 1)
        for case in _cases(count, seed):
            problem, inputs = problem_of(case), case.floats() if rng.random() < 0.5 else case.inputs()
            tensor = next(iter(inputs.values())).reshape(-1)
            if rng.random() < 0.2 and tensor.size:
                tensor[rng.integers(tensor.size)] = rng.choice([np.inf, -np.inf, np.nan])
            arena._local.held.clear()
            chosen = plan(problem, workers=int(rng.integers(1, 4)))
            tensors = [stored(tensor) for tensor in inputs.values()]
            output = np.zeros(problem.output_shape, storage_dtype(problem.dtype))
            scratch = np.zeros(chosen.scratch_bytes, np.uint8)
            inside[:] = [*tensors, output, scratch]
            for unit in chosen.units:
                run_unit(chosen, unit, tensors, output, scratch)
        out.seek(0)
        out.write(struct.pack("<Q", recorder.calls))
    sys.stdout.write(f"{recorder.calls} calls recorded, {path.stat().st_size >> 20} MB\n")


def _replace(function: Any, other: Any) -> None:
    """Let all modules of the kernels call another function."""
    for module in [module for name, module in sys.modules.items() if name.startswith("kernels.")]:
        for key, value in list(vars(module).items()):
            if value is function:
                setattr(module, key, other)


def objects(folder: Path, path: str, features: str) -> None:
    """Compile everything for the emulated processor, with LLVM's features; write the object files and their table."""
    from numba.core import codegen

    generator: Any = codegen.JITCPUCodegen  # exists as soon as the kernels are imported
    generator._customize_tm_features = lambda _: features
    functions = _functions()
    from kernels import warmup
    from kernels.target import target

    assert (target().dots, target().lanes) == (path, 16), target()
    list(warmup())
    callbacks = _callbacks().values()
    # `jit` compiles for one signature
    compiled = [next(iter(function.overloads.values())) for function in functions.values()]
    libraries = [*(each.library for each in compiled), *(each._library for each in callbacks)]
    for number, library in enumerate(libraries):
        _, _, (code, _) = library.serialize_using_object_code()
        (folder / f"k{number}.o").write_bytes(code)
    symbols = [each.fndesc.llvm_func_name for each in compiled]
    _write_table(folder / "table.c", list(functions), symbols, [each._wrapper_name for each in callbacks])


def _write_table(path: Path, names: list[str], functions: list[str], callbacks: list[str]) -> None:
    alias = {symbol: f"f{number}" for number, symbol in enumerate(dict.fromkeys([*functions, *callbacks]))}
    lines = [f'extern char {name}[] __asm__("{symbol}");' for symbol, name in alias.items()]
    for table, symbols in (("functions", functions), ("callbacks", callbacks)):
        addresses = ", ".join(f"(unsigned long){alias[symbol]}" for symbol in symbols)
        lines.append(f"const unsigned long {table}[] = {{{addresses}}};")
    quoted = ", ".join(f'"{name}"' for name in names)
    lines.append(f"const char *const names[] = {{{quoted}}};")
    path.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    command, place, *rest = sys.argv[1:]
    if command == "calls":
        record(Path(place), int(rest[0]), int(rest[1]))
    else:
        objects(Path(place), *rest)
