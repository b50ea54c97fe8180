"""Record calls of compiled kernels, and build the image that replays them on an emulated processor.

    record.py calls OUT COUNT SEED    run problems here on imitated instructions and write each call's memory
    record.py objects FOLDER          compile the same functions for Sapphire Rapids, with a table of them in C

The two run in separate processes, because the path is chosen when the kernels are imported.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Callable, Iterator
from itertools import chain
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


class _Recorder:
    """Replaces a compiled function and records the memory before and after each of its calls."""

    def __init__(self, out: Any, index: dict[str, int], watched: Callable[[], list[Any]]) -> None:
        self.out, self.index, self.watched, self.calls = out, index, watched, 0

    def wrap(self, name: str, function: Any) -> Callable[..., Any]:
        """Return a function that records `function` and calls it."""

        def call(*arguments: Any) -> Any:
            arrays = [np.zeros(8, np.int64)]
            words = [arrays[0].ctypes.data, arrays[0].ctypes.data + 32]  # where Numba writes its result and its error
            for value in arguments:
                if isinstance(value, np.ndarray):
                    arrays.append(value)
                    words += [0, 0, value.size, value.itemsize, value.ctypes.data, *value.shape, *value.strides]
                else:
                    words.append(int(value) % (1 << 64))
            callbacks = [place for array in arrays for place in _callbacks(array)]
            spans = _spans([*arrays, *self.watched()], callbacks)
            before = [ctypes.string_at(start, size) for start, size in spans]
            result = function(*arguments)
            assert result is None or isinstance(result, (int, bool)), name
            self._write(name, words, spans, before, callbacks)
            return result

        return call

    def _write(
        self, name: str, words: list[int], spans: list[tuple[int, int]], before: list[bytes], callbacks: list[int]
    ) -> None:
        self.calls += 1
        self.out.write(struct.pack("<QQ", self.index[name], len(words)))
        self.out.write(b"".join(struct.pack("<Q", word % (1 << 64)) for word in words))
        tables = [(table.ctypes.data, table.nbytes, kind) for kind, table in enumerate(_tables(), 1)]
        tables += [(place, 8, len(tables) + 1) for place in callbacks]
        self.out.write(struct.pack("<Q", len(spans) + len(tables)))
        for (start, size), old in zip(spans, before, strict=True):
            pad = b"\0" * (-size % 8)
            self.out.write(struct.pack("<QQQ", start, size, 0) + old + pad + ctypes.string_at(start, size) + pad)
        for table in tables:
            self.out.write(struct.pack("<QQQ", *table))


def _tables() -> list[Any]:
    from kernels.emit.dots import dot_table
    from kernels.emit.tile_table import tile_table

    return [tile_table(), dot_table()]


def _callbacks(array: Any) -> list[int]:
    """Return the addresses of the words with a `kernels.pack.pairs.packer` address in a table of records."""
    if "packer" not in (array.dtype.names or ()):
        return []
    first = array["packer"]
    return [first.ctypes.data + i * first.strides[0] for i in range(len(first))]


def _spans(arrays: list[Any], holes: list[int]) -> list[tuple[int, int]]:
    """Return the memory of arrays as disjoint spans, without tables of tiles or parts of them, and words in `holes`."""
    ends = [(array.ctypes.data, array.ctypes.data + array.nbytes) for array in arrays]
    tables = [(table.ctypes.data, table.ctypes.data + table.nbytes) for table in _tables()]
    found: list[tuple[int, int]] = []
    for start, end in sorted(set(ends)):
        if any(low <= start < high for low, high in tables):
            continue
        if found and start <= sum(found[-1]):
            found[-1] = (found[-1][0], max(end, sum(found[-1])) - found[-1][0])
        elif end > start:
            found.append((start, end - start))
    for hole in holes:
        at, (start, size) = next((i, span) for i, span in enumerate(found) if span[0] <= hole < sum(span))
        parts = (start, hole - start), (hole + 8, start + size - hole - 8)
        found[at : at + 1] = [part for part in parts if part[1]]
    return found


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
        for name, function in _functions().items():
            for module in [m for n, m in sys.modules.items() if n.startswith("kernels.")]:
                for key, value in list(vars(module).items()):
                    if value is function:
                        setattr(module, key, recorder.wrap(name, function))
        rng = np.random.default_rng(seed + 1)
        for case in _cases(count, seed):
            problem, inputs = problem_of(case), case.floats() if rng.random() < 0.5 else case.inputs()
            tensor = next(iter(inputs.values())).reshape(-1)
            if rng.random() < 0.2 and tensor.size:
                tensor[rng.integers(tensor.size)] = rng.choice([np.inf, -np.inf, np.nan])
            arena._local.held.clear()
            arena._local.marks.clear()
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


def objects(folder: Path, path: str) -> None:
    """Compile everything for the emulated processor; write the object files and their table."""
    functions = _functions()
    from kernels import warmup
    from kernels.emit import dots
    from kernels.emit import tile_table as tiles
    from kernels.pack.pairs import compiled_packer
    from kernels.target import target

    assert (target().dots, target().lanes) == (path, 16), target()
    list(warmup())
    symbols, number = [], 0

    def write(library: Any) -> None:
        nonlocal number
        _, _, (code, _) = library.serialize_using_object_code()
        (folder / f"k{number}.o").write_bytes(code)
        number += 1

    for function in functions.values():
        (compiled,) = function.overloads.values()  # `jit` compiles for one signature
        write(compiled.library)
        symbols.append(compiled.fndesc.llvm_func_name)
    rows = {(kind, count): tiles._tile(kind, count) for kind, count in tiles.tile_entries()}
    columns = tiles.LANE_ROWS + tiles.LINES_KEPT + 1
    entries = [rows.get(divmod(place, columns)) for place in range((5 + len(tiles.DIRECT)) * columns)]
    table = [[entry._wrapper_name if entry else "0" for entry in entries]]
    table.append([dots._entry(e)._wrapper_name if e in dots.USED else "0" for e in range(dots.ENTRIES)])
    packer = compiled_packer()
    table.append([packer._wrapper_name])
    for cfunc in [*rows.values(), *(dots._entry(entry) for entry in sorted(dots.USED)), packer]:
        write(cfunc._library)
    _write_table(folder / "table.c", list(functions), symbols, table)


def _write_table(path: Path, names: list[str], symbols: list[str], tables: list[list[str]]) -> None:
    known = [symbol for symbol in chain(symbols, *tables) if symbol != "0"]
    alias = {symbol: f"f{i}" for i, symbol in enumerate(known)}
    lines = [f'extern char {alias[symbol]}[] __asm__("{symbol}");' for symbol in known]
    refer = {"0": "0", **{symbol: f"(unsigned long){name}" for symbol, name in alias.items()}}
    lines.append(f"const unsigned long functions[] = {{{', '.join(refer[s] for s in symbols)}}};")
    quoted = ", ".join(f'"{name}"' for name in names)
    lines.append(f"const char *const names[] = {{{quoted}}};")
    for i, table in enumerate(tables):
        lines.append(f"static const unsigned long table{i}[] = {{{', '.join(refer[s] for s in table)}}};")
    lines.append(f"const unsigned long *const tables[] = {{{', '.join(f'table{i}' for i in range(len(tables)))}}};")
    path.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    command, place, *rest = sys.argv[1:]
    if command == "calls":
        record(Path(place), int(rest[0]), int(rest[1]))
    else:
        objects(Path(place), rest[0])
