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
EXTRAS = set(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"])


@pytest.mark.parametrize("script", [*SCRIPTS, ROOT / ".ci" / "run"], ids=lambda path: path.name)
def test_scripts_are_runnable(script: Path) -> None:
    """Each script is executable, parses, stops at the first error, and installs extras that pyproject.toml defines."""
    assert os.access(script, os.X_OK)
    text = script.read_text(encoding="utf-8")
    assert text.startswith("#!/usr/bin/env bash\n# ")
    assert "\nset -euo pipefail\n" in text
    assert {*re.findall(r"scripts/setup (\w+)", text)} - {"EXTRA"} <= EXTRAS
    if BASH:
        subprocess.run([BASH, "-n", script], check=True)


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


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_resolve(page: Path) -> None:
    """Every relative link in a page and every script that it names exists."""
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) + re.findall(r"<img[^>]+src=\"([^\"]+)\"", text)
    local = [link for link in links if not re.match(r"[a-z]+:", link)]
    missing = [link for link in local if not (page.parent / link).exists()]
    missing += [name for name in re.findall(r"\bscripts/[\w-]+", text) if not (ROOT / name).exists()]
    assert not missing


def test_the_image_follows_its_rules() -> None:
    """The image runs as its own user, and needs no external BuildKit frontend."""
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    assert not lines[0].startswith("# syntax=")
    assert "USER 10001" in lines  # Kubernetes' runAsNonRoot needs a number
    assert not [line for line in lines if "--chown" in line]  # only root's code is run by every user
    bases = [line for line in lines if "PYTHON_IMAGE" in line and not line.startswith("#")]  # a digest can be given
    assert bases == ["ARG PYTHON_IMAGE=python:3.12-slim", "FROM ${PYTHON_IMAGE} AS server", "FROM ${PYTHON_IMAGE}"]
