"""Settings, and the limits that a container imposes."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ByteSize

from app.settings import Settings, many_workers, read_settings, unknown_variables
from convgrad._command.exits import UsageError
from engine.container import cpu_count, free_memory, memory_bytes
from kernels.target import NAME


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """CONVGRAD_* variables are read: sizes with units, counts like 1e9, lists with commas; an empty one is unset."""
    monkeypatch.setenv("CONVGRAD_BODY_LIMIT", "64MiB")
    monkeypatch.setenv("CONVGRAD_WORK_LIMIT", "1e12")
    monkeypatch.setenv("CONVGRAD_JSON_LIMIT", "1e6")
    monkeypatch.setenv("CONVGRAD_CORS", "https://example.org, https://example.com")
    monkeypatch.setenv("CONVGRAD_PORT", "")
    settings = Settings()
    assert settings.body_limit == 64 << 20
    assert (settings.work_limit, settings.json_limit) == (10**12, 10**6)
    assert settings.cors == ("https://example.org", "https://example.com")
    assert settings.port == 8000


def test_flags_take_precedence_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flag is the setting's name in kebab case, and overrides the variable."""
    monkeypatch.setenv("CONVGRAD_QUEUE_LENGTH", "7")
    monkeypatch.setenv("CONVGRAD_PORT", "1234")
    settings, dry_run = read_settings(["--queue-length", "9"])
    assert not dry_run
    assert (settings.queue_length, settings.port) == (9, 1234)


def test_defaults_depend_on_the_container() -> None:
    """Zero workers or zero memory means as much as there is."""
    settings = Settings()
    assert settings.worker_count == cpu_count()
    assert 0 < settings.memory_budget < memory_bytes()
    chosen = Settings(workers=3, memory_limit=ByteSize(5 << 20))
    assert (chosen.worker_count, chosen.memory_budget) == (3, 5 << 20)


@pytest.mark.parametrize("text", ["https://a.org,https://b.org", '["https://a.org", "https://b.org"]'])
def test_lists_have_commas_or_are_json(text: str) -> None:
    """A list may have commas or be JSON, in a variable as in a flag."""
    assert read_settings(["--cors", text])[0].cors == ("https://a.org", "https://b.org")


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--port x", "--port x: must be an integer"),
        ("--workers 1e400", "--workers 1e400: must be an integer"),
        ("--port 65536", "--port 65536: must be at most 65535"),
        ("--memory-limit 1PB", "--memory-limit: must be at most the memory of this machine or container"),
        ("--body-limit lots", "--body-limit: could not parse value and unit"),
        ("--work-limit 1e99x", "--work-limit 1e99x: must be an integer"),
        ("--engine rya", "--engine: Input should be 'local' or 'ray'"),
        ("--keys-file /nowhere", "--keys-file: Path does not point to a file"),
        ("--cors example.org", "--cors: must be origins such as https://example.org, without a path, or *"),
        ("--cors https://a.org/", "--cors: must be origins"),
        ("--allowed-hosts http://a.org", "--allowed-hosts: must be host names and addresses without"),
        (f"--tls-key {__file__}", "--tls-key: needs --tls-certificate"),
        ("--host 0.0.0.0", "--host: must be a loopback address while there are no API keys"),
        ("--wokers 2", "--wokers is not a flag of convgrad serve; did you mean --workers?"),
        ("--port", "argument --port: expected one argument (convgrad serve --help"),
    ],
)
def test_a_refusal_names_the_flag_and_the_rule(flags: str, line: str) -> None:
    """A setting that is wrong is named with the rule, and with its value only if that is a number."""
    with pytest.raises(UsageError) as caught:
        read_settings(flags.split())
    assert str(caught.value).startswith(line)


def test_all_wrong_settings_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong flags and wrong variables are listed in one run, without the values of secrets."""
    monkeypatch.setenv("CONVGRAD_KEYS_FILE", "/nowhere/secret")
    with pytest.raises(UsageError) as caught:
        read_settings(["--port", "x"])
    assert [line.partition(":")[0] for line in str(caught.value).splitlines()] == ["--port x", "--keys-file"]
    assert "secret" not in str(caught.value)


def test_a_gpu_has_one_worker() -> None:
    """A service on a GPU has one worker and plans for the GPU; more, or a cluster, are refused."""
    settings, _ = read_settings(["--device", "cuda"])
    assert settings.worker_count == settings.limits.workers == 1
    assert (settings.limits.device, Settings().limits.device) == ("cuda", "cpu")
    for flags, line in (
        (["--workers", "2"], "--device: cuda has one worker, but --workers is 2: start a service for each GPU"),
        (["--engine", "ray"], "--engine: ray computes on processors, but --device is cuda"),
    ):
        with pytest.raises(UsageError) as caught:
            read_settings(["--device", "cuda", *flags])
        assert str(caught.value) == line


def run(*flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the service without compiled kernels, to its end."""
    environment = {**os.environ, NAME: "reference", **environment}
    command = [sys.executable, "-m", "app", *flags]
    return subprocess.run(command, check=False, capture_output=True, text=True, env=environment, timeout=60)


@pytest.mark.heavy
def test_a_dry_run_prints_the_settings() -> None:
    """Settings are listed with status 0, secrets masked, even while the port is in use; unknown ones give a warning."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        flags = ["--dry-run", "--port", str(port), "--workers", "3"]
        done = run(*flags, CONVGRAD_KEYS=f"team sha256:{'ab' * 32}", CONVGRAD_DRAIN="1")
    assert done.returncode == 0
    assert {f"port = {port}", "workers = 3", "keys = **********"} <= set(done.stdout.splitlines())
    assert "CONVGRAD_DRAIN is not a setting and is ignored; did you mean CONVGRAD_DRAIN_S?" in done.stderr


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--wokers", "2"], "--wokers is not a flag of convgrad serve"),
        (["--keys", ";"], "there is no key, and every call would be rejected: "),
        (["--tls-certificate", __file__], "certificate, key and CAs must be PEM files that belong together: "),
    ],
)
@pytest.mark.parametrize("dry", [["--dry-run"], []], ids=["dry run", "start"])
def test_what_cannot_be_used_ends_the_process(flags: list[str], message: str, dry: list[str]) -> None:
    """A start and a dry run end with status 2 and the same line."""
    done = run(*dry, *flags)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(message)
    assert len(done.stderr.splitlines()) == 1


def test_an_unknown_variable_gives_a_warning_with_the_closest_name() -> None:
    """An unknown variable with our prefix is probably a typo."""
    (line,) = unknown_variables(["CONVGRAD_MEMROY_LIMIT", "CONVGRAD_PORT", "convgrad_port", "CONVGRAD_URL", "PATH"])
    assert line.startswith("CONVGRAD_MEMROY_LIMIT is not a setting")
    assert "CONVGRAD_MEMORY_LIMIT" in line


def test_every_variable_of_the_project_is_known() -> None:
    """No variable named in code, scripts or pages is taken for a typo."""
    root = Path(__file__).resolve().parents[2]
    listed = subprocess.run(["git", "ls-files"], cwd=root, check=True, capture_output=True, text=True).stdout
    files = [root / name for name in listed.splitlines() if not name.startswith(("tests/", "CHANGELOG"))]
    texts = [file.read_bytes().decode(errors="replace") for file in files if file.is_file()]
    named = {name for text in texts for name in re.findall(r"\bCONVGRAD_[A-Z_0-9]*[A-Z0-9]\b", text)}
    constants = set(re.findall(r"\bCONVGRAD_[A-Z_0-9]*[A-Z0-9]\b", (root / "convgrad" / "kernel.h").read_text()))
    assert not list(unknown_variables(named - constants))


def machine(root: Path, controller: str, group: str, *, version: int, place: str = "/") -> Path:
    """Create the files that a process in a control group sees; return the folder where the controller is mounted."""
    (root / "proc" / "self").mkdir(parents=True)
    listed = f"0::{group}" if version == 2 else f"7:{controller},other:{group}"
    (root / "proc" / "self" / "cgroup").write_text(f"{listed}\n1:name=systemd:/elsewhere\n")
    kind = "cgroup2 cgroup rw" if version == 2 else f"cgroup cgroup rw,{controller},other"
    mounts = f"30 1 0:1 / / rw - ext4 /dev/vda rw\n31 30 0:2 {place} /groups rw,relatime shared:1 - {kind}\n"
    (root / "proc" / "self" / "mountinfo").write_text(mounts)
    return root / "groups"


def write(file: Path, text: str) -> None:
    """Write a file of a control group, creating its folders."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.mark.parametrize(
    ("quota", "most"), [("50000 100000", 1), ("150000 100000", 2), ("max 100000", 10**6), ("junk", 10**6)]
)
def test_a_quota_limits_the_processors(tmp_path: Path, quota: str, most: int) -> None:
    """A control group with half a processor gets one worker, with one and a half two."""
    write(machine(tmp_path, "cpu", "/", version=2) / "cpu.max", quota)
    assert 1 <= cpu_count(tmp_path) <= most


def test_the_quota_of_the_first_version(tmp_path: Path) -> None:
    """Version 1 of control groups is supported too; -1 means no quota."""
    folder = machine(tmp_path, "cpu", "/a", version=1) / "a"
    write(folder / "cpu.cfs_quota_us", "100000")
    write(folder / "cpu.cfs_period_us", "100000")
    assert cpu_count(tmp_path) == 1
    write(folder / "cpu.cfs_quota_us", "-1")
    assert cpu_count(tmp_path) == cpu_count(tmp_path / "none")


@pytest.mark.parametrize(("version", "name"), [(1, "memory.limit_in_bytes"), (2, "memory.max")])
@pytest.mark.parametrize("at", ["a.slice/b.service", "a.slice", "."])
def test_the_memory_limit_of_any_group_around_counts(tmp_path: Path, version: int, name: str, at: str) -> None:
    """The smallest limit of the process's group and its ancestors applies; "max" is none."""
    folder = machine(tmp_path, "memory", "/a.slice/b.service", version=version)
    for group in ("a.slice/b.service", "a.slice"):
        write(folder / group / name, "max")
    assert memory_bytes(tmp_path) == memory_bytes(tmp_path / "none")
    write(folder / at / name, "1048576\n")
    assert memory_bytes(tmp_path) == 1 << 20


def test_a_container_that_sees_its_own_group_alone(tmp_path: Path) -> None:
    """If the mount's root is the group itself, or the group lies outside it, the limit is read at the mount."""
    folder = machine(tmp_path / "inside", "memory", "/docker/1", version=1, place="/docker/1")
    write(folder / "memory.limit_in_bytes", "1048576")
    assert memory_bytes(tmp_path / "inside") == 1 << 20
    write(machine(tmp_path / "outside", "memory", "/../other", version=2) / "memory.max", "2097152")
    assert memory_bytes(tmp_path / "outside") == 2 << 20


@pytest.mark.parametrize(("version", "names"), [(1, ("limit_in_bytes", "usage_in_bytes")), (2, ("max", "current"))])
def test_what_a_group_has_used_is_not_free(tmp_path: Path, version: int, names: tuple[str, str]) -> None:
    """The free memory of a control group is its limit minus its usage, in which cached files do not count."""
    folder = machine(tmp_path, "memory", "/a", version=version) / "a"
    write(folder / f"memory.{names[0]}", "1000000")
    write(folder / f"memory.{names[1]}", "700000")
    assert free_memory(tmp_path) == 300_000
    write(folder / "memory.stat", "anon 500000\ninactive_file 200000\n")
    assert free_memory(tmp_path) == 500_000
    write(tmp_path / "proc" / "meminfo", "MemTotal: 900 kB\nMemAvailable: 100 kB\n")
    assert free_memory(tmp_path) == 100 << 10


def test_an_address_space_limit_limits_the_memory() -> None:
    """The limit set by `ulimit -v` applies."""
    script = "from engine.container import memory_bytes; print(memory_bytes())"
    command = ["prlimit", f"--as={1 << 30}", sys.executable, "-c", script]
    assert int(subprocess.run(command, check=True, capture_output=True, text=True).stdout) == 1 << 30


def test_many_workers_are_warned_of() -> None:
    """Far more workers than processors are allowed, with a warning."""
    assert not list(many_workers(Settings(workers=1)))
    (line,) = many_workers(Settings(workers=500))
    assert line.startswith("--workers 500: there are ")
