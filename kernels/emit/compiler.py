"""Compiler flags in one place, and the list of everything that warming up must compile.

No `parallel`: parallelism is units over processes. No fast-math: sums are formed in the order that is written, and
Inf and NaN carry meaning. `error_model="numpy"` leaves out the checks for division by zero.

The processor and the features that the compiler may emit for are those of the target, as is the choice of paths.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from inspect import Parameter, Signature
from types import CodeType
from typing import Any, ClassVar, Protocol, TypeVar, overload

import llvmlite.binding as llvm
import numba
import numpy as np
import numpy.typing as npt
from numba import types
from numba.core import config
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.core.compiler_lock import global_compiler_lock
from numba.extending import intrinsic

from kernels.cache import CACHE
from kernels.emit.cache import cache_folder
from kernels.target import host_arch, host_features, target

__all__ = [
    "ENTRIES",
    "Doubles",
    "Entry",
    "Floats",
    "Halves",
    "Record",
    "Records",
    "Rows",
    "Table",
    "Vector",
    "emitted",
    "emitted_entry",
    "inlined",
    "jit",
    "needs",
    "numbers",
    "row_of",
    "together",
    "values_of",
]

F = TypeVar("F", bound=Callable[..., Any])
N = TypeVar("N", bound=tuple[Any, ...])
R = TypeVar("R", covariant=True)


@dataclass(frozen=True)
class Entry:
    """One compiled function: `make` compiles it, or loads it from the cache; `function` is its source, if any."""

    name: str
    make: Callable[[], object]
    function: Callable[..., Any] | None = None


ENTRIES: list[Entry] = []
"""Everything that is compiled."""

# Code generation may rewrite the sum that an address is: one summand becomes a pointer, the others its index. Numba
# optimises such code once more where a caller has it inside. A summand that is zero there is null, nothing can lie at
# an index of null, and what is read or written there is left out. So sums stay integers.
llvm.set_option("", "-addr-sink-using-gep=false")

_HERE = target().compiles and target().arch == host_arch()

if _HERE:  # for all code of the process: Numba has one compiler
    vars(config).update(CPU_NAME=target().cpu, CPU_FEATURES=target().llvm_features(host_features()[1]))


_DECLARING = threading.RLock()  # threads may declare functions at the same time, and Numba has one setting

if hasattr(os, "register_at_fork"):  # a fork waits until no thread holds one: in the child it would hold it for ever
    for _lock in (CACHE.lock, global_compiler_lock, _DECLARING):  # the last is acquired first, as elsewhere
        os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


@contextmanager
def _cached_here() -> Iterator[None]:
    """Cache the functions that are declared in this block in our folder, and those of others where they are cached."""
    with _DECLARING:
        before = vars(config)["CACHE_DIR"]
        try:
            if _HERE:
                vars(config)["CACHE_DIR"] = cache_folder()
            yield
        finally:
            vars(config)["CACHE_DIR"] = before


Records = npt.NDArray[np.void]
Vector = npt.NDArray[np.int64]
Table = npt.NDArray[np.int64]
Doubles = npt.NDArray[np.float64]
Floats = npt.NDArray[np.float32]
Halves = npt.NDArray[np.uint16]

_NUMBA: dict[str, Any] = {
    "bool": types.boolean,
    "int": types.int64,
    "float": types.float32,
    "Vector": types.int64[::1],
    "Table": types.int64[:, ::1],
    "Doubles": types.float64[::1],
    "Floats": types.float32[::1],
    "Halves": types.uint16[::1],
}
"""What an annotation means to the compiler; each `Record` adds two."""

_FIELDS: dict[str, Any] = {"int": np.int64, "bool": np.bool_, "Vector": np.int64}
"""What a field's annotation means to NumPy; each `Record` adds one."""


class Rows(Protocol[R]):
    """A table of records: a structured array."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Count the records."""

    @property
    def ctypes(self) -> Any:
        """Return the address of the first."""

    @overload
    def __getitem__(self, at: int, /) -> R: ...
    @overload
    def __getitem__(self, at: slice, /) -> Rows[R]: ...


class Record:
    """A row of a table whose columns have names, for NumPy and compiled code alike.

    A subclass lists its fields: integers, bools, other records, and a `Vector` of so many `numbers`. Compiled
    functions take a row, ``Slab``, or a table, ``Rows[Slab]``. A row is an address: it lasts no longer than its table,
    and a table that a compiled function makes itself no longer than the last use of its name.
    """

    dtype: ClassVar[np.dtype[np.void]]

    def __init_subclass__(cls) -> None:
        """Lay the fields out, and make both annotations known; a name means one record in all modules."""
        assert cls.__name__ not in _NUMBA, cls
        fields = []
        for name, annotation in cls.__annotations__.items():
            count = vars(cls).get(name)
            fields.append((name, _FIELDS[annotation], *([(count,)] if count else [])))
        cls.dtype = _FIELDS[cls.__name__] = np.dtype(fields, align=True)
        _NUMBA[cls.__name__] = row = numba.from_dtype(cls.dtype)
        _NUMBA[f"Rows[{cls.__name__}]"] = types.Array(row, 1, "C")


def together(kind: type[N]) -> type[N]:
    """Let compiled functions take and make a `NamedTuple`: one parameter for what belongs together.

    Its fields mean what parameters mean. Each look at a field that is an array counts references to it, atomically:
    inner loops take arrays themselves.
    """
    fields = [_NUMBA[each.__forward_arg__] for each in kind.__annotations__.values()]
    _NUMBA[kind.__name__] = types.BaseTuple.from_types(fields, kind)
    return kind


def numbers(count: int) -> Any:
    """Declare that a field of a `Record` is a vector of `count` integers."""
    return count


def row_of(kind: type[Record], /, **values: Any) -> Records:
    """Return a table of one record: each field by its name, a record by its `values_of`."""
    return np.array([values_of(kind, **values)], kind.dtype)


def values_of(kind: type[Record], /, **values: Any) -> tuple[Any, ...]:
    """Return the values of a record inside another one: each field by its name."""
    assert values.keys() == kind.__annotations__.keys(), kind
    return tuple(map(values.__getitem__, kind.__annotations__))


class _InlinedLibrary(JITCodeLibrary):
    """Optimise code once, where Numba does so function by function, then twice as a whole: a third of all the time."""

    def _optimize_functions(self, module: Any) -> None:
        module.data_layout = self._codegen._data_layout

    def _optimize_final_module(self) -> None:
        passes, builder = self._codegen._module_pass_manager()
        passes.run(self._final_module, builder)


class _Library(_InlinedLibrary):
    """Cache machine code alone: no caller links the bitcode, which is several times as long."""

    def serialize_using_object_code(self) -> tuple[str, str, tuple[bytes, bytes]]:
        """Return name, kind, and the code with bitcode that only lists the functions which are found by their names."""
        self._ensure_finalized()
        names = [each.name for each in self._final_module.functions if not each.is_declaration]
        text = "".join(f'define void @"{name}"() {{ ret void }}\n' for name in names)
        return self.name, "object", (self._get_compiled_object(), llvm.parse_assembly(text).as_bitcode())


class _EmittedLibrary(_Library):
    """Tidy up code that we emit as it is to run: all other passes would take a seventh of the time and gain nothing."""

    def _optimize_final_module(self) -> None:
        passes, builder = llvm.create_new_module_pass_manager(), self._codegen._pass_builder()
        passes.add_instruction_combine_pass()
        passes.run(self._final_module, builder)


class _InlinedPipeline(Compiler):
    """Name a function's symbol by its module, its name and its signature, and so equally in every process.

    Numba would add a count: what a process compiles again, callers in the cache would not find. It would also cache the
    source annotated with types, a page for each line.
    """

    library: type[JITCodeLibrary] = _InlinedLibrary

    def _compile_bytecode(self) -> Any:
        state = self.state
        state.func_id.unique_id = 0
        state.library = self.library(state.targetctx.codegen(), state.func_id.func_qualname)
        state.library.enable_object_caching()
        return super()._compile_bytecode()._replace(type_annotation="")


class _Pipeline(_InlinedPipeline):
    """Do so for a function that callers refer to by its symbol."""

    library = _Library


class _EmittedPipeline(_InlinedPipeline):
    """Do so for an emitted function."""

    library = _EmittedLibrary


def jit(function: F) -> F:
    """Compile for the one signature that the annotations say, cached on disk, without the GIL.

    Callers convert what they pass: Numba would compile a function anew for each constant and each unsigned address.
    Nothing is ever compiled for a call: addresses, counts and steps are int64, arrays and records those of `_NUMBA`. An
    array of which only the address is used further on is freed at once: take its `address_of` where it is used.

    A function is compiled once: compiled callers refer to it by its symbol. One whose name begins with an underscore is
    for them alone, Python can't call it.
    """
    return _compiled(function, inlined=False)


def inlined(function: F) -> F:
    """Compile a small function as `jit` does, but into each of its compiled callers, which alone can call it."""
    return _compiled(function, inlined=True)


def _compiled(function: F, *, inlined: bool) -> F:
    arguments = tuple(_NUMBA[kind] for name, kind in function.__annotations__.items() if name != "return")
    # C calls nothing but emitted entries, and Python few functions: an entry for either takes time to compile
    options: Any = {"no_cfunc_wrapper": True, "no_cpython_wrapper": inlined or function.__name__.startswith("_")}
    options |= {"error_model": "numpy", "boundscheck": False}
    options["pipeline_class"] = _InlinedPipeline if inlined else _Pipeline
    with _cached_here():
        dispatcher: Any = numba.njit(nogil=True, cache=True, **options)(function)
    compile_anew, context = dispatcher.compile, dispatcher.targetctx

    def make(_: object = None) -> Any:
        if arguments in dispatcher.overloads:
            return dispatcher.overloads[arguments].entry_point
        _make_called(function)
        entry = compile_anew(arguments)
        if not inlined:  # a caller declares the symbol, and links no code
            context.remove_user_function(entry)
            context.insert_user_function(entry, dispatcher.overloads[arguments].fndesc)
        return entry

    dispatcher.compile = make
    ENTRIES.append(Entry(_full_name(function), make, function))
    return dispatcher  # type: ignore[no-any-return]


def _make_called(function: Callable[..., Any]) -> None:
    """Make the functions that one names ready: its code, where it comes from the cache, is linked to theirs."""
    for dispatcher in _named(function):
        dispatcher.compile(())


def emitted(emit: Callable[..., Any], result: Any = types.void) -> Any:
    """Make a Numba intrinsic of ``emit(builder, *values)``, which emits LLVM IR and gives the `result`, if any.

    Floats are f32, all other arguments int64. (A sum of signed and unsigned integers is a float64: an address is signed
    where it comes from `kernels.emit.intrinsics.address_of`.)
    """

    def typer(*given: Any) -> Any:
        # Numba reads it after this call, and matches values with parameters one by one
        names = (Parameter(f"value{number}", Parameter.POSITIONAL_OR_KEYWORD) for number in range(len(given)))
        vars(typer)["__signature__"] = Signature(list(names))
        return result(*(types.float32 if isinstance(each, types.Float) else types.int64 for each in given[1:])), codegen

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        value = emit(builder, *values)
        if isinstance(value, tuple):
            return context.make_tuple(builder, signature.return_type, value)
        return context.get_dummy_value() if value is None else value

    return intrinsic(typer)


def emitted_entry(name: str, emit: Callable[..., None], count: int) -> Callable[[], int]:
    """List ``emit(builder, *values)`` for compiling, as a C callback of `count` int64; return what gives its address.

    It is cached on disk by its `name`. The function that calls `emit` comes from source, because Numba does not find
    closures in its cache.
    """

    @cache
    def make() -> Any:
        values = ", ".join(f"value{number}" for number in range(count))
        space: dict[str, Any] = {"__name__": __name__, "emit": emitted(emit)}
        text = f"def _{name}({values}):\n    emit({values})\n"
        exec(compile(text, __file__, "exec"), space)  # noqa: S102 -- our own text
        signature = types.void(*[types.int64] * count)
        with _cached_here():
            return numba.cfunc(signature, cache=True, pipeline_class=_EmittedPipeline)(space[f"_{name}"])

    ENTRIES.append(Entry(name, make))
    return lambda: int(make().address)


def needs(entries: list[Entry]) -> list[set[int]]:
    """Give, for each entry, the places of those that its source names: they are compiled first."""
    places = {id(entry.function): place for place, entry in enumerate(entries) if entry.function is not None}
    found = []
    for entry in entries:
        named = _named(entry.function) if entry.function is not None else ()
        found.append({places[id(each.py_func)] for each in named if id(each.py_func) in places})
    return found


def _named(function: Callable[..., Any]) -> Iterator[Any]:
    """Return the compiled functions that a function's source names."""

    def names(code: CodeType) -> Iterator[str]:
        yield from code.co_names
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                yield from names(constant)

    code: Any = function.__code__
    space: Any = function.__globals__
    for name in names(code):
        if hasattr(space.get(name), "py_func"):
            yield space[name]


def _full_name(function: Callable[..., Any]) -> str:
    return f"{function.__module__.removeprefix('kernels.')}.{function.__qualname__}"
