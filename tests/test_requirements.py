"""The locked versions in requirements/ are up to date, complete, and installed everywhere."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import NormalizedName, canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS: dict[str, list[str]] = PYPROJECT["project"]["optional-dependencies"]
LOCKS = ("build", "dev", "docs", "ray", "server")


@dataclass(frozen=True)
class Pin:
    """One entry of a lock file: its line, how many hashes it has, and what requires it."""

    line: str
    hashes: int
    via: str

    @property
    def name(self) -> NormalizedName:
        """Return its normalized name."""
        return canonicalize_name(Requirement(self.line).name)


def text(lock: str) -> str:
    """Return the text of a lock file."""
    return (ROOT / "requirements" / f"{lock}.txt").read_text(encoding="utf-8")


def pins(lock: str) -> list[Pin]:
    """Return the entries of a lock file."""
    entries = re.findall(
        r"^(\w.*?) \\\n((?: {4}--hash=sha256:[0-9a-f]{64}(?: \\)?\n)*) {4}# via (.*)$", text(lock), re.MULTILINE
    )
    return [Pin(line, hashes.count("--hash="), via) for line, hashes, via in entries]


def asked(lock: str) -> list[Requirement]:
    """Return the requirements in pyproject.toml from which a lock file is made."""
    if lock == "build":
        return [Requirement(line) for line in PYPROJECT["dependency-groups"]["build"]]
    found: list[Requirement] = []
    waiting = [*PYPROJECT["project"]["dependencies"], *EXTRAS[lock]]
    while waiting:
        requirement = Requirement(waiting.pop())
        if requirement.name == "convgrad":
            waiting += [line for extra in requirement.extras for line in EXTRAS[extra]]
        else:
            found.append(requirement)
    return found


@pytest.mark.parametrize("lock", LOCKS)
def test_the_lock_holds_what_pyproject_asks_for(lock: str) -> None:
    """Every requirement is locked within its range, and nothing else is a direct one; `scripts/lock` ensures this."""
    wanted = {canonicalize_name(requirement.name): requirement.specifier for requirement in asked(lock)}
    direct = [pin for pin in pins(lock) if "convgrad (pyproject.toml" in pin.via]
    assert {pin.name for pin in direct} == wanted.keys()
    versions = [(pin.name, str(Requirement(pin.line).specifier).removeprefix("==")) for pin in direct]
    assert not [(name, version) for name, version in versions if not wanted[name].contains(version, prereleases=True)]


@pytest.mark.parametrize("lock", LOCKS)
def test_every_version_is_exact_and_has_hashes(lock: str) -> None:
    """Each entry is one version with the hashes of its files, and no line names an index or a URL."""
    entries = pins(lock)
    assert len(entries) == len(re.findall(r"^\w", text(lock), re.MULTILINE))
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+( ; .+)?", pin.line) and pin.hashes for pin in entries)
    assert not re.search(r"://|^-|\s/", text(lock), re.MULTILINE)


def test_the_locks_agree() -> None:
    """A package in two lock files has the same version in both; those whose internals we use have upper bounds."""
    bounds = {requirement.name: str(requirement.specifier) for requirement in asked("server")}
    assert "<" in bounds["uvicorn"]
    assert "<" in bounds["numba"]
    dev = {pin.line for pin in pins("dev")}
    assert {pin.line for pin in pins("server")} <= dev
    # Fewer packages need the same ones on fewer systems, so only their versions are the same.
    assert {pin.line.partition(" ;")[0] for pin in pins("docs")} <= {line.partition(" ;")[0] for line in dev}
    assert {pin.line for pin in pins("build")} - dev == {pin.line for pin in pins("build") if pin.name == "editables"}


def test_setup_and_image_install_the_lock() -> None:
    """Neither installs a dependency without its hash, or lets pip choose versions for a build."""
    for name in ("scripts/setup", "Dockerfile"):
        script = (ROOT / name).read_text(encoding="utf-8").replace("\\\n", " ")
        installs = [
            line for part in script.splitlines() for line in part.split("&&") if re.search(r"install\b.* -r ", line)
        ]
        assert installs, name
        assert all("--require-hashes" in line for line in installs), name
        assert "--no-build-isolation" in script, name
    assert "!requirements" in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
