"""The project's rules, checked on the syntax trees: which package imports which, and what no file may contain."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("app", "engine", "kernels", "schemas", "verify", "convgrad")
FOLDERS = (*PACKAGES, "tests", "benchmarks", "examples")

# Which packages may be imported, ours and third-party; `app` may use every server dependency.
OURS = {
    "app": {"engine", "schemas", "kernels", "verify", "convgrad"},
    "engine": {"schemas", "kernels", "verify", "convgrad"}, "schemas": {"convgrad"}, "verify": {"kernels"},
    "kernels": set(), "convgrad": {"engine"},
}  # fmt: skip
# The packages of the service, from the routes down: each imports only those after it.
LAYERS = ("api", "http", "replies", "calls", "intake", "cluster", "pool", "telemetry")
OUTSIDE = {
    "engine": {"numpy", "ml_dtypes", "cryptography"},
    "schemas": {"pydantic", "pydantic_core"},
    "verify": {"numpy", "ml_dtypes"},
    "kernels": {"numpy", "numba", "llvmlite", "torch", "triton"},
    # matplotlib only where a report is drawn, cryptography where one is signed, pytest in the fixture, frameworks and
    # mcp (with pydantic) in the modules of their names
    "convgrad": {
        "numpy",
        "httpx",
        "ml_dtypes",
        "shtab",
        "matplotlib",
        "cryptography",
        "pytest",
        "torch",
        "jax",
        "mcp",
        "mcp_types",
        "pydantic",
    },
}
# The import names of distributions where they differ, and what those are guaranteed to install.
IMPORT_NAMES = {
    "ml-dtypes": {"ml_dtypes"}, "pydantic": {"pydantic", "pydantic_core"}, "numba": {"numba", "llvmlite"},
    "fastapi": {"fastapi", "starlette"}, "httpx": {"httpx", "httpcore", "anyio"},
    "uvicorn": {"uvicorn", "h11", "click"}, "mcp": {"mcp", "mcp_types"},
}  # fmt: skip
FRAMEWORKS = ("torch", "jax")
GPU = "kernels.gpu"
"""The package of kernels in Triton, whose tensors are PyTorch's; its functions are not Numba's."""
MCP = ("convgrad._mcp", "app.api.tools")
"""The modules of the Model Context Protocol, which are imported only where its package is installed."""
JIT = {"jit", "inlined", "njit", "vectorize", "guvectorize", "cfunc", "stencil"}


@cache
def modules() -> dict[str, ast.Module]:
    """Return every module of the project by dotted name."""
    return {name: ast.parse(path.read_text(encoding="utf-8"), str(path)) for name, path in paths().items()}


@cache
def paths() -> dict[str, Path]:
    """Return every Python file of the project by dotted module name."""
    found = {}
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(module: str, *, eager: bool = False) -> Iterator[str]:
    """Yield the absolute dotted names that `module` imports; `eager`: only those imported along with it."""
    is_package = paths()[module].name == "__init__.py"

    def walk(node: ast.AST) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if eager and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                continue
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                if not eager:
                    yield from walk(child)
                continue
            if isinstance(child, ast.Import):
                yield from (alias.name for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                yield from from_names(child)
            yield from walk(child)

    def from_names(node: ast.ImportFrom) -> Iterator[str]:
        base = node.module or ""
        if node.level:
            above = module.split(".")[: None if is_package and node.level == 1 else (is_package - node.level)]
            base = ".".join([*above, base]).strip(".")
        # `from package import module` depends on that module; `from module import name` on `module` itself
        for alias in node.names:
            inner = f"{base}.{alias.name}"
            yield inner if inner in paths() else base

    yield from walk(modules()[module])


def calls(module: str) -> Iterator[tuple[str, ast.Call]]:
    """Yield each call in `module` with the last part of the name that is called."""
    for node in ast.walk(modules()[module]):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func).rpartition(".")[2], node


def is_compiled(node: ast.AST) -> bool:
    """Return whether Numba compiles a function, judging by the names of its decorators."""
    decorators = getattr(node, "decorator_list", [])
    return any(set(re.findall(r"\w+", ast.unparse(d))) & JIT for d in decorators if ast.unparse(d) != "triton.jit")


def of(package: str) -> list[str]:
    """Return the modules of one package."""
    return [name for name in paths() if name.split(".")[0] == package]


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_between_the_rooms_go_one_way(package: str) -> None:
    """A package imports only those below it: app -> engine -> verify, schemas, kernels; schemas -> convgrad."""
    rooms = {"tests", "benchmarks", "examples", *PACKAGES} - {package} - OURS[package]
    crossed = {f"{m} imports {i}" for m in of(package) for i in imports(m) if i.split(".")[0] in rooms}
    assert not crossed


def test_imports_between_the_packages_of_the_service_go_one_way() -> None:
    """The routes know the server, which knows replies, calls, intake and pool; none knows those above it."""
    crossed = set()
    for module in of("app"):
        for name in imports(module):
            mine, other = [*module.split("."), ""][1], [*name.split("."), ""][1]
            if name.startswith("app.") and {mine, other} <= {*LAYERS} and LAYERS.index(mine) > LAYERS.index(other):
                crossed.add(f"{module} imports {name}")
    assert not crossed


def test_schemas_know_only_the_error_tree_and_the_dtypes_of_convgrad() -> None:
    """From convgrad the schemas import the errors and the dtype table, nothing of the client."""
    taken = {i for m in of("schemas") for i in imports(m) if i.split(".")[0] == "convgrad"}
    assert taken <= {"convgrad._errors", "convgrad._dtypes"}


@pytest.mark.parametrize("package", sorted(OUTSIDE))
def test_outside_packages_of_a_room(package: str) -> None:
    """Schemas, kernels and the client import the standard library and the few packages they are allowed."""
    known = sys.stdlib_module_names | OUTSIDE[package] | OURS[package] | {package}
    strangers = {f"{m} imports {i}" for m in of(package) for i in imports(m) if i.split(".")[0] not in known}
    assert not strangers


def test_every_outside_package_is_declared() -> None:
    """Every import of the client and the server is declared in pyproject.toml, not installed by accident."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    client = project["dependencies"]
    optional = project["optional-dependencies"]
    lazy = {name for extra in ("ray", "otel", "plot", "mcp") for line in optional[extra] for name in import_names(line)}
    lazy -= {"convgrad"}
    assert {name for extra in FRAMEWORKS for line in optional[extra] for name in import_names(line)} == {*FRAMEWORKS}
    serves = client + [line for extra in ("sign", "compute", "server", "gpu") for line in optional[extra]]
    declared = {name for line in serves for name in import_names(line)} | lazy | {*FRAMEWORKS}
    known = sys.stdlib_module_names | declared | set(PACKAGES)
    strangers = {f"{m} imports {i}" for p in PACKAGES for m in of(p) for i in imports(m)
                 if i.split(".")[0] not in known}  # fmt: skip
    assert strangers == {"convgrad._pytest imports pytest"}, "pytest imports its plugin"
    others = [m for p in ("app", "convgrad") for m in of(p) if not m.startswith(MCP)]
    eager = {i for m in others for i in imports(m, eager=True) if i.split(".")[0] in lazy or i.startswith(MCP)}
    assert not eager, "an optional package is imported only where it is used"


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_frameworks_are_imported_in_one_module(framework: str) -> None:
    """Only `convgrad.torch` imports PyTorch, and only `convgrad.jax` JAX; nothing else imports these two."""
    own = f"convgrad.{framework}"
    users = {
        m
        for p in PACKAGES
        for m in of(p)
        for i in imports(m)
        if not m.startswith(GPU) and (i.split(".")[0] == framework or i.startswith(own))
    }
    assert users
    assert {user for user in users if not f"{user}.".startswith(f"{own}.")} == set()


def test_triton_is_imported_only_for_a_gpu() -> None:
    """Only kernels for GPUs import Triton, and nothing else imports them, or PyTorch, before a GPU was chosen."""
    light = {f"{GPU}.unit", f"{GPU}.device", f"{GPU}.tables", f"{GPU}.configurations"}
    others = [m for p in PACKAGES for m in of(p) if m in light or not m.startswith(GPU)]
    assert not {m for m in others for i in imports(m) if i.split(".")[0] == "triton"}
    assert not {
        f"{m}: {i}" for m in others for i in imports(m, eager=True) if i.startswith(f"{GPU}.") and i not in light
    }


def import_names(requirement: str) -> set[str]:
    """Return the names that one requirement makes importable."""
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match, requirement
    name = match[0].lower()
    return IMPORT_NAMES.get(name, {name.replace("-", "_")}) | {name.split("-")[0]}


def test_no_import_cycles() -> None:
    """No module imports itself through any chain; in the service and the kernels not even inside functions."""
    strict = {*of("app"), *of("engine"), *of("kernels"), *of("schemas"), *of("verify")}
    graph = {m: {i for i in imports(m, eager=m not in strict) if i in paths() and i != m} for m in paths()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_the_oracle_knows_only_numpy() -> None:
    """The oracle is independent of what it checks: it imports NumPy (with its bfloat16), none of our packages."""
    names = {i.split(".")[0] for i in imports("tests.naive")}
    assert names <= {"numpy", "ml_dtypes", *sys.stdlib_module_names}


def test_forbidden_calls_and_imports() -> None:
    """No Numba threads, no pickled arrays, no evaluated text, and no middleware that hides disconnects."""
    found = []
    for module in (m for p in PACKAGES for m in of(p)):
        for name, call in calls(module):
            found += [
                f"{module}: {k.arg}=True"
                for k in call.keywords
                if k.arg in {"parallel", "allow_pickle", "shell"} and ast.unparse(k.value) == "True"
            ]
            # the kernels evaluate only their own text, at import; the other packages handle text from outside
            evaluates = name == "literal_eval" or ast.unparse(call.func) in {"eval", "exec"}
            if name == "prange" or (evaluates and not module.startswith("kernels.")):
                found.append(f"{module}: {name}()")
        names = {n.id for n in ast.walk(modules()[module]) if isinstance(n, ast.Name)}
        found += [f"{module}: {n}" for n in names & {"BaseHTTPMiddleware", "prange"}]
    assert not found


def test_the_client_and_the_schemas_never_pickle() -> None:
    """Code that reads bytes from outside can't load a pickle: it imports no module that does."""
    picklers = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
    readers = {m for p in PACKAGES if p != "app" for m in of(p)}
    assert not {m for m in readers if picklers & set(imports(m))}


def test_compiler_flags_come_from_one_module() -> None:
    """Only one module sets Numba's flags; a kernel that forgot `cache` or `nogil` would stall the service."""
    literal = set()
    for module in of("kernels"):
        decorators = [d for n in ast.walk(modules()[module]) for d in getattr(n, "decorator_list", [])]
        ours = "kernels.emit.compiler" in imports(module)
        if not ours and any(
            not isinstance(d, ast.Call) and ast.unparse(d).rpartition(".")[2] in JIT and ast.unparse(d) != "triton.jit"
            for d in decorators
        ):
            literal.add(f"{module} (a bare decorator)")
        for name, call in calls(module):
            if name in JIT and any(k.arg is not None for k in call.keywords):
                literal.add(module)
    assert len(literal) <= 1, literal


def test_python_calls_no_function_that_only_compiled_code_can() -> None:
    """A compiled function with an underscore, or one that is `inlined`, has no entry for Python: a call would crash."""
    callbacks = {"_pack_boxes"}  # compiled, but by no decorator
    functions = [
        (module, node)
        for package in ("kernels", "benchmarks")
        for module in of(package)
        for node in ast.walk(modules()[module])
        if isinstance(node, ast.FunctionDef)
    ]
    private, inlined, wrong = set(), set(), set()
    for module, node in functions:
        decorators = {ast.unparse(each) for each in node.decorator_list}
        if node.name.startswith("_") and decorators & {"jit", "inlined"}:
            private.add((module, node.name))
        elif "inlined" in decorators:
            inlined.add(node.name)
    for module, node in functions:
        if not is_compiled(node) and node.name not in callbacks:
            names = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
            wrong |= {f"{module}: {name}" for name in names if name in inlined or (module, name) in private}
    assert private
    assert inlined
    assert not wrong


def test_compiled_functions_do_not_validate() -> None:
    """Everything is checked before the kernels run: no compiled function raises."""
    raising = {
        f"{m}:{node.lineno}"
        for m in of("kernels")
        for node in ast.walk(modules()[m])
        if isinstance(node, ast.FunctionDef) and is_compiled(node)
        if any(isinstance(inner, ast.Raise) for inner in ast.walk(node))
    }
    assert not raising


def test_async_lives_in_the_service_and_the_async_clients() -> None:
    """Schemas and kernels are plain functions; in convgrad only the clients have coroutines."""
    names = ["_async_client", "_base", "_blocking", "_http", "_jobs", "_local", "_process", "_stream"]
    names += ["_mcp.local", "_mcp.server", "_mcp.tools"]
    clients = {*of("app"), *(f"convgrad.{name}" for name in names)}
    quiet = [m for p in PACKAGES for m in of(p) if m not in clients]
    assert not {m for m in quiet if any(isinstance(n, ast.AsyncFunctionDef) for n in ast.walk(modules()[m]))}


def test_files_stay_short() -> None:
    """Files have one purpose: none is longer than 500 lines."""
    lengths = {m: len(p.read_text(encoding="utf-8").splitlines()) for m, p in paths().items()}
    assert not {m: n for m, n in lengths.items() if n > 500}


def test_no_test_file_imports_another() -> None:
    """What several test files share stands in a module that has no tests, so that each file can move or go."""
    found = {
        f"{m}: {node.module}"
        for m in of("tests")
        for node in ast.walk(modules()[m])
        if isinstance(node, ast.ImportFrom) and re.match(r"tests\.(\w+\.)*test_", node.module or "")
    }
    assert not found
