"""The first things a newcomer runs: the scripts, the two container files and the README that names them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = sorted(path for path in (ROOT / "scripts").iterdir() if path.is_file())
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")])
BASH = shutil.which("bash")


@pytest.mark.parametrize("script", [*SCRIPTS, ROOT / ".ci" / "run"], ids=lambda path: path.name)
def test_scripts_are_runnable(script: Path) -> None:
    """Each script is executable, parses, and stops at the first error."""
    assert os.access(script, os.X_OK)
    text = script.read_text(encoding="utf-8")
    assert text.startswith("#!/usr/bin/env bash\n# ")
    assert "\nset -euo pipefail\n" in text
    if BASH:
        subprocess.run([BASH, "-n", script], check=True)


def test_ci_runs_what_people_run() -> None:
    """CI calls the scripts that developers call, and runs every test."""
    lines = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    called = [re.split(" >| &&", line)[0] for line in lines if line.startswith("scripts/")]
    assert called == ["scripts/setup dev", "scripts/test-web --skip", "scripts/check", "scripts/test --all"]


@pytest.mark.skipif(BASH is None, reason="needs bash")
def test_setup_says_which_python_it_needs(tmp_path: Path) -> None:
    """Without a recent enough Python, setup says what is missing and leaves nothing behind."""
    assert BASH
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("dirname", "cksum"):
        found = shutil.which(name)
        assert found
        (tools / name).symlink_to(found)
    (tools / "python3").write_text("#!/bin/sh\necho 'Python 3.9.2'\nexit 1\n", encoding="utf-8")
    (tools / "python3").chmod(0o755)
    env = {"PATH": str(tools), "CONVGRAD_VENV": str(tmp_path / "venv")}
    done = subprocess.run([BASH, ROOT / "scripts" / "setup"], env=env, capture_output=True, text=True)
    assert done.returncode == 1
    assert "Python 3.11 or newer" in done.stderr
    assert "Python 3.9.2" in done.stderr
    assert not (tmp_path / "venv").exists()


@pytest.mark.skipif(BASH is None, reason="needs bash")
def test_setup_keeps_an_up_to_date_environment(tmp_path: Path) -> None:
    """An environment made from these exact files is left alone, without using the network or pip."""
    assert BASH
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").write_text('#!/bin/sh\n[ "$1" = -c ]\n', encoding="utf-8")
    (venv / "bin" / "python").chmod(0o755)
    command = [
        "cksum",
        "pyproject.toml",
        *(f"requirements/{name}.txt" for name in ("build", "dev", "docs", "ray", "server")),
    ]
    sums = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    (venv / ".has-dev").write_text(sums, encoding="utf-8")
    for extra in ("dev", "docs", "server"):
        env = {**os.environ, "CONVGRAD_VENV": str(venv)}
        done = subprocess.run([BASH, ROOT / "scripts" / "setup", extra], env=env, capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_scripts_install_extras_that_exist() -> None:
    """Every extra that a script installs is defined in pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = {extra for path in SCRIPTS for extra in re.findall(r"scripts/setup (\w+)", path.read_text("utf-8"))}
    assert asked - {"EXTRA"} <= set(project["optional-dependencies"])


def test_the_readme_names_the_two_commands() -> None:
    """The README begins with how to start the service and how to run the tests."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "scripts/serve" in text
    assert "scripts/test" in text


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_resolve(page: Path) -> None:
    """Every relative link in a page and every script that it names exists."""
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) + re.findall(r"<img[^>]+src=\"([^\"]+)\"", text)
    local = [link for link in links if not re.match(r"[a-z]+:", link)]
    missing = [link for link in local if not (page.parent / link).exists()]
    missing += [name for name in re.findall(r"\bscripts/[\w-]+", text) if not (ROOT / name).exists()]
    assert not missing


def test_every_dependency_has_its_reason() -> None:
    """CONTRIBUTING says what each package in pyproject.toml is used for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    names = {re.split(r"[\[<>=;~! ]", line)[0] for line in lines} - {"convgrad"}
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert not {name for name in names if f"**{name}**" not in page}


def test_the_image_follows_its_rules() -> None:
    """The image runs as its own user, checks its health without a shell, and needs no external BuildKit frontend."""
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    assert not lines[0].startswith("# syntax=")
    assert "USER 10001" in lines  # Kubernetes' runAsNonRoot needs a number
    assert not [line for line in lines if "--chown" in line]  # only root's code is run by every user
    health = next(line for line in lines if line.startswith("HEALTHCHECK"))
    assert 'CMD ["python"' in health
    bases = [line for line in lines if "PYTHON_IMAGE" in line and not line.startswith("#")]  # a digest can be given
    assert bases == ["ARG PYTHON_IMAGE=python:3.12-slim", "FROM ${PYTHON_IMAGE} AS server", "FROM ${PYTHON_IMAGE}"]


def test_compose_locks_the_container_down() -> None:
    """Compose sets a read-only root, limits, a restart policy, and a port on the loopback address only."""
    text = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
    for rule in ("read_only: true", "tmpfs:", "shm_size:", "mem_limit:", "pids_limit:", "cap_drop: [ALL]",
                 "no-new-privileges:true", "restart:", "healthcheck:", "127.0.0.1:8000"):  # fmt: skip
        assert rule in text, rule
