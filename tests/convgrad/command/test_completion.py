"""Completion of commands, flags and values, in a real bash."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from convgrad._cli import main
from convgrad._command.flags import COMMANDS, SHELLS
from convgrad._command.spec import ATTRIBUTES, OPERATIONS
from schemas.tables import OPERATIONS as TABLES

# As readline does: the words of the line and the index of the last one, which is being completed.
COMPLETE = """
source ./completion
complete -p convgrad >&2
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
_shtab_convgrad
printf '%s\\n' "${COMPREPLY[@]}"
"""

Complete = Callable[..., set[str]]


@pytest.fixture
def complete(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Complete:
    """Return what bash suggests for the last of some words, in a folder with the file layer.npy."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("needs bash")
    assert main(["completion", "bash"]) == 0
    (tmp_path / "completion").write_text(capsys.readouterr().out, encoding="utf-8")
    (tmp_path / "layer.npy").touch()

    def suggest(*words: str) -> set[str]:
        done = subprocess.run(
            [bash, "--norc", "-c", COMPLETE, "bash", "convgrad", *words],
            cwd=tmp_path, capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert "-F _shtab_convgrad convgrad" in done.stderr
        return set(done.stdout.split())

    return suggest


def test_bash_completes(complete: Complete) -> None:
    """Subcommands, flags, operations, attributes, choices and files are suggested."""
    assert complete("") >= {*COMMANDS, "serve", "keys"}
    assert complete("ver") == {"verify"}
    assert complete("run", "--ref") == {"--reference"}
    assert complete("run", "ConvT") == {name for name in OPERATIONS if name.startswith("ConvT")}
    assert complete("describe", "") >= set(OPERATIONS)
    assert complete("run", "Convolution", "--attr", "pads") == {"pads_begin=", "pads_end="}
    assert complete("run", "Convolution", "--dtype", "b") == {"bf16"}
    assert complete("run", "Convolution", "--src", "lay") == {"layer.npy"}
    assert complete("keys", "--c") == {"--calls"}
    assert complete("keys", "me", "--file", "lay") == {"layer.npy"}
    assert complete("completion", "") >= set(SHELLS)


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_has_its_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The script of each shell has the operations and attributes, and parses where the shell is installed."""
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for word in ("ConvTransposeBackwardWeights", "weights_format="):
        assert word in script
    if (program := shutil.which(shell)) is not None:
        subprocess.run([program, "-n"], input=script, text=True, check=True)


def test_the_words_are_those_of_the_tables() -> None:
    """The client suggests every operation and attribute of the service."""
    assert {operation.name for operation in TABLES} == set(OPERATIONS)
    assert {name for operation in TABLES for name in operation.attribute} == set(ATTRIBUTES)
