"""The folder for compiled kernels: writable, private, and filled from one that can only be read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from app.pool.code_cache import code_cache


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An environment whose home and temporary folder are the test's."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return {"HOME": str(tmp_path / "home")}


def make_unwritable(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the system say that a folder can't be written, as it does on a read-only root (also to root)."""
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != folder and access(path, mode))


def test_the_given_folder_is_taken(environment: dict[str, str], tmp_path: Path) -> None:
    """NUMBA_CACHE_DIR wins when it can be written; it is made when it is not there."""
    given = str(tmp_path / "a" / "b")
    assert code_cache(environment | {"NUMBA_CACHE_DIR": given}) == given
    assert Path(given).is_dir()


def test_without_a_setting_it_is_the_users_cache(environment: dict[str, str], tmp_path: Path) -> None:
    """Without NUMBA_CACHE_DIR kernels are kept in the user's cache folder."""
    assert code_cache(environment) == str(tmp_path / "home" / ".cache" / "convgrad")


def test_without_a_home_it_is_a_temporary_folder(environment: dict[str, str], tmp_path: Path) -> None:
    """A user without a home, as in a container, gets a folder below the temporary one."""
    (tmp_path / "home").write_text("not a folder", encoding="utf-8")
    assert code_cache(environment) == str(tmp_path / f"convgrad-numba-{os.getuid()}")


def test_a_folder_that_others_can_write_is_refused(environment: dict[str, str], tmp_path: Path) -> None:
    """What is in the folder gets executed: one that anybody can write to is neither used nor copied."""
    given = tmp_path / "open"
    given.mkdir()
    (given / "kernel.nbc").write_bytes(b"not ours")
    given.chmod(0o777)
    chosen = code_cache(environment | {"NUMBA_CACHE_DIR": str(given)})
    assert chosen != str(given)
    assert not list(Path(chosen).iterdir())


def test_a_folder_that_can_only_be_read_is_copied(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels of a read-only image are taken along; what was compiled since then stays."""
    given = tmp_path / "image"
    (given / "sub").mkdir(parents=True)
    (given / "sub" / "old").write_bytes(b"image")
    (given / "sub" / "new").write_bytes(b"image")
    make_unwritable(given, monkeypatch)
    cache = tmp_path / "home" / ".cache" / "convgrad"
    (cache / "sub").mkdir(parents=True)
    (cache / "sub" / "new").write_bytes(b"compiled since")
    assert code_cache(environment | {"NUMBA_CACHE_DIR": str(given)}) == str(cache)
    assert (cache / "sub" / "old").read_bytes() == b"image"
    assert (cache / "sub" / "new").read_bytes() == b"compiled since"
