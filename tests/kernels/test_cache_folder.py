"""The folder for compiled kernels: writable, private, and filled from one that is read-only."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from numba.core import config

from kernels.emit.cache import cache_folder, choose_folder, folder_name, is_unpacked, pack, refused_folder
from kernels.gradient.tiles.driver import store


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An environment whose home and temporary folders belong to the test."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return {"HOME": str(tmp_path / "home")}


def make_unwritable(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the system report that a folder is not writable, as on a read-only root (even to the root user)."""
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != folder and access(path, mode))


def test_the_folder_that_is_chosen(environment: dict[str, str], tmp_path: Path) -> None:
    """It is NUMBA_CACHE_DIR, created if need be, else in the user's cache, or, without a home, a temporary one."""
    given = str(tmp_path / "a" / "b")
    assert choose_folder(environment | {"NUMBA_CACHE_DIR": given}) == Path(given, folder_name())
    assert Path(given, folder_name()).is_dir()
    assert choose_folder(environment) == tmp_path / "home" / ".cache" / "convgrad" / folder_name()
    (tmp_path / "file").write_text("not a folder", encoding="utf-8")
    no_home = environment | {"HOME": str(tmp_path / "file")}
    assert choose_folder(no_home) == tmp_path / f"convgrad-{os.getuid()}" / folder_name()


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777])
def test_a_folder_that_others_can_write_is_refused(environment: dict[str, str], tmp_path: Path, mode: int) -> None:
    """Files in the folder are executed: one that anybody or its group can write to is neither used nor copied."""
    given = tmp_path / "open"
    (given / folder_name()).mkdir(parents=True)
    (given / folder_name() / "kernel.nbc").write_bytes(b"not ours")
    given.chmod(mode)
    chosen = choose_folder(environment | {"NUMBA_CACHE_DIR": str(given)})
    assert chosen.parent != given
    assert not list(chosen.glob("*.nbc"))
    reason = refused_folder({"NUMBA_CACHE_DIR": str(given)})
    assert reason is not None
    assert f"{given} is not used" in reason
    assert f"has mode {mode:04o}" in reason


def test_all_folders_that_are_made_are_private(environment: dict[str, str], tmp_path: Path) -> None:
    """Also those above the cache, which could otherwise be replaced as a whole; the umask has no influence."""
    given = tmp_path / "a" / "b"
    before = os.umask(0o002)
    try:
        choose_folder(environment | {"NUMBA_CACHE_DIR": str(given)})
    finally:
        os.umask(before)
    assert {each.stat().st_mode & 0o777 for each in (given.parent, given, given / folder_name())} == {0o700}
    assert refused_folder({"NUMBA_CACHE_DIR": str(given)}) is None
    assert refused_folder({}) is None


@pytest.mark.parametrize("packed", [False, True])
def test_a_folder_that_can_only_be_read_is_copied(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packed: bool
) -> None:
    """Kernels of a read-only image are copied, from a folder or its archive, until all have been tested once."""
    given = tmp_path / "image"
    (given / folder_name() / "sub").mkdir(parents=True)
    (given / folder_name() / "sub" / "old").write_bytes(b"image")
    if packed:
        pack(str(given / folder_name()))
    make_unwritable(given, monkeypatch)
    cache = tmp_path / "home" / ".cache" / "convgrad" / folder_name()
    assert choose_folder(environment | {"NUMBA_CACHE_DIR": str(given)}) == cache
    assert (cache / "sub" / "old").read_bytes() == b"image"
    (cache / "sub" / "old").unlink()
    (cache / "verdict.json").touch()
    choose_folder(environment | {"NUMBA_CACHE_DIR": str(given)})
    assert not (cache / "sub" / "old").exists()


def test_an_archive_in_a_folder_that_can_be_written_is_unpacked_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The archive is kept. Only the first process trusts unpacked code: if it can't load it, the next one compiles."""
    folder = tmp_path / folder_name()
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "kernel").write_bytes(b"image")
    archive = pack(str(folder))
    assert not folder.exists()
    monkeypatch.setattr("kernels.emit.cache.cache_folder", lambda: str(folder))
    assert not is_unpacked()
    for unpacked in (True, False):
        assert choose_folder({"NUMBA_CACHE_DIR": str(tmp_path)}) == folder
        assert (folder / "sub" / "kernel").read_bytes() == b"image"
        assert is_unpacked() is unpacked
    assert archive.exists()


def test_functions_of_others_are_cached_where_theirs_are() -> None:
    """Numba's setting is the user's once the kernels are declared, and each kernel is cached in our folder."""
    assert vars(config)["CACHE_DIR"] == os.environ.get("NUMBA_CACHE_DIR", "")
    dispatcher: Any = store
    assert dispatcher.stats.cache_path.startswith(cache_folder())
