"""API keys: the lines of the file, the key ring, the command that creates keys, and requests with and without one."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.http.keys import FREE_PAGES, Key, KeyRing, main, parse_keys
from app.settings import Settings
from tests.app.resident import Resident, resident_service
from tests.app.samples import CALL_PAGES, JSON, SMALL, SSE, digest, document, messages, post, read, same_bits, wait_for


def test_lines_are_read() -> None:
    """Comments and empty lines are skipped; a limit is optional."""
    text = f"# who\n\na {digest('1')}  # first\nb\t{digest('2')} calls=3\n"
    assert parse_keys(text) == (Key("a", hashlib.sha256(b"1").digest()), Key("b", hashlib.sha256(b"2").digest(), 3))
    assert parse_keys(f"a {digest('1')}; b {digest('2')} calls=3") == parse_keys(text)


@pytest.mark.parametrize(
    "line",
    [
        "name",
        "name secret-in-the-clear",
        f"- {digest('1')}",
        f"na/me {digest('1')}",
        f"a {digest('1')} calls=0",
        f"a {digest('1')} x=1 y=2",
    ],
)
def test_a_wrong_line_is_named_and_not_shown(line: str) -> None:
    """The error has the line's number, but nothing of its content."""
    with pytest.raises(ValueError, match=r"^line 2\b") as caught:
        parse_keys(f"# comment\n{line}")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("lines", [f"a {digest('1')};a {digest('2')}", f"a {digest('1')};b {digest('1')}"])
def test_names_and_keys_are_unique(lines: str) -> None:
    """Two lines with the same name, or the same key under two names, are an error."""
    with pytest.raises(ValueError, match="two keys"):
        parse_keys(lines)


def test_only_the_right_key_is_found() -> None:
    """Only the exact text of a key finds it; nothing else does, however long or strange."""
    ring = KeyRing(text=f"a {digest('right')};b {digest('other')}")
    found = ring.find("right")
    assert found is not None
    assert found.name == "a"
    for wrong in ("", "righ", "right ", digest("right"), "r" * 5000, "\udcff"):
        assert ring.find(wrong) is None


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    """A new line takes effect without a restart; a broken or missing file changes nothing."""
    path = tmp_path / "keys"
    path.write_text(f"a {digest('1')}\n")
    ring = KeyRing(file=path)
    assert ring.find("2") is None
    path.write_text(f"a {digest('1')}\nb {digest('2')}\n")
    wait_for(lambda: ring.find("2") is not None)
    path.write_text("broken\n")
    assert ring.find("2") is not None
    path.unlink()
    assert ring.find("2") is not None
    path.write_text(f"b {digest('2')}\n")
    wait_for(lambda: ring.find("1") is None)
    assert ring.find("2") is not None


@pytest.mark.parametrize("text", ["", "\n", "# a comment\n"])
def test_a_file_without_keys_locks_nobody_out(tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    """At the start it is refused with what is needed; when it is emptied later, the keys stay and the log says so."""
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"there is no key.*: convgrad keys NAME --file {path} creates one"):
        KeyRing(file=path)
    path.write_text(f"a {digest('1')}\n")
    ring = KeyRing(file=path)
    path.write_text(text)
    wait_for(lambda: bool(ring.find("1") and caplog.messages))
    assert ring.find("1") is not None
    assert "can't be reloaded, the previous ones stay valid: there is no key" in caplog.messages[0]
    assert len(KeyRing(file=path, text=f"b {digest('2')}")) == 1


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    """A file that is no text, or far too large, ends with a line that shows nothing of it."""
    path = tmp_path / "keys"
    path.write_bytes(b"a sha256:\xff")
    with pytest.raises(ValueError, match="byte 9 is not UTF-8: is this a key file"):
        KeyRing(file=path)
    with pytest.raises(ValueError, match="a key file may have 1 MiB"):
        KeyRing(file=Path("/dev/zero"))


def test_the_command_creates_a_key_and_its_line() -> None:
    """The printed line belongs to the printed key and does not contain it."""
    command = [sys.executable, "-m", "convgrad", "keys", "team-a", "--calls", "4"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    secret = done.stderr.strip().rpartition(" ")[2]
    assert secret not in done.stdout
    found = KeyRing(text=done.stdout).find(secret)
    assert found is not None
    assert (found.name, found.calls) == ("team-a", 4)


def test_the_command_reads_a_key_from_stdin(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --stdin the line is for the given key; a guessable key is rejected."""
    monkeypatch.setattr("sys.stdin", io.StringIO("a-key-of-my-own-making\n"))
    assert main(["me", "--stdin"]) == 0
    assert KeyRing(text=capsys.readouterr().out).find("a-key-of-my-own-making") is not None
    for wrong in ("short", "two words of my own making", "schlüssel-von-mir-selbst"):
        monkeypatch.setattr("sys.stdin", io.StringIO(f"{wrong}\n"))
        assert main(["me", "--stdin"]) == 2
        assert wrong not in capsys.readouterr().err


def test_the_command_adds_to_a_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Lines are added to the file, also through a link and after a line without an end; its mode and owner are kept."""
    path, link = tmp_path / "keys", tmp_path / "link"
    link.symlink_to(path)
    assert main(["a", "--file", str(link)]) == 0
    path.write_text(f"# comment\n{path.read_text().strip()}")
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o640)
    owner = (10001, 10001) if os.getuid() == 0 else (os.getuid(), os.getgid())
    os.chown(path, *owner)
    assert main(["b", "--calls", "2", "--file", str(path)]) == 0
    out, err = capfd.readouterr()
    assert not out
    ring = KeyRing(file=path)
    found = [ring.find(line.rpartition(" ")[2]) for line in err.splitlines()]
    assert [(key.name, key.calls) for key in found if key] == [("a", None), ("b", 2)]
    assert link.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o640
    assert (path.stat().st_uid, path.stat().st_gid) == owner
    assert sorted(tmp_path.iterdir()) == [path, link]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["a"], "two keys have the same name"),
        (["na/me"], "NAME must not be -, and must have 1 to 64 letters"),
        (["-"], "NAME must not be -"),
        (["b", "--calls", "0"], "--calls must be from 1 to 999999, but is 0"),
        (["b", "--file", "none/keys"], "none"),
        (["b", "--file", "broken"], "broken: line 1 does not have the form"),
    ],
)
def test_a_failed_command_changes_nothing(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    reason: str,
) -> None:
    """The exit code is 2, no file is made or changed, and no key is shown."""
    monkeypatch.chdir(tmp_path)
    files = {"keys": f"a {digest('1')}\n", "broken": "junk\n"}
    for name, text in files.items():
        Path(name).write_text(text)
    assert main(["--file", "keys", *arguments]) == 2
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == files
    err = capfd.readouterr().err
    assert reason in err
    assert "shown only once" not in err


def test_reloading_the_file_keeps_the_keys_of_the_text(tmp_path: Path) -> None:
    """The keys of the environment stay valid when the file changes; one with the same name in the file is refused."""
    path = tmp_path / "keys"
    path.write_text(f"a {digest('1')}\n")
    ring = KeyRing(file=path, text=f"fixed {digest('0')}")
    path.write_text(f"b {digest('2')}\n")
    wait_for(lambda: ring.find("2") is not None)
    assert ring.find("0") is not None
    assert ring.find("1") is None
    path.write_text(f"fixed {digest('3')}\n")
    with pytest.raises(ValueError, match="the same name"):
        KeyRing(file=path, text=f"fixed {digest('0')}")


KEY = "cg_the-key-of-this-test"
APIS = [
    ("POST", CALL_PAGES[0]), ("POST", CALL_PAGES[2]), ("GET", "/v1/ops"), ("GET", "/v2"), ("GET", "/nowhere"),
    ("GET", "/v2/models/stats"), ("GET", "/healthz/"), ("GET", "/rpc/"),
]  # fmt: skip


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Resident, Path]]:
    """A service with a key file."""
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text(f"tester {digest(KEY)}\n")
    with resident_service(workers=1, keys_file=path) as resident:
        yield resident, path


@pytest.fixture
def http(locked: tuple[Resident, Path]) -> Iterator[httpx.Client]:
    """A client for that service without a key."""
    with httpx.Client(base_url=locked[0].url, timeout=60) as client:
        yield client


@pytest.mark.parametrize(("method", "path"), APIS)
@pytest.mark.parametrize("headers", [{}, {"x-api-key": "wrong"}, {"authorization": f"Basic {KEY}"}])
def test_requests_without_a_key_are_refused(
    http: httpx.Client, method: str, path: str, headers: dict[str, str]
) -> None:
    """Every page of every API is 401 without a valid key, even one that does not exist."""
    reply = http.request(method, path, headers=headers)
    assert reply.status_code == 401
    assert reply.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("path", sorted(FREE_PAGES - {"/docs/oauth2-redirect"}))
def test_pages_that_need_no_key(http: httpx.Client, path: str) -> None:
    """Health, metrics and the static pages need no key."""
    assert http.get(path).status_code == 200


@pytest.mark.parametrize(
    "headers", [{"authorization": f"Bearer {KEY}"}, {"authorization": f"bearer  {KEY}"}, {"x-api-key": KEY}]
)
def test_the_right_key_opens_every_api(http: httpx.Client, headers: dict[str, str]) -> None:
    """With the key, in either header, calls are answered."""
    http.headers.update(headers)
    inputs = SMALL.inputs()
    assert same_bits(read(post(http, SMALL, inputs)), SMALL.expected(inputs))
    call = {"jsonrpc": "2.0", "id": 7, "method": "ops.describe", "params": {"op": SMALL.op}}
    assert "result" in http.post("/rpc", json=call).json()
    assert http.get("/v2/models/ConvTranspose").status_code == 200


def rpc(http: httpx.Client, method: str, params: Any) -> dict[str, Any]:
    """Call a method; return the answer."""
    reply = http.post("/rpc", json={"jsonrpc": "2.0", "id": "mine", "method": method, "params": params})
    assert reply.status_code == 200
    found: dict[str, Any] = reply.json()
    return found


def test_json_rpc_reports_it_under_the_id(http: httpx.Client) -> None:
    """The JSON-RPC API answers -32005 with the request's id, for every method, even an unknown one."""
    for method in (SMALL.op, "ops.list", "nothing"):
        reply = rpc(http, method, None)
        assert (reply["id"], reply["error"]["code"]) == ("mine", -32005)
        assert reply["error"]["data"]["reason"] == "no_key"


@pytest.mark.parametrize("accept", [JSON, SSE])
@pytest.mark.parametrize("item", [1, {"jsonrpc": "2.0", "id": 1, "method": "ops.list"}])
def test_a_batch_without_a_key_gets_one_error(http: httpx.Client, item: object, accept: str) -> None:
    """A batch without a valid key, however many requests are in it and whatever they are, gets one error."""
    reply = http.post("/rpc", json=[item] * 80, headers={"accept": accept})
    (found,) = messages(reply.text) if accept == SSE else [reply.json()]
    assert (found["id"], found["error"]["code"]) == (None, -32005)
    assert found["error"]["data"]["reason"] == "no_key"


def test_tensors_without_a_valid_key_are_not_read(http: httpx.Client) -> None:
    """A large body without a key is rejected before it is read, and its id is not known then."""
    params = document(SMALL, SMALL.inputs()) | {"more": "x" * 70_000}
    reply = rpc(http, SMALL.op, params)
    assert (reply["id"], reply["error"]["code"]) == (None, -32005)


def test_keys_change_without_a_restart(locked: tuple[Resident, Path], http: httpx.Client) -> None:
    """A key that is added to the file works, and one that is removed stops working."""
    _, path = locked
    before = path.read_text()
    path.write_text(f"{before}second {digest('the-second-key')}\n")
    wait_for(lambda: http.get("/v1/ops", headers={"x-api-key": "the-second-key"}).status_code == 200)
    path.write_text(before)
    wait_for(lambda: http.get("/v1/ops", headers={"x-api-key": "the-second-key"}).status_code == 401)
    assert http.get("/v1/ops", headers={"x-api-key": KEY}).status_code == 200


def test_public_addresses_need_a_setting() -> None:
    """Without keys the service listens on loopback addresses only, unless the operator sets `public`."""
    for host in ("127.0.0.1", "127.8.0.1", "localhost", "::1"):
        Settings(host=host)
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.org"):
        with pytest.raises(ValueError, match="public"):
            Settings(host=host)
        Settings(host=host, public=True)
        Settings(host=host, keys="x")  # type: ignore[arg-type]
