"""The wheel that people install: the client, typed, and the service as its data; and the source distribution."""

from __future__ import annotations

import ast
import hashlib
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import numpy as np
import pytest

import convgrad
from kernels.target import NAME, REFERENCE
from tests.live import listening

pytestmark = pytest.mark.heavy

ROOT = Path(__file__).resolve().parent.parent
SERVICE = ("app", "engine", "kernels", "schemas", "verify")
# The packages of the service that a client does without.
HEAVY = ("fastapi", "llvmlite", "numba", "pydantic", "starlette", "uvicorn")


def build(folder: Path, *kinds: str) -> dict[str, Path]:
    """Build wheel and source distribution with scripts/build's command; return them by their suffix."""
    targets = [word for kind in kinds for word in ("-t", kind)]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": "1700000000"}
    command = [sys.executable, "-m", "hatchling", "build", *targets, "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    return {path.suffix: path for path in folder.iterdir()}


@pytest.fixture(scope="module")
def wheel_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel as built by `pip wheel .`."""
    return build(tmp_path_factory.mktemp("wheel"), "wheel")[".whl"]


@pytest.fixture
def wheel(wheel_file: Path) -> zipfile.ZipFile:
    """The contents of the wheel."""
    return zipfile.ZipFile(wheel_file)


@pytest.fixture(scope="module")
def installed(wheel_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with the wheel; the packages that it needs are those of the environment of the tests."""
    folder = tmp_path_factory.mktemp("installed") / "venv"
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index"]
    subprocess.run([*install, str(wheel_file)], check=True, capture_output=True, env=plain_environment())
    (packages,) = folder.glob("lib/python*/site-packages")
    # A .pth of the tests' environment, such as that of this checkout, has no effect from here.
    paths = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    (packages / "others.pth").write_text("\n".join(paths), encoding="utf-8")
    return python


def plain_environment() -> dict[str, str]:
    """The environment without what points to this checkout."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}


def run_python(python: Path, code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a line of Python in an environment, in a folder."""
    command = [str(python), "-c", code]
    return subprocess.run(command, cwd=folder, env=plain_environment(), capture_output=True, text=True, check=False)


def test_the_contents_of_the_wheel(wheel: zipfile.ZipFile) -> None:
    """Only `convgrad`, typed, becomes importable; every file of the service is in it, in one package, and no other."""
    names = set(wheel.namelist())
    top = {name.split("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {"convgrad"}
    assert "convgrad/py.typed" in names
    own = [path for name in SERVICE for path in (ROOT / name).rglob("*") if path.is_file() and path.suffix != ".pyc"]
    carried = {name for name in names if name.startswith("convgrad/_service/")}
    expected = {f"convgrad/_service/{path.relative_to(ROOT).as_posix()}" for path in own}
    assert carried == {"convgrad/_service/__init__.py", *expected}


def test_the_wheel_says_what_it_needs(wheel: zipfile.ZipFile) -> None:
    """The light client needs NumPy, httpx, ml_dtypes and shtab; everything else is an extra."""
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = Parser().parsestr(wheel.read(name).decode())
    required = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert sorted(line.split(">=")[0] for line in required) == ["httpx", "ml-dtypes", "numpy", "shtab"]
    assert (metadata["Version"], metadata["License-Expression"]) == (convgrad.__version__, "Apache-2.0")


def test_builds_are_reproducible(tmp_path: Path) -> None:
    """Built twice, wheel and source distribution have the same bytes."""
    first, second = (build(tmp_path / name, "sdist", "wheel") for name in ("first", "second"))
    assert set(first) == {".gz", ".whl"}
    for kind, path in first.items():
        assert hashlib.sha256(path.read_bytes()).digest() == hashlib.sha256(second[kind].read_bytes()).digest(), kind


def test_the_client_is_light(installed: Path, tmp_path: Path) -> None:
    """Without the packages of the service, the client and the command can be imported.

    The service has no names of its own, and a local client names what computes and the extra.
    """
    without = f"import sys; sys.modules.update(dict.fromkeys({HEAVY}))"
    code = f"""{without}; import convgrad._cli, importlib.util as util
print([name for name in {SERVICE} if util.find_spec(name)], flush=True)
convgrad.local().open()"""
    done = run_python(installed, code, tmp_path)
    assert done.stdout == "[]\n", done.stderr
    needs = "convgrad.local() computes in this process and needs numba and pydantic: pip install '.[compute]'"
    assert f"ImportError: {needs}" in done.stderr


def test_the_wheel_computes_in_the_process(installed: Path, tmp_path: Path) -> None:
    """A script needs only the wheel, beside other packages of the names of ours, and its `sys.path` is untouched."""
    for name in SERVICE:
        (tmp_path / f"{name}.py").write_text(f"whose = 'a stranger called {name}'\n", encoding="utf-8")
    code = (
        f"import sys, {', '.join(SERVICE)}\n"
        "import convgrad, numpy\n"
        "before, ones = list(sys.path), numpy.ones((1, 2, 3, 4), 'f4')\n"
        "with convgrad.local(threads=1) as client:\n"
        "    found = client.run('BiasAddBackward', {'diff_dst': ones}, {'data_format': 'NCX'})\n"
        "    passed = client.verify('BiasAddBackward', {'diff_dst': ones}, found, {'data_format': 'NCX'}).passed\n"
        "print(found, passed, sys.path == before, kernels.whose)"
    )
    # NumPy's own arithmetic: compiling all kernels for another path of the sources takes half a minute of a processor.
    environment = {**plain_environment(), NAME: REFERENCE.name}
    command = [str(installed), "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "[12. 12.] True True a stranger called kernels\n", done.stderr


def test_every_import_of_the_service_is_renamed(wheel: zipfile.ZipFile) -> None:
    """In the wheel no module imports a package of ours by its name in the checkout, at any place of its code."""
    for name in wheel.namelist():
        if name.endswith(".py"):
            for node in ast.walk(ast.parse(wheel.read(name))):
                modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                modules += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
                assert not {module.partition(".")[0] for module in modules} & {*SERVICE}, name


def test_the_wheel_creates_keys(installed: Path, tmp_path: Path) -> None:
    """`convgrad keys` of the wheel adds a key to a file."""
    command = [str(installed.with_name("convgrad")), "keys", "team-a", "--file", "keys"]
    done = subprocess.run(command, cwd=tmp_path, env=plain_environment(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert (tmp_path / "keys").read_text(encoding="utf-8").startswith("team-a sha256:")


def test_the_wheel_serves(installed: Path, tmp_path: Path) -> None:
    """`convgrad serve` of the wheel computes a call, from a folder that has nothing in it, and leaves nothing there."""
    folder = tmp_path / "empty"
    folder.mkdir()
    # NumPy's own arithmetic: compiling all kernels for another path of the sources takes half a minute of a processor.
    environment = {**plain_environment(), NAME: REFERENCE.name, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [str(installed.with_name("convgrad")), "serve", "--port", "0"]
    src, diff_dst = np.array([[[1, 2, 3]]], np.float32), np.ones((1, 1, 2), np.float32)
    attributes = {"strides": [1], "dilations": [1], "pads_begin": [0], "pads_end": [0], "weights_shape": [1, 1, 2]}
    attributes |= {"data_format": "NCX", "weights_format": "OIX"}  # type: ignore[dict-item]
    with listening(command, cwd=folder, environment=environment) as service, convgrad.Client(service.url) as client:
        found = client.run("ConvolutionBackwardWeights", {"src": src, "diff_dst": diff_dst}, attributes)
    assert found.tolist() == [[[3, 5]]]
    assert not list(folder.iterdir())
